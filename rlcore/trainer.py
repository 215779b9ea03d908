"""THE LOOP: prompts -> responses -> rewards -> advantages -> old logprobs -> optimizer steps.

It knows the Protocols of `interfaces` and nothing about Megatron, vLLM or files. Every rank runs it; each
data-parallel rank works on its own share of the prompts, and all ranks of one model replica hold the same
batch.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

import torch

from rlcore.advantages import grpo_advantages, reinforce_pp_advantages, rloo_advantages
from rlcore.batch import Rollout, StepResult, TrainBatch
from rlcore.collectives import group_rank
from rlcore.config import AdvantageConfig, RunConfig
from rlcore.dynamic_sampling import SampleSelection, select_samples
from rlcore.grading import score
from rlcore.groups import ParallelGroups
from rlcore.interfaces import Grader, PolicyWorker, RolloutEngine, RunLog, Task
from rlcore.masks import kl_mask, retained_mask
from rlcore.metrics import Mean, Metric, Sum, max_over, mean_over, quantiles_over, reduce_metrics
from rlcore.ops.kl import MAX_LOG_RATIO, k3_of_log_ratio, kl_reward_penalty
from rlcore.reward_groups import group_rewards
from rlcore.rollouts import Rollouts
from rlcore.samples import sample_records


def train(
    config: RunConfig,
    worker: PolicyWorker,
    engine: RolloutEngine,
    task: Task,
    grader: Grader,
    log: RunLog,
) -> None:
    """Runs `config.train.steps` steps. Collective: every rank of the run calls it with its own worker and
    engine.

    Raises `ValueError` on all ranks when the task's prompts cannot be used, or no response of a step has a
    reward; the step is then left before any update.
    """
    groups = worker.groups
    rollouts = Rollouts(config, worker, engine, task)
    num_refused = 0
    for step in range(config.train.steps):
        started = time.perf_counter()
        prompts, rollout = rollouts.take(step)
        rewards = score(rollout, prompts, grader, groups)
        reward_s = rewards.reward_s
        selection = select_samples(
            reward_s,
            rewards.graded_s,
            rollout.group_id_s,
            rollout.finished_s,
            drop_equal_groups=config.advantage.drop_equal_groups,
            mask_truncated=config.advantage.mask_truncated,
        )
        rolled_out = time.perf_counter()

        batch = score_old_policy(config, worker, build_batch(rollout, selection.counts_s))
        shaped_s = reward_s - kl_penalty(config, batch)
        advantage_sl = token_advantages(config.advantage, rollout, shaped_s, selection.counts_s, groups)
        batch = dataclasses.replace(batch, advantage_sl=advantage_sl)
        scored = time.perf_counter()
        updates = [
            worker.train_step(minibatch)
            for _ in range(config.train.epochs)
            for minibatch in minibatches(batch, num_updates(config))
        ]
        finished = time.perf_counter()

        own = step_metrics(step, rollout, batch, reward_s, selection)
        metrics = reduce_metrics(own, groups.dp, reward_s.device)
        metrics |= {
            "time/rollout_s": rolled_out - started,
            "time/old_logprobs_s": scored - rolled_out,
            "time/update_s": finished - scored,
            "time/step_s": finished - started,
            "time/tokens_per_s": metrics["batch/tokens"] / (finished - started),
        }
        num_samples = config.train.log_samples if group_rank(groups.world) == 0 else 0
        samples = sample_records(step, num_samples, task, rollout, batch, rewards)
        log.step(step, metrics, updates, rewards.notes, samples)
        num_refused = refused_in_a_row(updates, num_refused, config.train.max_refused_updates)
        save_if_due(config, worker, step)


def token_advantages(
    advantage: AdvantageConfig,
    rollout: Rollout,
    reward_s: torch.Tensor,
    counts_s: torch.Tensor,
    groups: ParallelGroups,
) -> torch.Tensor:
    """`[S, L]` float32: the advantage of each response token, 0 elsewhere and for samples that do not count.

    Collective over DP where the estimator compares samples of all ranks: all ranks of a model replica hold
    the same samples, whole.
    """
    if advantage.estimator == "reinforce_pp":
        return reinforce_pp_advantages(reward_s, rollout.token_mask_sl, counts_s, groups.dp)
    if advantage.estimator == "rloo":
        advantage_s = rloo_advantages(reward_s, rollout.group_id_s, counts_s)
    else:
        advantage_s = grpo_advantages(
            reward_s, rollout.group_id_s, advantage.divides_by_std, advantage.leave_one_out, counts_s
        )
    return torch.where(rollout.token_mask_sl, advantage_s[:, None], 0.0)


def build_batch(rollout: Rollout, sample_mask_s: torch.Tensor) -> TrainBatch:
    """The batch without advantages, old and reference logprobs."""
    return TrainBatch(
        ids_sl=rollout.ids_sl,
        length_s=rollout.length_s,
        token_mask_sl=rollout.token_mask_sl,
        sample_mask_s=sample_mask_s,
        advantage_sl=torch.zeros_like(rollout.sampler_logprob_sl),
        sampler_logprob_sl=rollout.sampler_logprob_sl,
        sampling_mask=rollout.sampling_mask,
    )


def score_old_policy(config: RunConfig, worker: PolicyWorker, batch: TrainBatch) -> TrainBatch:
    """Adds what the policy said before the update, and the reference where the loss has a KL term."""
    if config.loss.old_logprobs == "recompute":
        old = worker.logprobs(batch)
        batch = dataclasses.replace(
            batch,
            old_logprob_sl=old.logprob_sl,
            keep_old_sl=old.keep_sl,
            old_log_mass_sl=old.log_mass_sl,
            old_unfiltered_logprob_sl=old.unfiltered_logprob_sl,
        )
    elif config.loss.old_logprobs == "sampler":
        batch = batch.with_sampler_as_old()
    if config.loss.kl_coef > 0:
        batch = dataclasses.replace(batch, reference_logprob_sl=worker.reference_logprobs(batch))
    return batch


def kl_penalty(config: RunConfig, batch: TrainBatch) -> torch.Tensor:
    """`[S]` float64: what the reference KL takes from each reward; 0 where it is not in the reward.

    The sum over the response of the old policy's KL to the reference, on unfiltered logprobs.
    """
    zero_s = torch.zeros(batch.num_sequences, dtype=torch.float64, device=batch.ids_sl.device)
    if config.loss.kl_coef == 0 or config.loss.kl_in != "reward":
        return zero_s
    assert batch.old_unfiltered_logprob_sl is not None and batch.reference_logprob_sl is not None
    penalty_sl = kl_reward_penalty(
        batch.old_unfiltered_logprob_sl,
        batch.reference_logprob_sl,
        batch.token_mask_sl & batch.sample_mask_s[:, None],
        config.loss.kl_coef,
        config.loss.kl_type,
    )
    return penalty_sl.double().sum(dim=1)


def refused_in_a_row(updates: Sequence[StepResult], before: int, allowed: int) -> int:
    """How many updates were refused in a row, up to the last one. `ValueError` for more than allowed.

    The same on every rank, like the results; the step's metrics are in the log already.
    """
    for update in updates:
        before = before + 1 if update.refused else 0
        if before > allowed:
            raise ValueError(
                f"{update.reason} ({before} in a row; train.max_refused_updates={allowed} allows no more)"
            )
    return before


def num_updates(config: RunConfig) -> int:
    """Optimizer steps in one pass over a step's rollouts."""
    return config.sequences_per_step // (config.train.minibatch_size or config.sequences_per_step)


def minibatches(batch: TrainBatch, count: int) -> Iterator[TrainBatch]:
    """`count` equal runs of rows, views of the batch. Every rank cuts its own share alike."""
    rows = batch.num_sequences // count
    for start in range(0, rows * count, rows):
        yield batch.rows(slice(start, start + rows))


def step_metrics(
    step: int, rollout: Rollout, batch: TrainBatch, reward_s: torch.Tensor, selection: SampleSelection
) -> dict[str, Metric]:
    """What one rank knows about its share of a step, before any reduction.

    Rewards and responses are those of every sample drawn, whether it takes part in the update or not; a
    sample without a reward is in no figure about rewards.
    """
    every_s, graded_s = torch.ones_like(rollout.finished_s), ~selection.reward_failed_s
    length_s = rollout.token_mask_sl.sum(dim=1)
    equal_g = group_rewards(reward_s, rollout.group_id_s, graded_s).equal_g
    return {
        "reward/mean": mean_over(reward_s, graded_s),
        "reward/max": max_over(reward_s, graded_s),
        "reward/equal_groups": mean_over(equal_g, torch.ones_like(equal_g)),
        "response/length": Mean(length_s.sum(), len(reward_s)),
        "response/length_quantile": quantiles_over(length_s, every_s),
        "response/truncated": mean_over(~rollout.finished_s, every_s),
        "rollout/staleness": max_over(step - rollout.version_s, every_s),
        "samples/counted": Sum(selection.counts_s.sum()),
        "samples/reward_failed": Sum(selection.reward_failed_s.sum()),
        "samples/masked_truncated": Sum(selection.truncated_s.sum()),
        "samples/dropped_equal_group": Sum(selection.equal_group_s.sum()),
        **mismatch_metrics(batch),
        "batch/tokens": Sum(batch.length_s.sum()),
    }


def mismatch_metrics(batch: TrainBatch) -> dict[str, Metric]:
    """How far the trainer's old policy is from the sampler, on the same tokens.

    Differences of filtered logprobs see the retained tokens that are in both supports; the rest sees the KL
    mask. `k3` estimates KL(sampler || old policy): the tokens are the sampler's. A NaN of the sampler is in
    no mean and counted. Where the old logprobs are the sampler's own, only what it could not say is left.
    """
    if batch.old_logprob_sl is None:
        # Nothing reads the sampler's logprobs.
        return {}
    sample_mask_sl = batch.sample_mask_s[:, None].expand_as(batch.token_mask_sl)
    valid_sl = kl_mask(batch.token_mask_sl, sample_mask_sl)
    keep_sampler_sl = ~torch.isneginf(batch.sampler_logprob_sl)
    nan_sl = torch.isnan(batch.sampler_logprob_sl)
    own: dict[str, Metric] = {
        "mismatch/sampler_out_of_support": mean_over(~keep_sampler_sl, valid_sl),
        "mismatch/sampler_nan": Sum((nan_sl & valid_sl).sum()),
    }
    if batch.keep_old_sl is None or batch.old_log_mass_sl is None:
        # The old logprobs are the sampler's own: no pass gave others to compare them with.
        return own
    retained_sl = retained_mask(batch.token_mask_sl, sample_mask_sl, batch.keep_old_sl)
    both_sl = retained_sl & keep_sampler_sl & ~nan_sl
    old_sl = torch.where(both_sl, batch.old_logprob_sl.double(), 0.0)
    log_ratio_sl = old_sl - torch.where(both_sl, batch.sampler_logprob_sl.double(), 0.0)
    bounded_sl = log_ratio_sl.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "mismatch/abs_mean": mean_over(log_ratio_sl.abs(), both_sl),
        "mismatch/abs_max": max_over(log_ratio_sl.abs(), both_sl),
        "mismatch/k3": mean_over(k3_of_log_ratio(bounded_sl), both_sl),
        "mismatch/out_of_support": mean_over(~batch.keep_old_sl, valid_sl),
        **own,
        "mismatch/old_log_mass": mean_over(batch.old_log_mass_sl, valid_sl),
    }


def save_if_due(config: RunConfig, worker: PolicyWorker, step: int) -> None:
    """Writes the policy every `train.save_every` steps, and after the last one when `train.save_final`."""
    done = step + 1
    due = config.train.save_every > 0 and done % config.train.save_every == 0
    if due or (config.train.save_final and done == config.train.steps):
        worker.save(f"{config.run_dir}/policy/step_{done}")
