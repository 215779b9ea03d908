"""What the loop does for the loss: the reference KL in the reward, the skipped old pass, refused updates."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rlcore.advantages import grpo_advantages
from rlcore.batch import ScoredTokens, StepResult, TrainBatch
from rlcore.grading import responses
from rlcore.rollout.policy_sampler import PolicySampler
from rlcore.rollout.reward import InlineGrader
from rlcore.rollout.tasks import make_task
from rlcore.trainer import kl_penalty, refused_in_a_row, train
from tests.toy_worker import ToyWorker, toy_config


class Log:
    def __init__(self):
        self.records = []

    def step(self, step, metrics, updates, notes=(), samples=()):
        self.records.append((step, metrics, list(updates)))


class Worker(ToyWorker):
    """The toy policy, which knows its unfiltered logprobs and may refuse updates."""

    refuses: tuple[bool, ...] = ()
    scored = 0

    def logprobs(self, batch: TrainBatch) -> ScoredTokens:
        self.scored += 1
        scores = super().logprobs(batch)
        unfiltered_sl = scores.logprob_sl + scores.log_mass_sl
        return dataclasses.replace(scores, unfiltered_logprob_sl=unfiltered_sl)

    def train_step(self, batch: TrainBatch) -> StepResult:
        if len(self.steps) < len(self.refuses) and self.refuses[len(self.steps)]:
            self.steps.append(batch)
            return StepResult(metrics={}, stepped=False, refused=True, reason="NaN or inf in sample 3")
        if batch.old_logprob_sl is None:
            self.steps.append(batch)
            return StepResult(metrics={}, stepped=True)
        return super().train_step(batch)


def run(config, **attributes):
    """The worker, the log and the first step's raw rewards after training, or the error it ended with."""
    task = make_task(config.task, None, config.seed)
    worker = Worker(config, task.vocab_size)
    for name, value in attributes.items():
        setattr(worker, name, value)
    drawn = []

    class Engine(PolicySampler):
        def generate(self, prompts, samples_per_prompt, seed):
            rollout = super().generate(prompts, samples_per_prompt, seed)
            rows = [prompt for prompt in prompts for _ in range(samples_per_prompt)]
            pairs = zip(rows, responses(rollout), strict=True)
            drawn.append((rollout, [task.reward(prompt, ids) for prompt, ids in pairs]))
            return rollout

    log, error = Log(), None
    engine = Engine(worker, config.sampling.spec(), task.eos_id, config.rollout.max_new_tokens, 16)
    try:
        train(config, worker, engine, task, InlineGrader(task), log)  # type: ignore[arg-type]
    except ValueError as cause:
        error = cause
    return worker, log, drawn, error


def test_the_kl_penalty_is_the_sum_over_the_counting_response_tokens():
    """k1 of .6 and -.2, weight .5: .2; prompt tokens, padding and masked samples take nothing."""
    config = toy_config(loss={"kl_coef": 0.5, "kl_type": "k1", "kl_in": "reward"})
    nan = float("nan")
    batch = TrainBatch(
        ids_sl=torch.zeros(2, 4).long(),
        length_s=torch.tensor([3, 3]),
        token_mask_sl=torch.tensor([[0, 1, 1, 0], [0, 1, 1, 0]]).bool(),
        sample_mask_s=torch.tensor([True, False]),
        advantage_sl=torch.zeros(2, 4),
        sampler_logprob_sl=torch.zeros(2, 4),
        old_unfiltered_logprob_sl=torch.tensor([[nan, -1.0, -2.0, nan]] * 2),
        reference_logprob_sl=torch.tensor([[nan, -1.6, -1.8, nan]] * 2),
    )
    assert kl_penalty(config, batch).tolist() == pytest.approx([0.2, 0.0])
    assert kl_penalty(toy_config(), batch).tolist() == [0.0, 0.0]
    in_loss = toy_config(loss={"kl_coef": 0.5})
    assert kl_penalty(in_loss, batch).tolist() == [0.0, 0.0]


def test_the_kl_in_the_reward_shapes_the_advantages():
    """Advantages are those of reward minus penalty; the batch that trains carries them."""
    loss = {"kl_coef": 0.3, "kl_type": "k2", "kl_in": "reward"}
    config = toy_config(loss=loss, train={"steps": 6, "microbatch_size": 8})
    worker, log, drawn, error = run(config)
    assert error is None and len(log.records) == 6
    rollout, rewards = drawn[-1]
    batch = worker.steps[-1]
    mask_sl = batch.token_mask_sl
    difference_sl = torch.where(mask_sl, batch.old_unfiltered_logprob_sl - batch.reference_logprob_sl, 0.0)
    penalty_s = 0.3 * (difference_sl.double() ** 2 / 2).clamp(max=10.0).sum(dim=1)
    assert float(penalty_s.max()) > 0.01, "the policy has moved away from the reference"
    shaped_s = torch.tensor(rewards, dtype=torch.float64) - penalty_s
    expected_s = grpo_advantages(shaped_s, rollout.group_id_s)
    ours_s = (batch.advantage_sl * mask_sl).sum(dim=1) / mask_sl.sum(dim=1)
    assert ours_s.tolist() == pytest.approx(expected_s.tolist(), abs=1e-5)
    assert log.records[-1][1]["reward/mean"] == pytest.approx(sum(rewards) / len(rewards)), "raw rewards"


def test_the_old_pass_is_skipped_where_nothing_reads_it():
    loss = {"policy": "on_policy", "old_logprobs": "skip", "actor_denominator": "valid"}
    worker, log, _, error = run(toy_config(loss=loss, train={"steps": 2, "microbatch_size": 8}))
    assert error is None and worker.scored == 0
    assert all(batch.old_logprob_sl is None and batch.keep_old_sl is None for batch in worker.steps)
    assert not any(name.startswith("mismatch/") for name in log.records[-1][1])


def test_a_refused_update_ends_the_run_with_its_reason_after_it_was_logged():
    worker, log, _, error = run(toy_config(), refuses=(False, True))
    assert "NaN or inf in sample 3" in str(error) and "train.max_refused_updates=0" in str(error)
    assert len(worker.steps) == 2 and [step for step, _, _ in log.records] == [0, 1]


def test_refused_updates_in_a_row_are_counted_over_steps():
    allowed = {"train": {"steps": 6, "microbatch_size": 8, "max_refused_updates": 2}}
    _, log, _, error = run(toy_config(**allowed), refuses=(True, True, False, True, True, False))
    assert error is None and len(log.records) == 6
    _, log, _, error = run(toy_config(**allowed), refuses=(False, True, True, True))
    assert "3 in a row" in str(error) and len(log.records) == 4


def test_the_count_starts_again_after_an_update_that_was_not_refused():
    fine, refused = (StepResult(metrics={}, stepped=not flag, refused=flag) for flag in (False, True))
    assert refused_in_a_row([refused, fine, refused], 1, 2) == 1
    assert refused_in_a_row([], 2, 2) == 2
    with pytest.raises(ValueError, match="2 in a row"):
        refused_in_a_row([refused], 1, 1)
