"""Prompts in, responses out, step by step: one after the other, or one step ahead of the training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from rlcore.batch import Prompt, Rollout
from rlcore.collectives import raise_together
from rlcore.config import RunConfig
from rlcore.groups import ParallelGroups
from rlcore.interfaces import PolicyWorker, RolloutEngine, Task


class Rollouts:
    """The rollouts of a run. `take` is collective and called once a step, in order.

    With `rollout.one_step_off` the engine draws the next step's responses while this step trains, from the
    weights before it; the first step's responses are as fresh as the others are one step old.
    """

    def __init__(self, config: RunConfig, worker: PolicyWorker, engine: RolloutEngine, task: Task) -> None:
        self._config, self._worker, self._engine, self._task = config, worker, engine, task
        self._begun: list[Prompt] | None = None

    def take(self, step: int) -> tuple[list[Prompt], Rollout]:
        """This rank's prompts of the step and the responses to them."""
        if self._begun is None:
            self._begun = self._begin(step, version=step)
        prompts, rollout = self._begun, self._engine.collect()
        self._begun = None
        if self._config.rollout.one_step_off and step + 1 < self._config.train.steps:
            self._begun = self._begin(step + 1, version=step)
        return prompts, rollout

    def _begin(self, step: int, version: int) -> list[Prompt]:
        """Asks for the responses of a step, from the policy as it is now: after `version` steps."""
        config, worker = self._config, self._worker
        prompts = own_prompts(self._task, step, config.rollout.prompts_per_step, worker.groups, worker.device)
        self._engine.update_weights(version)
        seed = rollout_seed(config.seed, step, worker.groups.dp_rank)
        self._engine.begin(prompts, config.rollout.samples_per_prompt, seed)
        return prompts


def own_prompts(
    task: Task, step: int, num_prompts: int, groups: ParallelGroups, device: torch.device | str = "cpu"
) -> list[Prompt]:
    """This data-parallel rank's share: whole prompts, so no advantage group is ever split across ranks.

    A task that raises, or returns other prompts than it was asked for, raises on all ranks of the run.
    """
    prompts: list[Prompt] = []
    error: ValueError | None = None
    try:
        prompts = all_prompts(task, step, num_prompts)
        check_prompts(prompts, num_prompts, groups.dp_size)
    except ValueError as cause:
        error = cause
    # Every rank waits here for all others, so none is left alone in a later collective.
    raise_together(error, groups.world, device)
    count = num_prompts // groups.dp_size
    return prompts[groups.dp_rank * count : (groups.dp_rank + 1) * count]


def all_prompts(task: Task, step: int, num_prompts: int) -> list[Prompt]:
    """The prompts of all data-parallel ranks, or a `ValueError` that says what the task did."""
    try:
        return list(task.prompts(step, num_prompts))
    except (Exception, SystemExit) as cause:
        raise ValueError(
            f"prompts of step {step}: the task raised {type(cause).__name__}: {cause}"
        ) from cause


def check_prompts(prompts: Sequence[Prompt], num_prompts: int, dp_size: int) -> None:
    """The task gave as many prompts as it was asked for, each with an id of its own, or `ValueError`."""
    if len(prompts) != num_prompts:
        raise ValueError(
            f"the task gave {len(prompts)} prompts, expected rollout.prompts_per_step={num_prompts}. Return "
            "exactly as many as it is asked for, or set rollout.prompts_per_step."
        )
    if num_prompts < 1 or num_prompts % dp_size:
        raise ValueError(
            f"rollout.prompts_per_step={num_prompts} does not divide over {dp_size} data-parallel ranks."
        )
    id_, count = Counter(prompt.group_id for prompt in prompts).most_common(1)[0]
    if count > 1:
        raise ValueError(
            f"{count} prompts have group_id={id_}: responses to different prompts would be compared. Give "
            "each prompt of a step its own."
        )


def rollout_seed(seed: int, step: int, dp_rank: int) -> int:
    """A seed in [0, 2^63) that no two steps and no two data-parallel ranks of a run share."""
    return int(np.random.SeedSequence([seed, step, dp_rank]).generate_state(1, np.uint64)[0] >> np.uint64(1))
