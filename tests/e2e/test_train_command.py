"""`rlcore train` from end to end: real ranks, real Megatron, and what a failing run leaves behind."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.commands import run_python

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(240)]

TWO_RANKS = [
    "nproc=2",
    "parallel.tp=2",
    "parallel.pp=1",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
]
TWO_RANKS += ["train.microbatch_size=16", "train.steps=3"]


def rlcore(*words: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    return run_python("-m", *launcher, *(("-m",) if launcher else ()), "rlcore.cli", *words)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in folder.joinpath("metrics.jsonl").read_text().splitlines()]


def test_the_demo_for_a_few_steps(tmp_path):
    """TP2 x PP2: every step reported, trainer and sampler agree, the ratio starts at 1, nothing is lost."""
    folder = tmp_path / "run"
    words = ["train", "--config-name", "demo", f"run_dir={folder}", "train.steps=3", "train.save_final=true"]
    done = rlcore(*words)
    assert done.returncode == 0, done.stderr
    assert "step    3/3" in done.stdout and "mean of last" in done.stdout
    assert "Warning" not in done.stderr
    records = lines(folder)
    assert [record["step"] for record in records] == [0, 1, 2]
    for record in records:
        assert record["mismatch/abs_max"] < 1e-4 and record["mismatch/out_of_support"] == 0.0
        assert record["ratio/min"] == pytest.approx(1, abs=1e-4)
        assert record["ratio/max"] == pytest.approx(1, abs=1e-4)
        assert record["tokens/trained"] == record["tokens/valid"] == record["response/length"] * 128
        assert record["update/skipped"] == 0 and record["optimizer/grad_norm"] > 0
    for name in ("config.yaml", "reward.png", "report.txt", "policy/step_3/config.json"):
        assert folder.joinpath(name).exists()
    again = rlcore(*words)
    assert again.returncode == 2 and "--overwrite" in again.stderr


@pytest.mark.slow
def test_the_demo_with_experts_for_two_steps(tmp_path):
    """EP2 x TP2: the replicas sample in step, the ratio starts at 1, and the folder is a Mixtral."""
    folder = tmp_path / "run"
    words = ["--config-name", "demo_moe", f"run_dir={folder}", "train.steps=2", "train.save_final=true"]
    done = rlcore("train", *words)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    records = lines(folder)
    assert [record["step"] for record in records] == [0, 1]
    for record in records:
        assert record["mismatch/abs_max"] < 1e-4 and record["mismatch/out_of_support"] == 0.0
        assert record["ratio/max"] == pytest.approx(1, abs=1e-4)
        assert record["tokens/trained"] == record["response/length"] * 128
        assert record["update/skipped"] == 0 and record["optimizer/grad_norm"] > 0
    saved = json.loads(folder.joinpath("policy/step_2/config.json").read_text())
    assert saved["model_type"] == "mixtral" and saved["num_local_experts"] == 4


@pytest.mark.slow
def test_a_step_without_any_reward_ends_the_run_with_one_line(tmp_path):
    """The first step stays in the folder, whole; the second leaves nothing."""
    folder = tmp_path / "run"
    done = rlcore("train", *TWO_RANKS, "task.name=tests.e2e.broken_tasks:RaisingTask", f"run_dir={folder}")
    assert done.returncode == 2, done.stderr
    message = (
        "none of the step's 16 responses has a reward: the reward function raised RuntimeError: the grader"
    )
    assert message in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.startswith("rlcore: error:") and done.stderr.count("\n") == 1
    assert [record["step"] for record in lines(folder)] == [0]
    assert not folder.joinpath("policy").exists() and not folder.joinpath("report.txt").exists()


def test_rewards_that_fail_cost_their_samples(tmp_path):
    """Of 16 samples 2 raise, 2 end their process and 2 hang; the run goes on, without a word more."""
    words = ["task.name=tests.e2e.broken_tasks:UnluckyTask", "task.reward_timeout_s=0.5"]
    words += ["task.reward_workers=2", f"run_dir={tmp_path}/run"]
    words += ["rollout.prompts_per_step=8", "rollout.samples_per_prompt=2"]
    done = rlcore("train", *TWO_RANKS, *words)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "step 1: 6 of 16 samples have no reward: the reward function raised RuntimeError:" in done.stdout
    assert "left with exit code 3" in done.stdout and "took more than 0.5 s" in done.stdout
    records = lines(tmp_path / "run")
    assert [record["samples/reward_failed"] for record in records] == [0.0, 6.0, 0.0]
    assert [record["samples/counted"] for record in records] == [16.0, 10.0, 16.0]
    assert all(record["update/skipped"] == 0.0 for record in records)
    assert records[1]["tokens/sample_masked"] > 0 == records[0]["tokens/sample_masked"]


def test_a_rank_that_dies_ends_the_run(tmp_path):
    """Its peer sees a lost connection, in the same second; the message is about the rank that died."""
    done = rlcore(
        "train", *TWO_RANKS, "task.name=tests.e2e.broken_tasks:KilledTask", f"run_dir={tmp_path}/run"
    )
    assert done.returncode == 1, done.stderr
    assert "rank 1 was killed by SIGKILL (exit code -9)" in done.stderr and "<NONE>" not in done.stderr


@pytest.mark.slow
def test_a_rank_that_waits_too_long_names_the_time_out(tmp_path):
    """15 s: room for the start of a busy machine, a quarter of what the grader takes; nothing limits it."""
    words = ["task.name=tests.e2e.broken_tasks:SlowTask", "task.reward_workers=0"]
    words += ["parallel.timeout_s=15", f"run_dir={tmp_path}/run"]
    done = rlcore("train", *TWO_RANKS, *words)
    assert done.returncode == 1, done.stderr
    assert "rank 1 failed" in done.stderr and "parallel.timeout_s" in done.stderr


@pytest.mark.parametrize("own_torchrun", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_error_of_one_rank_is_not_lost_among_the_lost_connections_of_the_others(tmp_path, own_torchrun):
    """Four ranks: rank 3 breaks, three peers see its connections close before or after it has left."""
    words = [
        "train",
        "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=4",
        "train.microbatch_size=16",
    ]
    words += ["train.steps=3", "task.name=tests.e2e.broken_tasks:LonelyTask", f"run_dir={tmp_path}/run"]
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "4") if own_torchrun else ()
    done = rlcore(*words, launcher=launcher)
    assert done.returncode == 1, done.stderr
    assert "RuntimeError: the batch is gone" in done.stderr and "in _broken" in done.stderr
    if not own_torchrun:
        assert "rank 3 failed (exit code 1)" in done.stderr and "Connection" not in done.stderr


def test_under_a_torchrun_of_your_own(tmp_path):
    """The command joins; a mistake is reported by rank 0 alone."""
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    folder = tmp_path / "run"
    done = rlcore("train", *TWO_RANKS, "nproc=4", "train.steps=1", f"run_dir={folder}", launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert len(lines(folder)) == 1
    assert "nproc: 2\n" in folder.joinpath("config.yaml").read_text(), "what ran, not what was asked for"
    done = rlcore("train", *TWO_RANKS, "task.args.lenght=3", f"run_dir={tmp_path}/other", launcher=launcher)
    assert done.returncode != 0
    assert done.stderr.count("rlcore: error: task.args.lenght") == 1
    assert not (tmp_path / "other").exists()
