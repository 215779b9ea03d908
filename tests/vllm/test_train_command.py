"""`rlcore train` against a real engine: it trains; an engine that is killed ends the run on every rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.commands import ROOT, free_port, outside_of_ranks

pytestmark = pytest.mark.timeout(240)
MOST_SECONDS_TO_END = 30.0
START_S = 150.0


def start_ranks(folder: Path, *words: str) -> list[subprocess.Popen]:
    """Two ranks as a foreign launcher starts them, each with a file for its error, as torchrun gives one."""
    pytest.importorskip("vllm")
    words = (
        *("--config-name", "demo", "rollout=vllm", f"run_dir={folder / 'run'}", "nproc=2"),
        *("parallel.tp=2", "parallel.pp=1", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4"),
        *("train.microbatch_size=16", *words),
    )
    port = str(free_port())
    ranks = []
    for rank in range(2):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        env = {**outside_of_ranks(), **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env |= {"TORCHELASTIC_ERROR_FILE": str(folder / f"error_{rank}.json"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "rlcore.cli", "train", *words]
        output = (folder / f"output_{rank}.txt").open("w")
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output))
    return ranks


def records_of(folder: Path) -> list[dict]:
    path = folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def children_of(pid: int) -> list[int]:
    """Every descendant, of which vLLM's engine is one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue  # gone meanwhile
            if parent == pid:
                found += [int(entry.name), *children_of(int(entry.name))]
    return found


def engine_of(rank: subprocess.Popen) -> int:
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children_of(rank.pid)}
    (pid,) = [pid for pid, name in names.items() if b"EngineCore" in name]
    return pid


def wait_until(condition, seconds: float, what: str) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, what
        time.sleep(0.1)
    return time.monotonic() - started


def said_by(folder: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("output_*.txt")))


def test_an_engine_that_is_killed_ends_the_run_on_every_rank(tmp_path):
    """Before that, three steps of the demo: the trainer agrees with vLLM after every weight update."""
    ranks = start_ranks(tmp_path, "train.steps=100000")
    try:
        alive = lambda: all(rank.poll() is None for rank in ranks)  # noqa: E731
        wait_until(lambda: len(records_of(tmp_path)) >= 3 or not alive(), START_S, said_by(tmp_path))
        assert alive(), said_by(tmp_path)
        os.kill(engine_of(ranks[0]), signal.SIGKILL)
        took = wait_until(lambda: not any(rank.poll() is None for rank in ranks), 60.0, "a rank still runs")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert took < MOST_SECONDS_TO_END
    for rank in ranks:
        assert rank.returncode != 0
    for number in range(2):
        message = json.loads((tmp_path / f"error_{number}.json").read_text())["message"]["message"]
        assert "vLLM's engine process has died" in message, message
    assert "vLLM's engine process has died" in said_by(tmp_path)
    records = records_of(tmp_path)
    # What was written before is whole.
    assert [record["step"] for record in records] == list(range(len(records)))
    for record in records[:3]:
        assert record["mismatch/abs_max"] < 1e-4 and record["mismatch/out_of_support"] == 0.0
        assert record["ratio/min"] == pytest.approx(1, abs=1e-4)
        assert record["optimizer/grad_norm"] > 0 and record["rollout/staleness"] == 0


@pytest.mark.slow
def test_an_engine_does_not_outlive_its_rank(tmp_path):
    """kill -9 of rank 0: nobody is left who could end the engine."""
    ranks = start_ranks(tmp_path, "train.steps=100000")
    try:
        wait_until(lambda: records_of(tmp_path) or ranks[0].poll() is not None, START_S, said_by(tmp_path))
        engine = Path("/proc", str(engine_of(ranks[0])))
        ranks[0].kill()
        ranks[0].wait()
        wait_until(lambda: not engine.exists(), 10.0, "the engine is still there")
        wait_until(lambda: ranks[1].poll() is not None, MOST_SECONDS_TO_END, "rank 1 still runs")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
