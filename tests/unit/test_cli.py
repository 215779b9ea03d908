"""The command line without ranks: arguments, the report of a run, Slurm, the message of a failed rank."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from rlcore.cli.launch import is_rank, join_slurm, print_first_failure, world_size
from rlcore.cli.main import main, parse
from rlcore.cli.progress import LineDisplay, TerminalDisplay, describe, make_display
from rlcore.cli.report import first_and_last, summary_table, write_report

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
    with pytest.raises(SystemExit) as left:
        main(["plot", str(run_folder / "nowhere")])
    assert left.value.code == 2 and "is not the folder of a run" in capsys.readouterr().err


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


def _failed(exit_code, data, message="gone"):
    failure = SimpleNamespace(exitcode=exit_code, error_file_data=data, message=message)
    return SimpleNamespace(get_first_failure=lambda: (3, failure))


def test_a_failed_rank_becomes_one_message(capsys):
    data = {
        "message": {"message": "ConfigError: x=1: no: such key", "extraInfo": {"py_callstack": "STACK\n"}}
    }
    assert print_first_failure(_failed(2, data)) == 2
    assert capsys.readouterr().err == "rlcore: error: x=1: no: such key\n"
    assert print_first_failure(_failed(1, data)) == 1
    assert capsys.readouterr().err.startswith("STACK\nrlcore: rank 3 failed (exit code 1): ConfigError")
    assert print_first_failure(_failed(-9, None, "Signal 9 (SIGKILL)")) == 1
    assert "rank 3 failed (exit code -9): Signal 9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.stepz=3"], "train.stepz: no such key. Did you mean train.steps?"),
        (["sampling.top_p=1.2"], "sampling.top_p=1.2"),
        (
            ["--nproc", "6"],
            "nproc=6 processes do not factor into model replicas of parallel.tp=2 x parallel.pp=2",
        ),
        (["parallel.tp=3", "nproc=6"], "parallel.tp=3 does not divide model.num_attention_heads=4"),
    ],
)
def test_bad_words_stop_before_any_rank_starts(tmp_path, words, message):
    """One line, exit code 2, within seconds, nothing written."""
    command = [sys.executable, "-m", "rlcore.cli", "train", *words, f"run_dir={tmp_path}/run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert (
        done.stderr.count("\n") == 1 and done.stderr.startswith("rlcore: error: ") and message in done.stderr
    )
    assert not (tmp_path / "run").exists()
