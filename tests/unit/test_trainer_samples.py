"""What the loop makes of rewards: estimators by config, samples that leave the step, diagnostics by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.distributed as dist

from rlcore.batch import Rollout, TrainBatch
from rlcore.dynamic_sampling import SampleSelection
from rlcore.grading import responses
from rlcore.groups import ParallelGroups
from rlcore.metrics import reduce_metrics
from rlcore.rollout.policy_sampler import PolicySampler
from rlcore.rollout.reward import InlineGrader
from rlcore.rollout.tasks import make_task
from rlcore.trainer import step_metrics, train
from tests.rank_pool import run_ranks
from tests.toy_worker import ToyWorker, toy_config


class LengthTask:
    """Rewards a response by its length, in every other group; the rest all get 0.3."""

    def __init__(self, config, equal=2):
        self._echo = make_task(config.task, None, config.seed)
        self._equal = equal
        self.eos_id, self.vocab_size = self._echo.eos_id, self._echo.vocab_size

    def prompts(self, step, num_prompts):
        prompts = self._echo.prompts(step, num_prompts)
        return [dataclasses.replace(prompt, group_id=100 + i) for i, prompt in enumerate(prompts)]

    def decode(self, ids):
        return self._echo.decode(ids)

    def reward(self, prompt, response_ids):
        if prompt.group_id % 2 < self._equal - 1:
            return 0.3
        return float(len(response_ids)) + 0.1 * sum(response_ids)


def run_step(section, groups=None, task=None, **changes):
    """One step of the toy policy; the batch it trained on, rewards by row, and the record of its log."""
    changes = {"advantage": section, "train": {"steps": 1, "microbatch_size": 8}} | changes
    config = toy_config(**changes)
    task = task or LengthTask(config)
    worker = ToyWorker(config, task.vocab_size, groups)
    records = []
    drawn = {}

    class Engine(PolicySampler):
        def generate(self, prompts, samples_per_prompt, seed):
            rollout = super().generate(prompts, samples_per_prompt, seed)
            drawn["prompts"], drawn["rollout"] = prompts, rollout
            return rollout

    class Log:
        def step(self, step, metrics, updates, notes=(), samples=()):
            records.append({**metrics, "stepped": [update.stepped for update in updates]})

    engine = Engine(worker, config.sampling.spec(), task.eos_id, config.rollout.max_new_tokens, 16)
    train(config, worker, engine, task, InlineGrader(task), Log())  # type: ignore[arg-type]
    rollout, prompts = drawn["rollout"], drawn["prompts"]
    samples = config.rollout.samples_per_prompt
    rewards = [task.reward(prompts[row // samples], ids) for row, ids in enumerate(responses(rollout))]
    return worker, rollout, rewards, records[0]


def row_advantages(batch: TrainBatch) -> torch.Tensor:
    """`[S]`: each row's one advantage; it is the same on all response tokens, and 0 elsewhere."""
    assert (batch.advantage_sl[~batch.token_mask_sl] == 0).all()
    low_s = torch.where(batch.token_mask_sl, batch.advantage_sl, math.inf).amin(dim=1)
    high_s = torch.where(batch.token_mask_sl, batch.advantage_sl, -math.inf).amax(dim=1)
    assert torch.equal(low_s, high_s)
    return high_s


def expected_advantages(section, rollout, rewards, counts):
    """Straight from the formulas, sample by sample in Python."""
    lengths = rollout.token_mask_sl.sum(dim=1).tolist()
    ids = rollout.group_id_s.tolist()
    tokens = [rewards[i] for i in range(len(ids)) if counts[i] for _ in range(lengths[i])]
    out = []
    for i, reward in enumerate(rewards):
        members = [rewards[j] for j in range(len(ids)) if ids[j] == ids[i] and counts[j]]
        others = [rewards[j] for j in range(len(ids)) if ids[j] == ids[i] and counts[j] and j != i]
        if not counts[i]:
            out.append(0.0)
        elif section["estimator"] == "reinforce_pp":
            whole = torch.tensor(tokens, dtype=torch.float64)
            out.append(float((reward - whole.mean()) / whole.std()))
        else:
            leaves_out = section["estimator"] == "rloo" or section.get("leave_one_out")
            pool = torch.tensor(others if leaves_out else members, dtype=torch.float64)
            value = reward - float(pool.mean()) if len(members) > 1 else 0.0
            divides = section["estimator"] == "grpo" and section.get("normalize_std") is not False
            std = float(pool.std()) if divides and len(pool) > 1 else 0.0
            out.append(value / std if std > 1e-9 else value)
    return torch.tensor(out)


SECTIONS = [
    {"estimator": "grpo", "leave_one_out": True},
    {"estimator": "grpo", "leave_one_out": True, "normalize_std": False},
    {"estimator": "rloo"},
    {"estimator": "reinforce_pp"},
]


@pytest.mark.parametrize("mask_truncated", [False, True])
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: "-".join(map(str, section.values())))
def test_every_estimator_reaches_the_batch(section, mask_truncated):
    """With and without the samples that did not finish, which then are in no statistic."""
    worker, rollout, rewards, _ = run_step({**section, "mask_truncated": mask_truncated})
    counts = rollout.finished_s.tolist() if mask_truncated else [True] * len(rewards)
    assert 5 < sum(rollout.finished_s.tolist()) < len(rewards) - 5, "the case needs both"
    batch = worker.steps[0]
    expected_s = expected_advantages(section, rollout, rewards, counts)
    torch.testing.assert_close(row_advantages(batch), expected_s, rtol=1e-5, atol=1e-5)
    assert batch.sample_mask_s.tolist() == counts


def test_equal_groups_leave_the_step_and_its_denominators():
    """Half the groups are equal: their samples are masked, counted, and the update is that of the rest."""
    worker, rollout, _, record = run_step({"drop_equal_groups": True})
    batch = worker.steps[0]
    assert batch.sample_mask_s.tolist() == [id_ % 2 == 1 for id_ in rollout.group_id_s.tolist()]
    counts = [record[f"samples/{name}"] for name in ("counted", "dropped_equal_group", "masked_truncated")]
    assert counts == [32.0, 32.0, 0.0] and record["reward/equal_groups"] == 0.5
    kept, rest = ToyWorker(worker.config, worker.vocab_size), batch.sample_mask_s
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    kept.train_step(TrainBatch(**{name: value[rest] for name, value in fields.items() if value is not None}))
    assert kept.table.grad is not None and worker.table.grad is not None
    torch.testing.assert_close(worker.table.grad, kept.table.grad, rtol=1e-5, atol=1e-8)
    assert float(kept.table.grad.abs().max()) > 0
    whole, _, _, unmasked = run_step({})
    assert whole.table.grad is not None and unmasked["samples/counted"] == 64.0
    # The same samples with advantage 0 left in the denominator: a smaller step.
    assert float(whole.table.grad.norm()) < 0.9 * float(worker.table.grad.norm())


def test_a_step_in_which_everything_leaves_is_skipped():
    config = toy_config()
    worker, _, _, record = run_step({"drop_equal_groups": True}, task=LengthTask(config, equal=3))
    assert record["stepped"] == [False] and record["samples/dropped_equal_group"] == 64.0
    assert (worker.table == 0).all()
    assert all(math.isfinite(value) for name, value in record.items() if name != "stepped")


def _reinforce_ranks(rank, world_size):
    groups = ParallelGroups(dp=dist.group.WORLD, dp_cp=dist.group.WORLD, world=dist.group.WORLD)
    section = {"estimator": "reinforce_pp", "mask_truncated": True}
    worker, rollout, rewards, record = run_step(section, groups)
    del record["stepped"]
    record = {name: value for name, value in record.items() if not name.startswith("time/")}
    return worker.steps[0], rollout, rewards, record


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_reinforce_pp_whitens_over_data_parallel_ranks(world_size):
    """Per rank it would be another mean and deviation. Metrics are the same on all ranks, quantiles too."""
    results = run_ranks(_reinforce_ranks, world_size)
    tokens = [
        reward
        for _, rollout, rewards, _ in results
        for reward, length, finished in zip(
            rewards, rollout.token_mask_sl.sum(dim=1).tolist(), rollout.finished_s.tolist(), strict=True
        )
        for _ in range(length * finished)
    ]
    whole = torch.tensor(tokens, dtype=torch.float64)
    for batch, rollout, rewards, record in results:
        expected_s = (torch.tensor(rewards, dtype=torch.float64) - whole.mean()) / whole.std()
        expected_s = torch.where(rollout.finished_s, expected_s, 0.0).float()
        torch.testing.assert_close(row_advantages(batch), expected_s, rtol=1e-5, atol=1e-5)
        assert record == results[0][3]
    masked = sum(int((~rollout.finished_s).sum()) for _, rollout, _, _ in results)
    assert results[0][3]["samples/masked_truncated"] == masked > 0
    assert results[0][3]["response/truncated"] == pytest.approx(masked / 64)


def make_step(sampler, old, keep_old, sample_mask, log_mass):
    """Two samples: prompt of one token, responses of three and of two tokens, the second truncated."""
    rollout = Rollout(
        ids_sl=torch.zeros((2, 4), dtype=torch.int64),
        prompt_length_s=torch.tensor([1, 1]),
        length_s=torch.tensor([4, 3]),
        sampler_logprob_sl=torch.tensor(sampler),
        finished_s=torch.tensor([True, False]),
        group_id_s=torch.tensor([5, 5]),
        version_s=torch.zeros(2, dtype=torch.int64),
    )
    counts_s = torch.tensor(sample_mask).bool()
    batch = TrainBatch(
        ids_sl=rollout.ids_sl,
        length_s=rollout.length_s,
        token_mask_sl=rollout.token_mask_sl,
        sample_mask_s=counts_s,
        advantage_sl=torch.zeros(2, 4),
        sampler_logprob_sl=rollout.sampler_logprob_sl,
        old_logprob_sl=torch.tensor(old),
        keep_old_sl=torch.tensor(keep_old).bool(),
        old_log_mass_sl=torch.tensor(log_mass),
    )
    selection = SampleSelection(
        counts_s=counts_s,
        reward_failed_s=torch.zeros_like(counts_s),
        truncated_s=~counts_s,
        equal_group_s=torch.zeros_like(counts_s),
    )
    reward_s = torch.tensor([1.0, 3.0], dtype=torch.float64)
    return reduce_metrics(step_metrics(0, rollout, batch, reward_s, selection))


@pytest.mark.parametrize("junk", [0.0, math.nan, -math.inf, math.inf])
def test_diagnostics_by_hand(junk):
    """Retained: tokens 1 and 2 of the first sample, gaps +0.5 and -0.2. Its third left the support; the
    second sample is masked: neither is read, whatever it holds.
    """
    metrics = make_step(
        sampler=[[junk, -1.0, -2.0, -3.0], [junk, junk, junk, junk]],
        old=[[junk, -0.5, -2.2, -math.inf], [junk, junk, junk, junk]],
        keep_old=[[1, 1, 1, 0], [1, 1, 0, 1]],
        sample_mask=[1, 0],
        log_mass=[[junk, -0.1, -0.2, -0.6], [junk, junk, junk, junk]],
    )
    k3 = (math.exp(0.5) - 1.5 + math.exp(-0.2) - 0.8) / 2
    assert metrics["mismatch/abs_mean"] == pytest.approx(0.35, abs=1e-6)
    assert metrics["mismatch/abs_max"] == pytest.approx(0.5, abs=1e-6)
    assert metrics["mismatch/k3"] == pytest.approx(k3, abs=1e-6)
    assert metrics["mismatch/out_of_support"] == pytest.approx(1 / 3)
    assert metrics["mismatch/old_log_mass"] == pytest.approx(-0.3, abs=1e-6)
    assert metrics["mismatch/sampler_out_of_support"] == 0.0
    assert metrics["reward/mean"] == 2.0 and metrics["reward/equal_groups"] == 0.0
    assert metrics["response/length"] == 2.5 and metrics["response/truncated"] == 0.5
    assert metrics["response/length_quantile/p50"] == pytest.approx(2.5, rel=0.01)
    assert metrics["response/length_quantile/p95"] == pytest.approx(2.95, rel=0.01)
    assert metrics["samples/counted"] == metrics["samples/masked_truncated"] == 1.0


def test_a_token_outside_the_samplers_support_is_counted_and_not_compared():
    """An infinite gap would swallow the mean; a gap of 800 nats would overflow k3: it becomes the cap."""
    logprobs = {"sampler": [[0.0, -math.inf, -1.0, -2.0]] * 2, "old": [[0.0, -1.0, -1.5, -2.0]] * 2}
    rest = {"keep_old": [[1] * 4] * 2, "sample_mask": [1, 0], "log_mass": [[0.0] * 4] * 2}
    metrics = make_step(**logprobs, **rest)
    assert metrics["mismatch/sampler_out_of_support"] == pytest.approx(1 / 3)
    assert metrics["mismatch/abs_mean"] == pytest.approx(0.25) and metrics["mismatch/abs_max"] == 0.5
    far = make_step(sampler=[[0.0, -801.0, -1.0, -2.0]] * 2, old=logprobs["old"], **rest)
    assert far["mismatch/abs_max"] == 800.0
    assert far["mismatch/k3"] == pytest.approx((math.exp(20) - 21 + math.exp(-0.5) - 0.5) / 3, rel=1e-6)


def test_a_nan_of_the_sampler_is_in_no_mean_and_counted():
    """Where no correction reads it the step goes on, and one NaN would hide the mismatch of all others."""
    metrics = make_step(
        sampler=[[0.0, math.nan, -1.0, -2.0]] * 2,
        old=[[0.0, -1.0, -1.5, -2.0]] * 2,
        keep_old=[[1] * 4] * 2,
        sample_mask=[1, 0],
        log_mass=[[0.0] * 4] * 2,
    )
    assert metrics["mismatch/abs_mean"] == pytest.approx(0.25) and metrics["mismatch/abs_max"] == 0.5
    assert metrics["mismatch/sampler_nan"] == 1.0 and math.isfinite(metrics["mismatch/k3"])
