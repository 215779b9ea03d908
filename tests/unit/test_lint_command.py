"""`rlcore lint` and the start of `rlcore train`, as commands: what is printed where, and the exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from rlcore.cli.main import main
from tests.lint_cases import ARGS, VLLM

ROOT = Path(__file__).resolve().parents[2]
RAW = "rollout.vllm.logprobs_mode=raw_logprobs"


@pytest.fixture(autouse=True)
def no_rank(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def command(capsys):
    """Runs the command in this process; returns exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(list(words))
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    return run


def test_a_clean_config(command):
    assert command("lint") == (0, "0 error(s), 0 warning(s).\n", "")


def test_findings_are_lines_errors_first_and_exit_code_1(command):
    code, out, err = command("lint", VLLM, "sampling.ties=all", RAW)
    assert code == 1 and err == ""
    lines = out.splitlines()
    assert lines[0] == "error: raw-logprobs: rollout.vllm.logprobs_mode"
    assert "    fix: Set rollout.vllm.logprobs_mode=processed_logprobs." in lines
    assert "warning: engine-ties: sampling.ties" in lines and lines[-1] == "1 error(s), 1 warning(s)."
    assert max(len(line) for line in lines) <= 110


def test_warnings_alone_are_exit_code_0(command):
    code, out, _ = command("lint", VLLM, "sampling.ties=all")
    assert code == 0 and out.endswith("0 error(s), 1 warning(s).\n")


def test_a_refusal_at_load_is_an_error_among_the_others(command):
    """Also keys that do not exist, without which the rest is judged, and types that end it."""
    code, out, _ = command("lint", VLLM, f"{ARGS}.top_p=0.8", "loss_fn.ratio_clip_mx=0.28", RAW)
    heads = [line for line in out.splitlines() if not line.startswith(" ")]
    assert code == 1 and heads == [
        "error: unknown-key: loss_fn",
        f"error: unseen-truncation: {ARGS}.top_p",
        "error: raw-logprobs: rollout.vllm.logprobs_mode",
        "3 error(s), 0 warning(s).",
    ]
    code, out, _ = command("lint", VLLM, RAW, "train=3", "seed=x", "rollout.vllm.urls=[3]", "train_=1")
    heads = [line for line in out.splitlines() if not line.startswith(" ")]
    assert code == 1 and heads == [
        "error: wrong-type: rollout.vllm.urls",
        "error: wrong-type: train",
        "error: wrong-type: seed",
        "error: unknown-key: train_",
        "4 error(s), 0 warning(s).",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.steps"], "'train.steps': expected key=value"),
        (["--config-name", "demoo"], "--config-name demoo: no such file"),
        (["--rollouts", "/nowhere/x"], "--rollouts /nowhere/x: cannot be read"),
    ],
)
def test_words_that_make_no_sense_are_exit_code_2(command, words, message):
    code, out, err = command("lint", *words)
    assert (code, out) == (2, "") and err.startswith(f"rlcore: error: {message}") and err.count("\n") == 1


def test_json_and_the_predicted_bias(command, tmp_path):
    """B18 over six tokens."""
    path = tmp_path / "sample.jsonl"
    path.write_text(json.dumps({"log_mass": [-0.126928] * 6}))
    code, out, _ = command("lint", VLLM, RAW, "--rollouts", str(path), "--json")
    said = json.loads(out)
    assert code == 1 and [finding["rule"] for finding in said["findings"]] == ["raw-logprobs"]
    assert said["findings"][0]["keys"] == ["rollout.vllm.logprobs_mode"]
    assert said["bias"]["sequence_factor_min"] == pytest.approx(0.466934, abs=1e-6)
    code, out, _ = command("lint", "--rollouts", str(path))
    assert code == 0 and "factor exp(mean log S) = 0.8808" in out and "top_p=0.95 " in out
    assert json.loads(command("lint", "--json")[1]) == {"findings": [], "bias": None}


def test_a_config_folder_of_your_own_and_a_group(command, tmp_path):
    tmp_path.joinpath("mine.yaml").write_text(
        "defaults:\n  - model: tiny\n  - loss: grpo\n  - _self_\nsampling: {temperature: 0.001}\n"
    )
    code, out, err = command("lint", "--config-dir", str(tmp_path), "--config-name", "mine", "loss=dapo")
    assert code == 0 and out.startswith("warning: tiny-temperature: sampling.temperature\n") and err == ""


@pytest.fixture
def started(monkeypatch):
    """Whether ranks were started, or this rank trained, instead of doing so."""
    calls: list[str] = []
    monkeypatch.setattr("rlcore.cli.launch.start_ranks", lambda *_: calls.append("ranks") or 0)
    monkeypatch.setattr("rlcore.cli.train_command.train_rank", lambda _: calls.append("rank"))
    return calls


def test_train_ends_before_any_rank_starts(command, started, tmp_path):
    """All findings, then one line; exit code 2."""
    code, out, err = command("train", f"run_dir={tmp_path}/run", VLLM, RAW, "sampling.ties=all")
    assert (code, out, started) == (2, "", []) and not tmp_path.joinpath("run").exists()
    heads = [line for line in err.splitlines() if not line.startswith(" ")]
    assert heads[:3] == [
        "error: raw-logprobs: rollout.vllm.logprobs_mode",
        "warning: engine-ties: sampling.ties",
        "1 error(s), 1 warning(s).",
    ]
    assert heads[3].startswith("rlcore: error: this run would train on wrong numbers (raw-logprobs).")


def test_train_prints_warnings_once_and_starts(command, started, tmp_path):
    words = ("train", f"run_dir={tmp_path}/run", "sampling.temperature=0.001")
    with warnings.catch_warnings(record=True) as told:
        code, out, err = command(*words)
    assert (code, out, started) == (0, "", ["ranks"])
    assert not [warning for warning in told if "acts as" in str(warning.message)]
    assert err.count("tiny-temperature") == 1 and err.count("acts as") == 1
    assert command("train", f"run_dir={tmp_path}/run") == (0, "", "")


@pytest.mark.parametrize(
    ("rank", "words", "speaks"),
    [("0", [], True), ("1", [], False), ("0", ["--as-rank"], False), ("1", ["--as-rank"], False)],
)
def test_one_process_of_a_run_speaks(command, started, monkeypatch, tmp_path, rank, words, speaks):
    """Rank 0 under a launcher of your own; the launcher, and no rank, under ours. All end on an error."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    run = ("train", f"run_dir={tmp_path}/run", *words)
    code, _, err = command(*run, "sampling.temperature=0.001")
    assert (code, started) == (0, ["rank"]) and ("tiny-temperature" in err) is speaks
    assert bool(err) is speaks
    code, _, err = command(*run, VLLM, RAW)
    assert (code, started) == (2, ["rank"]) and ("error: raw-logprobs" in err) is speaks


def test_b50_a_batch_that_does_not_divide(command, started, tmp_path):
    """10 sequences a step, 4 a microbatch, 2 replicas: refused by train, and by the linter."""
    words = [
        "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=5",
        "train.microbatch_size=4",
        "nproc=8",
    ]
    code, _, err = command("train", f"run_dir={tmp_path}/run", *words)
    assert (code, started) == (2, []) and "train.microbatch_size=4 x 2 data-parallel ranks = 8" in err
    code, out, _ = command("lint", *words)
    assert code == 1 and "error: processes: " in out


def test_the_installed_command():
    """One process of its own, from words to exit code."""
    words = [sys.executable, "-m", "rlcore.cli", "lint", VLLM, f"{ARGS}.bad_words=[a]"]
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stdout.startswith(f"error: bad-words: {ARGS}.bad_words\n")
    assert done.stderr == ""
