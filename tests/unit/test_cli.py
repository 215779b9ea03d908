"""The command line without ranks: arguments, the report of a run, Slurm, the message of a failed rank."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from rlcore.cli.compose import compose_run_config
from rlcore.cli.launch import (
    find_cause,
    is_rank,
    join_slurm,
    print_first_failure,
    record_error,
    report_rank_error,
    world_size,
)
from rlcore.cli.main import main, parse
from rlcore.cli.pictures import draw_pictures, token_layers
from rlcore.cli.progress import LineDisplay, TerminalDisplay, describe, make_display
from rlcore.cli.report import first_and_last, summary_table, write_report
from rlcore.cli.train_command import train_rank
from rlcore.masks import WHY_LEFT

ROOT = Path(__file__).resolve().parents[2]


def records(rewards):
    return [
        {
            "step": step,
            "reward/mean": reward,
            "loss/total": 0.5,
            "batch/tokens": 100.0,
            "time/step_s": 0.5,
            "time/tokens_per_s": 200.0,
            "mismatch/abs_max": 1e-6,
            "mismatch/out_of_support": 0.25 if step == 0 else 0.0,
            "update/skipped": 0,
        }
        for step, reward in enumerate(rewards)
    ]


@pytest.fixture
def run_folder(tmp_path):
    lines = [json.dumps(record) + "\n" for record in records([i / 40 for i in range(40)])]
    tmp_path.joinpath("metrics.jsonl").write_text("".join(lines))
    return tmp_path


def test_options_and_words_come_in_any_order():
    args = parse(["train", "a=1", "--nproc", "4", "b=2", "--config-name", "x", "c=3"])
    assert (args.nproc, args.config_name, args.overrides) == (4, "x", ["a=1", "b=2", "c=3"])
    with pytest.raises(SystemExit):
        parse(["train", "--nprocs", "4", "--no-such-option"])
    with pytest.raises(SystemExit):
        parse(["plot", "runs/x", "a=1"])


def test_first_and_last_steps():
    """40 steps of i/40: the first ten average 0.1125, the last ten 0.8625; a short run uses its halves."""
    assert first_and_last([i / 40 for i in range(40)]) == pytest.approx((0.1125, 0.8625, 10))
    assert first_and_last([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((1.5, 4.5, 2))
    assert first_and_last([2.0]) == (2.0, 2.0, 1)


def test_the_report(run_folder):
    out = io.StringIO()
    write_report(run_folder, seconds=12.3, console=Console(file=out, width=100))
    for text in (out.getvalue(), run_folder.joinpath("report.txt").read_text()):
        assert "0.1125" in text and "0.8625" in text and "+0.7500" in text
        assert "200" in text and "12.3 s" in text and "25.00% at most" in text
    assert run_folder.joinpath("reward.png").read_bytes().startswith(b"\x89PNG")


def test_plot_draws_again_and_says_what_is_missing(run_folder, capsys):
    with pytest.raises(SystemExit) as left:
        main(["plot", str(run_folder)])
    assert left.value.code == 0 and "reward.png" in capsys.readouterr().out
    assert run_folder.joinpath("reward.png").stat().st_size > 5000
    assert not run_folder.joinpath("tokens.png").exists(), "no step counted a token"
    with pytest.raises(SystemExit) as left:
        main(["plot", str(run_folder / "nowhere")])
    assert left.value.code == 2 and "is not the folder of a run" in capsys.readouterr().err


def test_why_tokens_left_is_a_picture_of_layers_that_add_up(tmp_path):
    """Each step's layers end at all its tokens; a refused step, which counted nothing, is left out."""
    counted = [
        {"step": step, "reward/mean": 0.5} | {name: float(i + step) for i, name in enumerate(WHY_LEFT)}
        for step in range(5)
    ]
    paths = draw_pictures([*counted, {"step": 5, "reward/mean": 0.5}], tmp_path)
    assert [path.name for path in paths] == ["reward.png", "tokens.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    tops = [float(layer.get_paths()[0].vertices[:, 1].max()) for layer in token_layers(counted)]
    assert tops == [sum(range(n)) + n * 4 for n in range(1, len(WHY_LEFT) + 1)]


def test_plain_lines_where_there_is_no_terminal():
    out = io.StringIO()
    display = make_display(30, Console(file=out, width=40))
    assert isinstance(display, LineDisplay)
    with display:
        display.step(records([0.5])[0])
        display.note("step 0: [update] skipped")
    assert out.getvalue().splitlines() == [
        "step    1/30  reward 0.500  loss 0.5000  tokens/s 200",
        "step 0: [update] skipped",
    ]


def test_a_bar_on_a_terminal():
    out = io.StringIO()
    display = make_display(2, Console(file=out, force_terminal=True, width=120))
    assert isinstance(display, TerminalDisplay)
    with display:
        for record in records([0.5, 0.75]):
            display.step(record)
    assert "2/2" in out.getvalue() and "reward 0.750" in out.getvalue()


def test_a_step_without_a_loss_is_described_too():
    assert describe({"reward/mean": 0.25}) == "reward 0.250"
    assert summary_table(records([0.1, 0.2]), 1.0).row_count == 9


def test_slurm_tasks_get_their_place_in_the_run():
    env = {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "8",
        "SLURM_LOCALID": "1",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
    }
    join_slurm(env)
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == ("5", "8", "1")
    assert is_rank(env) and world_size(env) == 8
    with pytest.raises(ValueError, match="MASTER_PORT is not set"):
        join_slurm({key: value for key, value in env.items() if key not in ("RANK", "MASTER_PORT")})


def test_a_batch_script_is_not_a_rank():
    """sbatch sets SLURM_PROCID=0 in the script itself; only srun's tasks have a step."""
    env = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
    join_slurm(env)
    assert not is_rank(env)
    with pytest.raises(ValueError, match="WORLD_SIZE is not"):
        world_size({"RANK": "0"})


# What torch's transports said on a rank whose peer had ended, or did not come.
CLOSED = (
    "RuntimeError: [/src/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:9."
)
RESET = "RuntimeError: [/src/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [::1]:6: reset"
LATE = "RuntimeError: [/src/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 600000ms for recv"
STORE = (
    "DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the server shut down?"
)
RELAYED = "ValueError: rank 1 of 4 failed: KeyError: 'x'"


@pytest.fixture
def failed(tmp_path):
    """Makes torchrun's error of failed ranks as torchrun does, from (exit code, message or None) by rank. The
    files are written in the order of the ranks, or in that of `written`.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    def make(ranks, written=()):
        failures = {}
        for rank, (exit_code, message) in ranks.items():
            path = tmp_path / f"error{rank}.json"
            path.unlink(missing_ok=True)
            if message is not None:
                code = 2 if message.startswith(("ValueError", "ConfigError")) else 1
                extra = {"py_callstack": f"STACK {rank}\n", "timestamp": "1700000000"}
                path.write_text(
                    json.dumps({"message": {"message": message, "errorCode": code, "extraInfo": extra}})
                )
                when = (written or list(ranks)).index(rank)
                os.utime(path, ns=(0, 1_700_000_000_000_000_000 + when * 1_000_000))
            failures[rank] = ProcessFailure(rank, 1234, exit_code, str(path))
        return ChildFailedError("rlcore", failures)

    return make


def test_a_failed_rank_becomes_one_message(capsys, failed):
    message = "ConfigError: x=1: no: such key"
    assert print_first_failure(failed({3: (2, message)})) == 2
    assert capsys.readouterr().err == "rlcore: error: x=1: no: such key\n"
    assert print_first_failure(failed({3: (1, "KeyError: 'x'")})) == 1
    assert capsys.readouterr().err == "STACK 3\nrlcore: rank 3 failed (exit code 1): KeyError: 'x'\n"


def test_a_rank_that_was_ended_while_it_left_still_has_its_message(capsys, failed):
    assert print_first_failure(failed({0: (1, CLOSED), 1: (-15, "ValueError: x=1: fix it")})) == 2
    assert capsys.readouterr().err == "rlcore: error: x=1: fix it\n"


def test_a_rank_without_a_message_is_described(capsys, failed):
    """Neither torchrun's <NONE> nor its hint at a decorator: the signal's name, or the exit code."""
    for exit_code, text in [
        (-9, "rank 3 was killed by SIGKILL (exit code -9). The system does that when memory runs out."),
        (-11, "rank 3 was killed by SIGSEGV (exit code -11)."),
        (-15, "rank 3 was killed by SIGTERM (exit code -15)."),
        (7, "rank 3 ended without a message (exit code 7)."),
    ]:
        assert print_first_failure(failed({3: (exit_code, None)})) == 1
        assert capsys.readouterr().err == f"rlcore: {text}\n"


@pytest.mark.parametrize("peer", [CLOSED, RESET, LATE, STORE, RELAYED])
@pytest.mark.parametrize("written", [(0, 1), (1, 0)])
def test_the_cause_is_told_from_what_its_peers_saw(capsys, failed, peer, written):
    """All within one second, and the peer's file may be the older one."""
    ranks = {0: (1, peer), 1: (1, "KeyError: 'x'"), 2: (-15, None)}
    print_first_failure(failed(ranks, [*written, 2]))
    assert "rank 1 failed (exit code 1): KeyError: 'x'\n" in capsys.readouterr().err
    if peer != RELAYED:
        print_first_failure(failed({0: (1, peer), 1: (-15, None), 2: (-9, None)}))
        assert "rank 2 was killed by SIGKILL" in capsys.readouterr().err


def test_the_first_of_two_causes_is_told(capsys, failed):
    for written in ([0, 1], [1, 0]):
        print_first_failure(failed({0: (1, "KeyError: 0"), 1: (1, "KeyError: 1")}, written))
        assert f"rank {written[0]} failed" in capsys.readouterr().err


def test_a_time_out_names_its_key_and_comes_before_the_lost_connection_it_causes(capsys, failed):
    print_first_failure(failed({0: (1, CLOSED), 1: (1, LATE)}))
    said = capsys.readouterr().err
    assert "rank 1 failed" in said and "Timed out" in said and "parallel.timeout_s" in said
    print_first_failure(failed({0: (1, CLOSED)}))
    said = capsys.readouterr().err
    assert "Another rank ended first" in said and "parallel.timeout_s" not in said


def test_a_connection_of_the_users_own_is_no_peer():
    assert find_cause("ConnectionError: grader.example: Connection refused") == "own"
    assert find_cause("RuntimeError: CUDA out of memory") == "own"


def test_the_first_error_of_a_rank_is_recorded_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    for error in (KeyError("first"), RuntimeError("second")):
        try:
            raise error
        except Exception as caught:
            record_error(caught)
    message = json.loads(tmp_path.joinpath("error.json").read_text())["message"]
    assert message["message"] == "KeyError: 'first'" and message["errorCode"] == 1
    assert "Traceback" in message["extraInfo"]["py_callstack"]


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit("boom")])
def test_a_rank_records_its_error_before_it_drops_its_connections(tmp_path, monkeypatch, error):
    path = tmp_path / "error.json"
    recorded = []

    class Worker:
        def __init__(self, config, vocab_size):
            self.decoder, self.num_positions = SimpleNamespace(vocab_size=64), 64
            self.groups = SimpleNamespace(is_model_leader=False)

        def close(self):
            recorded.append(path.exists() and json.loads(path.read_text())["message"]["message"])

    def fail(*_):
        raise error

    monkeypatch.setitem(sys.modules, "megatron_worker.worker", SimpleNamespace(MegatronWorker=Worker))
    monkeypatch.setattr("rlcore.trainer.train", fail)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    with pytest.raises(type(error)):
        train_rank(compose_run_config("demo"))
    assert recorded == [f"{type(error).__name__}: boom"]


@pytest.mark.parametrize(
    ("rank", "error", "said"),
    [
        ("0", ValueError("x=1"), "rlcore: error: x=1\n"),
        ("1", ValueError("x=1"), ""),
        ("1", KeyError("x"), "rlcore: rank 1 failed: KeyError: 'x'\n"),
        ("1", SystemExit(3), "rlcore: rank 1 failed: SystemExit: 3\n"),
        ("0", RuntimeError(CLOSED.partition(": ")[2]), "Another rank ended first"),
        ("1", RuntimeError(CLOSED.partition(": ")[2]), ""),
    ],
)
def test_who_speaks_under_a_launcher_of_your_own(monkeypatch, capsys, rank, error, said):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert report_rank_error(error, launched=False) == (2 if isinstance(error, ValueError) else 1)
    heard = capsys.readouterr().err
    assert said in heard and bool(said) == bool(heard)
    report_rank_error(error, launched=True)
    assert capsys.readouterr().err == ""


def _run_as_rank(monkeypatch, words, outcome=None):
    """Runs the command as rank 0 of 8 up to the training; returns its exit code and config."""
    seen = []

    def train_rank(config):
        seen.append(config)
        if outcome is not None:
            raise outcome

    monkeypatch.setattr("rlcore.cli.train_command.train_rank", train_rank)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(SystemExit) as left:
        main(["train", "train.microbatch_size=8", *words])
    return left.value.code, seen


def test_the_config_of_a_rank_holds_the_real_number_of_ranks(monkeypatch, tmp_path):
    """demo.yaml says 4."""
    code, seen = _run_as_rank(monkeypatch, [f"run_dir={tmp_path}/run"])
    assert code == 0 and seen[0].nproc == 8


def test_a_task_that_exits_is_a_failed_rank(monkeypatch, tmp_path, capsys):
    code, _ = _run_as_rank(monkeypatch, [f"run_dir={tmp_path}/run"], SystemExit(0))
    assert code == 1 and "rank 0 failed: SystemExit: 0" in capsys.readouterr().err
    code, _ = _run_as_rank(monkeypatch, [f"run_dir={tmp_path}/run"], KeyboardInterrupt())
    assert code == 130


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.stepz=3"], "train.stepz: no such key. Did you mean train.steps?"),
        (["sampling.top_p=1.2"], "sampling.top_p=1.2"),
        (
            ["--nproc", "6"],
            "nproc=6 processes do not factor into model replicas of parallel.tp=2 x parallel.pp=2",
        ),
        (["--nproc", "0"], "nproc=0: expected a count of at least 1"),
        (["--nproc", "-4"], "nproc=-4: expected a count of at least 1"),
        (["run_dir=/proc/nope/run"], "run_dir=/proc/nope/run cannot be written"),
        (["parallel.tp=3", "nproc=6"], "parallel.tp=3 does not divide model.num_attention_heads=4"),
    ],
)
def test_bad_words_stop_before_any_rank_starts(tmp_path, words, message):
    """One line, exit code 2, within seconds, nothing written."""
    command = [sys.executable, "-m", "rlcore.cli", "train", f"run_dir={tmp_path}/run", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert (
        done.stderr.count("\n") == 1 and done.stderr.startswith("rlcore: error: ") and message in done.stderr
    )
    assert not (tmp_path / "run").exists()
