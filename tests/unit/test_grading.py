"""What a response without a reward costs: its sample, nowhere a number, on all ranks alike; a run when all
have none.
"""

from __future__ import annotations

import math
import threading

import pytest
import torch
import torch.distributed as dist

from rlcore.batch import Graded, Prompt, Rollout
from rlcore.collectives import record_collectives
from rlcore.config_rollout import TaskConfig
from rlcore.grading import score
from rlcore.groups import ParallelGroups
from rlcore.rollout.policy_sampler import PolicySampler
from rlcore.rollout.reward import InlineGrader
from rlcore.rollout.reward_pool import RewardPool
from rlcore.rollout.tasks import make_task
from rlcore.run_log import RunLog, read_metrics
from rlcore.trainer import train
from tests.rank_pool import run_ranks
from tests.toy_worker import ToyWorker, toy_config


class Display:
    def __init__(self):
        self.notes = []

    def step(self, record):
        self.notes.append(f"step {record['step']}")

    def note(self, text):
        self.notes.append(text)


class FixedGrader:
    """The outcomes of each step by row; a reason stands for a response without a reward."""

    limits_time = True

    def __init__(self, *steps):
        self._steps = iter(steps)

    def grade(self, prompts, responses):
        outcomes = next(self._steps)
        if isinstance(outcomes, BaseException):
            raise outcomes
        return [
            Graded(reward=None, reason=one) if isinstance(one, str) else Graded(reward=one)
            for one in outcomes
        ]


def run(config, grader, display=None):
    """The toy policy trained on these rewards; its worker and what the display showed."""
    torch.manual_seed(0)
    task = make_task(config.task, None, config.seed)
    worker = ToyWorker(config, task.vocab_size)
    engine = PolicySampler(worker, config.sampling.spec(), task.eos_id, 4, 16)
    display = display or Display()
    with RunLog(config, display) as log:
        train(config, worker, engine, task, grader, log)
    return worker, display.notes


def small_config(tmp_path, steps, **changes):
    """Two groups of four."""
    rollout = {"prompts_per_step": 2, "samples_per_prompt": 4, "max_new_tokens": 4}
    train_section = {"steps": steps, "microbatch_size": 8}
    return toy_config(run_dir=str(tmp_path / "run"), rollout=rollout, train=train_section, **changes)


BOOM = "the reward function raised RuntimeError: boom"


def test_a_failed_reward_leaves_its_group_and_every_figure(tmp_path):
    """Rewards 1, 2, -, 4: mean 7/3, sample variance 7/3, not those of 1, 2, 0, 4. By hand."""
    outcomes = [1.0, 2.0, BOOM, 4.0, 0.0, -1.0, 0.0, -1.0]
    worker, notes = run(small_config(tmp_path, 1), FixedGrader(outcomes))
    batch = worker.steps[0]
    assert batch.sample_mask_s.tolist() == [True, True, False, True] + [True] * 4
    deviation, half = math.sqrt(7 / 3), math.sqrt(3) / 2
    expected = [(1 - 7 / 3) / deviation, (2 - 7 / 3) / deviation, 0.0, (4 - 7 / 3) / deviation]
    expected += [half, -half, half, -half]
    for row, value in enumerate(expected):
        token_l = batch.advantage_sl[row][batch.token_mask_sl[row]]
        torch.testing.assert_close(token_l, torch.full_like(token_l, value), rtol=1e-5, atol=1e-6)
    (record,) = read_metrics(tmp_path / "run")
    assert record["reward/mean"] == pytest.approx((7 - 2) / 7) and record["reward/max"] == 4.0
    counts = [record[f"samples/{name}"] for name in ("counted", "reward_failed", "masked_truncated")]
    assert counts == [7.0, 1.0, 0.0]
    assert notes == ["step 0", f"step 0: 1 of 8 samples have no reward: {BOOM}"]


def test_negative_rewards_alone_have_a_negative_maximum(tmp_path):
    """A 0 in place of the missing reward would be the largest. Its whole group may be missing too."""
    run(small_config(tmp_path, 1), FixedGrader([-3.0, -2.0, -1.0, -2.0, BOOM, BOOM, BOOM, BOOM]))
    (record,) = read_metrics(tmp_path / "run")
    assert (record["reward/max"], record["reward/mean"]) == (-1.0, -2.0)
    assert record["reward/equal_groups"] == 0.0 and record["samples/counted"] == 4.0


def test_a_step_shows_each_reason_once_and_few_of_them(tmp_path):
    outcomes = ["a", "b", "a", "c", "d", 1.0, 2.0, 3.0]
    _, notes = run(small_config(tmp_path, 2), FixedGrader(outcomes, [1.0] * 8))
    assert notes == ["step 0", "step 0: 5 of 8 samples have no reward: a; b; c", "step 1"]


@pytest.mark.parametrize(
    ("outcomes", "message"),
    [
        ([BOOM] * 8, f"none of the step's 8 responses has a reward: {BOOM}. Fix the reward function"),
        (ValueError("a reward process cannot build the task"), "a reward process cannot build the task"),
    ],
)
def test_a_step_without_any_reward_ends_the_run_before_the_update(tmp_path, outcomes, message):
    """Two steps are in the folder, whole; the third moved no weight and left no line."""
    steps, display = [], Display()

    class Worker(ToyWorker):
        def train_step(self, batch):
            steps.append(batch)
            return super().train_step(batch)

    config = small_config(tmp_path, 4)
    task = make_task(config.task, None, 0)
    worker = Worker(config, task.vocab_size)
    engine = PolicySampler(worker, config.sampling.spec(), task.eos_id, 4, 16)
    grader = FixedGrader([1.0] * 8, [1.0] * 8, outcomes)
    with RunLog(config, display) as log, pytest.raises(ValueError, match=message):
        train(config, worker, engine, task, grader, log)
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [0, 1] and len(steps) == 2


def test_a_run_that_fails_in_its_first_step_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="responses has a reward"):
        run(small_config(tmp_path, 1), FixedGrader([BOOM] * 8))
    assert not (tmp_path / "run").exists()


def test_an_interrupt_in_a_reward_is_let_through(tmp_path):
    class Task:
        def reward(self, prompt, response_ids):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(small_config(tmp_path, 1), InlineGrader(Task()))  # type: ignore[arg-type]


class CountingGrader(FixedGrader):
    """Knows how often it was asked."""

    limits_time = True

    num_asked = 0

    def grade(self, prompts, responses):
        self.num_asked += len(prompts)
        return super().grade(prompts, responses)


def make_rollout(group_ids):
    rows = len(group_ids)
    return Rollout(
        ids_sl=torch.full((rows, 8), 3),
        prompt_length_s=torch.ones(rows, dtype=torch.int64),
        length_s=torch.arange(2, 2 + rows),
        sampler_logprob_sl=torch.zeros(rows, 8),
        finished_s=torch.zeros(rows, dtype=torch.bool),
        group_id_s=torch.tensor(group_ids),
        version_s=torch.zeros(rows, dtype=torch.int64),
    )


def _score_ranks(rank, world_size, outcomes):
    """Two replicas of two ranks: (0, 1) and (2, 3), with the outcomes of each."""
    replicas = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    groups = ParallelGroups(
        model=replicas[rank // 2], tp=replicas[rank // 2], dp=columns[rank % 2], world=dist.group.WORLD
    )
    prompts = [Prompt(ids=[3], group_id=groups.dp_rank * 10 + i) for i in range(2)]
    rollout = make_rollout([prompt.group_id for prompt in prompts])
    grader = CountingGrader(outcomes[rank // 2])
    try:
        with record_collectives() as calls:
            got = score(rollout, prompts, grader, groups)
    except ValueError as error:
        return str(error)
    # Waiting for each other takes at least two collectives over all ranks.
    kinds = [f"{call.kind} {call.group_size}" for call in calls]
    while kinds[:2] == ["all_reduce 4"] * 2:
        kinds = kinds[1:]
    return got.reward_s.tolist(), got.graded_s.tolist(), list(got.notes), grader.num_asked, kinds


@pytest.mark.distributed
def test_rewards_are_computed_once_per_replica_and_agree_on_its_ranks():
    results = run_ranks(_score_ranks, 4, ([1.0, 2.0], [3.0, 4.0]))
    assert [result[0] for result in results] == [[1.0, 2.0]] * 2 + [[3.0, 4.0]] * 2
    assert [result[3] for result in results] == [2, 0, 2, 0]
    assert all(result[1] == [True, True] and result[2] == [] for result in results)
    assert all(result[4] == ["all_reduce 4", "broadcast 2", "all_reduce 2"] for result in results)


@pytest.mark.distributed
def test_failures_of_one_replica_are_known_to_all():
    """All of the second replica's: the first trains on, and rank 0 says why."""
    results = run_ranks(_score_ranks, 4, ([1.0, 2.0], [BOOM, "größer"]))
    note = f"2 of 4 samples have no reward: {BOOM}; größer"
    assert all(result[2] == [note] for result in results)
    kinds = ["all_reduce 4", "broadcast 2", "all_reduce 2", "all_gather 4"]
    assert all(result[4] == kinds for result in results)
    assert [result[1] for result in results] == [[True, True]] * 2 + [[False, False]] * 2
    assert [result[0] for result in results] == [[1.0, 2.0]] * 2 + [[0.0, 0.0]] * 2


@pytest.mark.distributed
def test_no_reward_anywhere_raises_on_every_rank():
    results = run_ranks(_score_ranks, 4, (["first", "second"], ["third", "fourth"]))
    assert len(set(results)) == 1 and "none of the step's 4 responses has a reward: first." in results[0]


@pytest.mark.distributed
def test_a_grader_that_breaks_raises_on_every_rank():
    results = run_ranks(_score_ranks, 4, ([1.0, 2.0], ValueError("no grader here")))
    assert all("no grader here" in result for result in results)


def _pool_ranks(rank, world_size):
    groups = ParallelGroups(dp=dist.group.WORLD, dp_cp=dist.group.WORLD, world=dist.group.WORLD)
    orders = [("length", None), ("length", None), ("length", None)]
    if rank == 1:
        orders = [("exit", 1), ("length", None), ("sleep", 60)]
    prompts = [Prompt(ids=[3], group_id=10 * rank + i, answer=order) for i, order in enumerate(orders)]
    rollout = make_rollout([prompt.group_id for prompt in prompts])
    config = TaskConfig(name="tests.reward_cases:ObeyingTask", reward_timeout_s=0.5)
    with RewardPool(config, None, 0) as pool:
        got = score(rollout, prompts, pool, groups)
        again = score(rollout, [*prompts], FixedGrader([1.0, 1.0, 1.0]), groups)
    return got.reward_s.tolist(), got.graded_s.tolist(), list(got.notes), again.graded_s.tolist()


@pytest.mark.parametrize("limits_time", [True, False])
def test_who_grades_where(limits_time):
    """Beside this thread where it may take long, so that ranks that wait hear of it; reward functions of this
    process run where signals reach them.
    """

    class Grader(FixedGrader):
        def grade(self, prompts, responses):
            self.thread = threading.current_thread()
            return super().grade(prompts, responses)

    grader = Grader([1.0, 2.0])
    grader.limits_time = limits_time
    prompts = [Prompt(ids=[3], group_id=index) for index in range(2)]
    got = score(make_rollout([0, 1]), prompts, grader, ParallelGroups())
    assert got.reward_s.tolist() == [1.0, 2.0]
    assert (grader.thread is threading.main_thread()) != limits_time


@pytest.mark.distributed
def test_ranks_with_reward_processes_stay_together():
    """One rank's rewards die and hang; the other waits for it, and neither is left in a collective."""
    (first, all_graded, notes, again), (second, graded, other, _) = run_ranks(_pool_ranks, 2)
    assert (first, all_graded, again) == ([1.0, 2.0, 3.0], [True] * 3, [True] * 3)
    assert (second, graded) == ([0.0, 2.0, 0.0], [False, True, False])
    reasons = "the reward process left with exit code 1; the reward function took more than 0.5 s"
    assert notes == other == [f"2 of 6 samples have no reward: {reasons} (task.reward_timeout_s)"]
