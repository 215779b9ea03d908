"""THE LOOP: prompts -> responses -> rewards -> advantages -> old logprobs -> optimizer steps.

It knows the Protocols of `interfaces` and nothing about Megatron, vLLM or files. Every rank runs it; each
data-parallel rank works on its own share of the prompts, and all ranks of one model replica hold the same
batch.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from rlcore.advantages import grpo_advantages
from rlcore.batch import Prompt, Rollout, TrainBatch
from rlcore.collectives import broadcast_, raise_together
from rlcore.config import RunConfig
from rlcore.groups import ParallelGroups
from rlcore.interfaces import PolicyWorker, RolloutEngine, RunLog, Task
from rlcore.masks import kl_mask, retained_mask
from rlcore.metrics import Mean, Metric, Sum, max_over, mean_over, reduce_metrics


def train(config: RunConfig, worker: PolicyWorker, engine: RolloutEngine, task: Task, log: RunLog) -> None:
    """Runs `config.train.steps` steps. Collective: every rank of the run calls it with its own worker and
    engine.

    Raises the same `ValueError` on all ranks when a reward cannot be computed; the step is then left before
    any update.
    """
    groups = worker.groups
    for step in range(config.train.steps):
        started = time.perf_counter()
        prompts = own_prompts(task.prompts(step, config.rollout.prompts_per_step), groups)
        rollout = engine.generate(
            prompts, config.rollout.samples_per_prompt, rollout_seed(config.seed, step, groups.dp_rank)
        )
        reward_s = score(rollout, prompts, task, groups)
        advantage_s = grpo_advantages(reward_s, rollout.group_id_s, config.advantage.normalize_std)
        rolled_out = time.perf_counter()

        batch = score_old_policy(config, worker, build_batch(rollout, advantage_s))
        scored = time.perf_counter()
        updates = [
            worker.train_step(minibatch)
            for _ in range(config.train.epochs)
            for minibatch in minibatches(batch, num_updates(config))
        ]
        finished = time.perf_counter()

        metrics = reduce_metrics(step_metrics(rollout, batch, reward_s), groups.dp, reward_s.device)
        metrics |= {
            "time/rollout_s": rolled_out - started,
            "time/old_logprobs_s": scored - rolled_out,
            "time/update_s": finished - scored,
            "time/step_s": finished - started,
            "time/tokens_per_s": metrics["batch/tokens"] / (finished - started),
        }
        log.step(step, metrics, updates)
        save_if_due(config, worker, step)


def own_prompts(prompts: Sequence[Prompt], groups: ParallelGroups) -> Sequence[Prompt]:
    """This data-parallel rank's share: whole prompts, so no advantage group is ever split across ranks."""
    count, rest = divmod(len(prompts), groups.dp_size)
    if count == 0 or rest:
        raise ValueError(
            f"the task gave {len(prompts)} prompts for {groups.dp_size} data-parallel ranks: expected a "
            "multiple, at least one a rank. Set rollout.prompts_per_step."
        )
    return prompts[groups.dp_rank * count : (groups.dp_rank + 1) * count]


def rollout_seed(seed: int, step: int, dp_rank: int) -> int:
    """A seed in [0, 2^63) that no two steps and no two data-parallel ranks of a run share."""
    return int(np.random.SeedSequence([seed, step, dp_rank]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def score(rollout: Rollout, prompts: Sequence[Prompt], task: Task, groups: ParallelGroups) -> torch.Tensor:
    """`[S]` float64 rewards, computed once per model replica and sent to its other ranks.

    A reward function that raises, or returns something that is not a finite number, raises on all ranks of
    the run.
    """
    reward_s = torch.zeros(rollout.ids_sl.shape[0], dtype=torch.float64)
    error: ValueError | None = None
    if groups.is_model_leader:
        by_group = {prompt.group_id: prompt for prompt in prompts}
        for row, response_ids in enumerate(responses(rollout)):
            try:
                reward_s[row] = grade(task, by_group[int(rollout.group_id_s[row])], response_ids)
            except Exception as cause:
                error = ValueError(f"reward of sample {row}: {cause}")
                error.__cause__ = cause
                break
    device = rollout.ids_sl.device
    # Every rank waits here for the replica leaders, so no rank is left alone in a later collective.
    raise_together(error, groups.world, device)
    return broadcast_(reward_s.to(device), 0, groups.model)


def grade(task: Task, prompt: Prompt, response_ids: Sequence[int]) -> float:
    """One reward as a finite float, or an exception that says what the reward function did."""
    try:
        reward = float(task.reward(prompt, response_ids))
    except Exception as cause:
        raise ValueError(f"the reward function raised {type(cause).__name__}: {cause}") from cause
    if not math.isfinite(reward):
        raise ValueError(
            f"the reward function returned {reward}; it must return a finite number. Return 0.0 for a "
            "response that cannot be graded."
        )
    return reward


def responses(rollout: Rollout) -> Iterator[list[int]]:
    """Each row's response ids, without the end-of-text id of those that finished."""
    start_s, stop_s = (
        rollout.prompt_length_s.tolist(),
        (rollout.length_s - rollout.finished_s.long()).tolist(),
    )
    for row_l, start, stop in zip(rollout.ids_sl.tolist(), start_s, stop_s, strict=True):
        yield row_l[start:stop]


def build_batch(rollout: Rollout, advantage_s: torch.Tensor) -> TrainBatch:
    """The batch without old and reference logprobs."""
    token_mask_sl = rollout.token_mask_sl
    return TrainBatch(
        ids_sl=rollout.ids_sl,
        length_s=rollout.length_s,
        token_mask_sl=token_mask_sl,
        sample_mask_s=torch.ones_like(rollout.length_s, dtype=torch.bool),
        advantage_sl=torch.where(token_mask_sl, advantage_s[:, None], 0.0).to(torch.float32),
        sampler_logprob_sl=rollout.sampler_logprob_sl,
    )


def score_old_policy(config: RunConfig, worker: PolicyWorker, batch: TrainBatch) -> TrainBatch:
    """Adds what the policy said before the update, and the reference where the loss has a KL term."""
    old = worker.logprobs(batch)
    batch = dataclasses.replace(
        batch, old_logprob_sl=old.logprob_sl, keep_old_sl=old.keep_sl, old_log_mass_sl=old.log_mass_sl
    )
    if config.loss.kl_coef > 0:
        batch = dataclasses.replace(batch, reference_logprob_sl=worker.reference_logprobs(batch))
    return batch


def num_updates(config: RunConfig) -> int:
    """Optimizer steps in one pass over a step's rollouts."""
    return config.sequences_per_step // (config.train.minibatch_size or config.sequences_per_step)


def minibatches(batch: TrainBatch, count: int) -> Iterator[TrainBatch]:
    """`count` equal runs of rows, views of the batch. Every rank cuts its own share alike."""
    rows = batch.num_sequences // count
    tensors = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for start in range(0, rows * count, rows):
        yield dataclasses.replace(
            batch, **{name: tensor[start : start + rows] for name, tensor in present.items()}
        )


def step_metrics(rollout: Rollout, batch: TrainBatch, reward_s: torch.Tensor) -> dict[str, Metric]:
    """What one rank knows about its share of a step, before any reduction."""
    assert batch.old_logprob_sl is not None and batch.keep_old_sl is not None
    sample_mask_sl = batch.sample_mask_s[:, None].expand_as(batch.token_mask_sl)
    valid_sl = kl_mask(batch.token_mask_sl, sample_mask_sl)
    retained_sl = retained_mask(batch.token_mask_sl, sample_mask_sl, batch.keep_old_sl)
    gap_sl = (batch.sampler_logprob_sl - batch.old_logprob_sl).abs()
    every_s = torch.ones_like(reward_s, dtype=torch.bool)
    return {
        "reward/mean": mean_over(reward_s, every_s),
        "reward/max": max_over(reward_s, every_s),
        "response/length": Mean(batch.token_mask_sl.sum(), len(reward_s)),
        "response/finished": mean_over(rollout.finished_s, every_s),
        "mismatch/abs_mean": mean_over(gap_sl, retained_sl),
        "mismatch/abs_max": max_over(gap_sl, retained_sl),
        "mismatch/out_of_support": mean_over(~batch.keep_old_sl, valid_sl),
        "batch/tokens": Sum(batch.length_s.sum()),
    }


def save_if_due(config: RunConfig, worker: PolicyWorker, step: int) -> None:
    """Writes the policy every `train.save_every` steps, and after the last one when `train.save_final`."""
    done = step + 1
    due = config.train.save_every > 0 and done % config.train.save_every == 0
    if due or (config.train.save_final and done == config.train.steps):
        worker.save(f"{config.run_dir}/policy/step_{done}")
