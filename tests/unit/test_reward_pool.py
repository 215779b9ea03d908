"""Rewards in processes: what goes wrong costs one sample, in order, and no process outlives the run."""

from __future__ import annotations

import math
import os
import resource
import signal
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path

import pytest

from rlcore.batch import Prompt
from rlcore.config_rollout import TaskConfig
from rlcore.rollout.reward import InlineGrader, grade_response
from rlcore.rollout.reward_pool import RewardPool
from tests.reward_cases import ObeyingTask

ROOT = Path(__file__).resolve().parents[2]


def config(name="ObeyingTask", **changes):
    return TaskConfig(name=f"tests.reward_cases:{name}", **({"reward_timeout_s": 1.0} | changes))


def batch(*orders):
    """One prompt an order; responses of 0, 1, 2, ... tokens."""
    prompts = [Prompt(ids=[2], group_id=i, answer=order) for i, order in enumerate(orders)]
    return prompts, [[2] * i for i in range(len(orders))]


@pytest.fixture(scope="module")
def pool():
    with RewardPool(config(reward_workers=2), None, 0) as pool:
        yield pool


def outcomes(graded):
    return [one.reward if one.reward is not None else one.reason for one in graded]


def test_five_of_eight_are_lost_and_the_others_arrive_in_order(pool):
    """Then the processes that took the places of the lost ones grade the next batch, all of it."""
    graded = pool.grade(
        *batch(
            ("length", None),
            ("raise", KeyError("grade")),
            ("sleep", 60),
            ("length", None),
            ("exit", 1),
            ("return", math.nan),
            ("return", "1.0"),
            ("length", None),
        )
    )
    assert outcomes(graded) == [
        0.0,
        "the reward function raised KeyError: 'grade'",
        "the reward function took more than 1 s (task.reward_timeout_s)",
        3.0,
        "the reward process left with exit code 1",
        "the reward function returned nan; it must return a finite number of at most 1e+37 in magnitude",
        "the reward function returned a str; it must return a number",
        7.0,
    ]
    assert outcomes(pool.grade(*batch(*[("length", None)] * 6))) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_rank_may_hold_many_files():
    """Descriptors from 1024 on, which `select` does not take."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, most), most))
    held = [os.dup(0) for _ in range(1100)]
    try:
        with RewardPool(config(reward_workers=1, reward_timeout_s=20.0), None, 0) as pool:
            assert outcomes(pool.grade(*batch(("return", 2)))) == [2.0]
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


def test_a_reward_that_lets_no_thread_run_is_ended_too(pool):
    graded = pool.grade(*batch(("power", 12345), ("signal", signal.SIGSEGV), ("length", None)))
    assert outcomes(graded) == [
        "the reward function took more than 1 s (task.reward_timeout_s)",
        "the reward process was killed by SIGSEGV",
        2.0,
    ]


def test_a_reward_process_does_not_take_itself_for_a_rank(pool, monkeypatch):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    for name in names:
        monkeypatch.setenv(name, "1")
    pool.grade(*batch(("exit", 0), ("exit", 0)))  # the next two are started with these names
    assert outcomes(pool.grade(*batch(("names", names), ("names", names)))) == [0.0, 0.0]
    assert outcomes(InlineGrader(ObeyingTask(None, None, 0)).grade(*batch(("names", names)))) == [6.0]


def all_ready(pool):
    pool.grade(*batch(("length", None)))
    return all(process.is_ready for process in pool._processes)


def test_a_process_that_ends_between_two_batches_costs_one_sample(pool):
    # Processes that took the places of lost ones may still be starting.
    assert wait_until(lambda: all_ready(pool), 60)
    os.kill(pool._processes[0]._process.pid, signal.SIGKILL)
    graded = pool.grade(*batch(*[("length", None)] * 4))
    lost = [one.reason for one in graded if one.reward is None]
    assert lost == ["the reward process was killed by SIGKILL"]
    assert [one.reward for one in graded if one.reward is not None] == [
        float(i) for i, one in enumerate(graded) if one.reward is not None
    ]


def test_what_cannot_be_sent_costs_its_sample(pool):
    graded = pool.grade(*batch(("return", lambda: 1), ("length", None), ("return", 2)))
    assert graded[0].reward is None and "cannot be sent to a reward process" in graded[0].reason
    assert outcomes(graded[1:]) == [1.0, 2.0]
    assert pool.grade([], []) == []


@pytest.mark.parametrize(
    ("order", "outcome"),
    [
        (("return", True), 1.0),
        (("return", Decimal("0.5")), 0.5),
        (("return", 3), 3.0),
        (("return", None), "returned a NoneType"),
        (("return", math.inf), "returned inf"),
        (("return", -1e38), "returned -1e+38"),
        (("return", [1.0]), "returned a list"),
        (("raise", SystemExit(3)), "raised SystemExit: 3"),
        (("raise", ValueError("a\n b" + "x" * 999)), "raised ValueError: a bxxx"),
        (("raise", RuntimeError()), "raised RuntimeError"),
    ],
)
def test_what_counts_as_a_reward(order, outcome):
    (graded,) = InlineGrader(ObeyingTask(None, None, 0)).grade(*batch(order))
    if isinstance(outcome, float):
        assert graded.reward == outcome and graded.reason == ""
    else:
        assert graded.reward is None and outcome in graded.reason and len(graded.reason) <= 300
        assert "\n" not in graded.reason


def test_an_error_without_a_message_that_can_be_had():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    graded = grade_response(ObeyingTask(None, None, 0), batch(("raise", Mute()))[0][0], [])
    assert graded.reward is None and graded.reason == "the reward function raised Mute"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NeverMadeTask", "cannot build the task: RuntimeError: no grader here"),
        ("EndsWhileMadeTask", "left with exit code 7 while it built the task"),
    ],
)
def test_a_task_that_cannot_be_built_again_is_an_error(name, message):
    with RewardPool(config(name, reward_workers=1), None, 0) as pool:
        for said in (message, "this pool was closed"):
            with pytest.raises(ValueError, match=said):
                pool.grade(*batch(("length", None)))


def has_ended(pid: int) -> bool:
    """A process that is gone, or a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition, seconds=20.0):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def test_close_ends_processes_and_what_they_started(tmp_path):
    """A late process's own child is ended with it; so are the idle ones, at close."""
    with RewardPool(config(reward_workers=1, reward_timeout_s=2.0), None, 0) as pool:
        (graded,) = pool.grade(*batch(("child", str(tmp_path / "pids"))))
        assert "took more than 2 s" in graded.reason
        pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
        assert wait_until(lambda: all(has_ended(pid) for pid in pids))
        (idle,) = [process._process.pid for process in pool._processes]
        assert not has_ended(idle)
    assert has_ended(idle)


RANK = """
import sys
from tests.unit.test_reward_pool import RewardPool, batch, config
pool = RewardPool(config(reward_workers=2, reward_timeout_s=60.0), None, 0)
order = {order}
pool.grade(*batch(order, *[("child", sys.argv[1])][:{hang}]))
"""


@pytest.mark.parametrize("order", ["('power', 12345)", "('sleep', 60)"])
def test_processes_end_with_a_rank_that_is_killed(tmp_path, order):
    """kill -9: nothing of the rank runs any more, also from inside a power, which lets no thread run."""
    file = tmp_path / "pids"
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK.format(order=order, hang=1), str(file)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
    )
    assert wait_until(file.exists, 60)
    children = Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split()
    pids = [*map(int, children), *map(int, file.read_text().split())]
    assert len(set(pids)) == 3, "two reward processes, and the program that one has started"
    time.sleep(0.5)
    assert not any(has_ended(pid) for pid in pids)
    rank.kill()
    _, said = rank.communicate(timeout=20)
    assert wait_until(lambda: all(has_ended(pid) for pid in pids), 5)
    assert said == b""


def test_without_the_kernels_help_a_thread_ends_the_process():
    """Systems without F_SETSIG."""
    program = (
        "import fcntl, os, sys, time; del fcntl.F_SETSIG; os.setsid();"
        "from rlcore.rollout.reward_worker import end_with_parent;"
        "end_with_parent(int(sys.argv[1])); print('ready', flush=True); time.sleep(60)"
    )
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(read_end)],
        cwd=ROOT,
        pass_fds=[read_end],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    os.close(read_end)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    os.close(write_end)
    assert process.wait(10) == -signal.SIGKILL
    process.stdout.close()
