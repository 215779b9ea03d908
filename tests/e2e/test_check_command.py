"""`rlcore check` from the command line: table, exit codes, what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rlcore.cli import check_command, launch
from rlcore.cli.check_command import layout_words, report
from rlcore.cli.main import main, parse
from tests.e2e.commands import run_python

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(240)]

GOOD = {"quantity": "logprob", "largest": 1e-7, "tolerance": 2e-5, "ok": True, "note": ""}
BAD = {"quantity": "loss", "largest": math.inf, "tolerance": 1e-5, "ok": False, "note": "rank 3"}


def test_a_layout_on_ranks_of_its_own(tmp_path):
    """Virtual stages, packed rows, an untied head: every line within its tolerance, in table and file."""
    file = tmp_path / "check.json"
    words = ["--pp", "2", "--vpp", "2", "--packed", "--json", str(file)]
    words += ["model.num_layers=4", "model.tie_word_embeddings=false"]
    done = run_python("-m", "rlcore.cli", "check", *words)
    assert done.returncode == 0, done.stderr
    assert "the layout matches one process." in done.stdout and "Warning" not in done.stderr
    assert "TP1 x PP2 x VPP2 x CP1 x DP1, 2 microbatches, packed rows" in done.stdout
    found = json.loads(file.read_text())
    assert all(line["ok"] and line["largest"] <= line["tolerance"] for line in found["lines"])
    for line in found["lines"]:
        assert line["quantity"] in done.stdout, "names are not cut"
    assert any(line["quantity"] == "gradient lm_head.weight" for line in found["lines"])


@pytest.mark.slow
def test_expert_parallelism_gives_a_dense_config_experts(tmp_path):
    """--ep 2 alone is two replicas; the title says what the tiny model is."""
    file = tmp_path / "check.json"
    done = run_python("-m", "rlcore.cli", "check", "--ep", "2", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "TP1 x PP1 x CP1 x DP2, EP2, 2 microbatches" in done.stdout and "Warning" not in done.stderr
    found = json.loads(file.read_text())
    assert found["layout"].endswith("4 experts, 2 a token (the config's model is dense and has none)")
    names = {line["quantity"] for line in found["lines"] if line["ok"]}
    assert {"loss scale", "gradient layers.*.block_sparse_moe.experts.*.w1.weight"} < names


@pytest.mark.slow
def test_a_mismatch_under_a_torchrun_of_your_own(tmp_path):
    """Both ranks leave with an error, rank 0 prints the table. One process has no TP rank 1 to be wrong."""
    script = tmp_path / "broken_job.py"
    script.write_text(
        "from rlcore.cli.main import main\n"
        "from tests.megatron.planted_faults import planted\n"
        "with planted('gradient_of_one_tp_rank_scaled'):\n"
        "    main(['check', '--tp', '2'])\n"
    )
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run_python(*launcher, str(script))
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("MISMATCH: 4 of") == 1, done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tp", "3"], "parallel.tp=3 does not divide model.num_attention_heads=4"),
        (["--pp", "3"], "model.num_layers=2 is not a multiple of parallel.pp=3"),
        (["--tp", "1", "--sp"], "parallel.sequence_parallel=true needs parallel.tp > 1"),
        (["--ep", "2", "--tp", "2"], "parallel.sequence_parallel=true"),
        (["--ep", "3", "--dp", "2"], "parallel.ep=3 does not divide 2 data-parallel x 1 context-parallel"),
        (["--ep", "0"], "ep=0: expected a count of at least 1"),
        (["--vpp", "2"], "parallel.vpp=2 virtual stages a pipeline rank need parallel.pp > 1"),
        (
            ["--pp", "2", "--vpp", "2", "model.num_layers=6"],
            "model.num_layers=6 is not a multiple of parallel.pp=2 x parallel.vpp=2 = 4",
        ),
        (["--microbatches", "0"], "num_microbatches=0: expected a count of at least 1"),
        (["--dp", "0"], "dp=0: expected a count of at least 1"),
        (["--token-budget", "8"], "12 tokens"),
        (["--config-name", "nowhere"], "--config-name nowhere: no such file"),
        (["--tp", "2", "parallel.sequence_parallel=true"], "parallel.sequence_parallel=true: the layout is"),
        (["--dp", "2", "parallel.tp=2"], "Write --tp instead"),
        (["--sp", "parallel.sequence_parallel=false"], "Write --sp instead"),
        (["nproc=6"], "nproc=6 processes do not factor into model replicas of parallel.tp=2 x parallel.pp=2"),
        (
            ["--json", "nowhere/check.json"],
            "--json nowhere/check.json: expected a file in a folder that exis",
        ),
        (["--pp", "2", "--vpp", "2", "--microbatches", "3"], "3 microbatches per optimizer step"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_built_is_exit_code_2_and_says_why(words, message, capsys, monkeypatch):
    monkeypatch.setattr(launch, "start_ranks", lambda *_: pytest.fail("no rank is started"))
    with pytest.raises(SystemExit) as left:
        main(["check", *words])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("rlcore: error:") and message in said


def test_the_layout_of_a_config_and_one_by_sizes():
    """No size: the config's own. Any size: the others are 1, whatever the config says."""
    assert layout_words(parse(["check", "--sp"])) == ["parallel.sequence_parallel=true"]
    _, layout = check_command.check_problem_of(parse(["check"]))
    assert (layout.tp, layout.pp, layout.cp, layout.dp) == (2, 2, 1, 1) and not layout.packs
    config, layout = check_command.check_problem_of(parse(["check", "--cp", "2", "--dp", "2"]))
    assert (layout.tp, layout.pp, layout.cp, layout.dp) == (1, 1, 2, 2) and layout.packs
    assert config.train.token_budget is not None and config.train.token_budget >= 12
    config, layout = check_command.check_problem_of(parse(["check", "--pp", "4", "--vpp", "2"]))
    assert (layout.tp, layout.pp, layout.vpp, layout.dp) == (1, 4, 2, 1) and config.model.num_layers == 8
    assert layout.num_microbatches == 4, "a group"
    words = ["check", "--tp", "4", "--sp", "--microbatches", "3", "model.num_query_groups=4"]
    config, layout = check_command.check_problem_of(parse(words))
    assert config.parallel.sequence_parallel and config.train.token_budget is None
    assert config.sequences_per_step == 18 and config.train.microbatch_size == 6
    # The run's loss and distribution, on a vocabulary that TP does not divide.
    assert config.model.vocab_size == 41 and config.sampling.top_k == 24 and config.sampling.temperature == 1
    _, layout = check_command.check_problem_of(parse(["check", "--cp", "2", "--ep", "4"]))
    assert (layout.cp, layout.dp, layout.ep, layout.adds_experts) == (2, 2, 4, True)
    config, layout = check_command.check_problem_of(parse(["check", "--config-name", "demo_moe"]))
    assert (layout.tp, layout.dp, layout.ep, layout.adds_experts) == (2, 2, 2, False)
    assert config.model.num_moe_experts == 4 and config.parallel.sequence_parallel
    _, layout = check_command.check_problem_of(parse(["check", "--config-name", "demo_moe", "--dp", "2"]))
    assert (layout.dp, layout.ep, layout.adds_experts) == (2, 1, False)
    _, layout = check_command.check_problem_of(parse(["check", "--token-budget", "64"]))
    assert layout.packs and layout.token_budget == 64


def test_under_a_launcher_the_configs_layout_takes_its_processes(monkeypatch):
    """As `rlcore train` does: the config's nproc counts for ranks that the command starts itself."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    _, layout = check_command.check_problem_of(parse(["check", "nproc=1"]))
    assert (layout.tp, layout.pp, layout.dp) == (2, 2, 2)
    monkeypatch.delenv("RANK")
    _, layout = check_command.check_problem_of(parse(["check", "nproc=1"]))
    assert (layout.tp, layout.pp, layout.dp) == (2, 2, 1), "a config for a launcher of its own"


def test_the_budget_of_the_check_is_its_tiny_batchs():
    """Not one that the run's longest response must fit."""
    words = ["check", "--token-budget", "24", "rollout.max_new_tokens=60", "model.max_position_embeddings=64"]
    _, layout = check_command.check_problem_of(parse(words))
    assert layout.packs and layout.token_budget == 24


def test_the_report_says_no_and_returns_1(tmp_path, capsys):
    assert report([GOOD], "a layout") == 0
    assert "matches" in capsys.readouterr().out
    file = tmp_path / "check.json"
    assert report([GOOD, BAD], "a layout", str(file)) == 1
    said = capsys.readouterr().out
    assert "NO" in said and "inf" in said and "MISMATCH: 1 of 2" in said
    assert [line["largest"] for line in json.loads(file.read_text())["lines"]] == [1e-7, None]


def test_a_narrow_terminal_shows_whole_numbers(capsys, monkeypatch):
    """80 columns, a long name: no number is cut."""
    from rich import console

    name = "gradient layers.*.block_sparse_moe.experts.*.w1.weight"
    line = {**GOOD, "quantity": name, "note": "stage 1: decoder.layers.0.mlp.experts"}
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(console.Console, "is_terminal", True)
    assert report([line], "a layout") == 0
    said = capsys.readouterr().out
    assert "1.0e-07" in said and "2.0e-05" in said and "yes" in said and "\u2026" not in said


@pytest.mark.parametrize(
    ("rank_code", "lines", "expected"), [(0, [GOOD, BAD], 1), (0, [GOOD], 0), (2, [], 2)]
)
def test_the_launcher_passes_on_what_the_ranks_found(rank_code, lines, expected, monkeypatch, capsys):
    """A mismatch is a result (1); a rank's own error keeps its code (2 where the user can fix it)."""

    def start_ranks(words, num_processes):
        assert num_processes == 2
        result = words[words.index("--result") + 1]
        if not rank_code:
            Path(result).write_text(json.dumps(lines))
        return rank_code

    monkeypatch.setattr(launch, "start_ranks", start_ranks)
    with pytest.raises(SystemExit) as left:
        main(["check", "--tp", "2"])
    assert left.value.code == expected
