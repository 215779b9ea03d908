"""From responses to rewards: graded once per model replica, sent to its other ranks, counted over all.

A response without a reward costs its sample. A step in which no response has one ends the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rlcore.batch import Graded, Prompt, Rollout
from rlcore.collectives import all_gather_text, all_reduce_, broadcast_
from rlcore.groups import ParallelGroups
from rlcore.interfaces import Grader
from rlcore.waiting import in_background, in_foreground, wait_together

MOST_REASONS = 3
"""Different reasons that a step shows: enough to see a pattern, on few lines."""


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """The rewards of this rank's rollout."""

    reward_s: torch.Tensor
    """`[S]` float64; 0 where there is none (masked there)."""
    graded_s: torch.Tensor
    """`[S]` bool: has the sample a reward?"""
    notes: Sequence[str] = ()
    """How many samples of all ranks have none, and why, for the run's log. The same on every rank."""


def score(rollout: Rollout, prompts: Sequence[Prompt], grader: Grader, groups: ParallelGroups) -> Rewards:
    """The step's rewards, computed once per model replica: in the background where the grader limits its
    time, so that the other ranks take many slow rewards for no hang.

    Collectives: those of `wait_together` over all ranks, one broadcast per replica, one all-reduce over DP;
    where a sample has no reward also one all-gather over all ranks. Raises on all ranks when a grader raises,
    `ValueError` when no sample of the step has a reward.
    """

    def grade() -> list[Graded]:
        return grader.grade(prompt_of_rows(rollout, prompts), list(responses(rollout)))

    device = rollout.ids_sl.device
    # Every rank waits here for the replica leaders, so no rank is left alone in a later collective.
    grading = None
    if groups.is_model_leader:
        grading = in_background(grade) if grader.limits_time else in_foreground(grade)
    graded = wait_together(grading, groups.world, device) or []
    # Row 0: rewards, row 1: is there one?
    sent_2s = torch.zeros((2, rollout.ids_sl.shape[0]), dtype=torch.float64)
    for row, one in enumerate(graded):
        if one.reward is not None:
            sent_2s[0, row], sent_2s[1, row] = one.reward, 1.0
    sent_2s = broadcast_(sent_2s.to(device), 0, groups.model)
    graded_s = sent_2s[1] > 0
    notes = describe_failures(graded, graded_s, groups)
    return Rewards(reward_s=sent_2s[0], graded_s=graded_s, notes=notes)


def describe_failures(
    graded: Sequence[Graded], graded_s: torch.Tensor, groups: ParallelGroups
) -> tuple[str, ...]:
    """One note where samples of any rank have no reward. `graded` is empty on ranks that did not grade.

    Collectives and errors: those of `score`.
    """
    count_2 = torch.stack([graded_s.sum(), torch.ones_like(graded_s).sum()])
    num_graded, num_samples = all_reduce_(count_2, "sum", groups.dp).tolist()
    if num_graded == num_samples:
        return ()
    own = "\n".join(first_reasons(one.reason for one in graded if one.reward is None))
    gathered = all_gather_text(own, groups.world, graded_s.device)
    reasons = first_reasons(reason for text in gathered for reason in text.splitlines())
    if num_graded == 0:
        raise ValueError(
            f"none of the step's {num_samples} responses has a reward: {reasons[0]}. Fix the reward "
            "function; return 0.0 for a response that cannot be graded."
        )
    return (f"{num_samples - num_graded} of {num_samples} samples have no reward: {'; '.join(reasons)}",)


def first_reasons(reasons: Iterator[str]) -> list[str]:
    """The first different ones."""
    return list(dict.fromkeys(reasons))[:MOST_REASONS]


def prompt_of_rows(rollout: Rollout, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Each row's prompt: equally many rows a prompt, next to each other, in the order of the prompts."""
    samples = rollout.ids_sl.shape[0] // len(prompts)
    rows = [prompt for prompt in prompts for _ in range(samples)]
    if [prompt.group_id for prompt in rows] != rollout.group_id_s.tolist():
        raise ValueError(
            f"the rollout engine returned rows of the groups {rollout.group_id_s.tolist()}: expected "
            f"{samples} rows for each of {[prompt.group_id for prompt in prompts]}, in that order."
        )
    return rows


def responses(rollout: Rollout) -> Iterator[list[int]]:
    """Each row's response ids, without the end-of-text id of those that finished."""
    start_s, stop_s = (
        rollout.prompt_length_s.tolist(),
        (rollout.length_s - rollout.finished_s.long()).tolist(),
    )
    for row_l, start, stop in zip(rollout.ids_sl.tolist(), start_s, stop_s, strict=True):
        yield row_l[start:stop]
