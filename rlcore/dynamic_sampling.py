"""Which samples of a rollout take part in the update, and why the others do not."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlcore.reward_groups import group_rewards


@dataclass(frozen=True, kw_only=True)
class SampleSelection:
    """`[S]` bool each; disjoint, and together every sample."""

    counts_s: torch.Tensor
    """Takes part: the sample mask."""
    reward_failed_s: torch.Tensor
    """Left because it has no reward."""
    truncated_s: torch.Tensor
    """Left because the response did not end by itself."""
    equal_group_s: torch.Tensor
    """Left because its group's rewards, of the samples still there, are all equal."""


def select_samples(
    raw_reward_s: torch.Tensor,
    graded_s: torch.Tensor,
    group_id_s: torch.Tensor,
    finished_s: torch.Tensor,
    *,
    drop_equal_groups: bool,
    mask_truncated: bool,
) -> SampleSelection:
    """The samples that take part, from raw rewards: before any shaping, length penalty or KL term.

    Shapes: `[S]` each; `raw_reward_s` floating, `graded_s` bool: the sample has a reward, `group_id_s`
    integer, `finished_s` bool: the response ended by itself. A sample without a reward leaves first. A
    truncated response says nothing about its reward, so it leaves next, and its group is judged by the
    others. A group of one is equal.
    Collectives: none: a group lies on one rank. Mutates: nothing. Raises `ValueError` for a bad reward.
    Source: Yu et al. 2025 (DAPO), dynamic sampling and overlong filtering.
    """
    truncated_s = graded_s & ~finished_s if mask_truncated else torch.zeros_like(finished_s)
    counts_s = graded_s & ~truncated_s
    differs_s = groups_that_differ(raw_reward_s, group_id_s, counts_s)
    equal_group_s = counts_s & ~differs_s if drop_equal_groups else torch.zeros_like(finished_s)
    return SampleSelection(
        counts_s=counts_s & ~equal_group_s,
        reward_failed_s=~graded_s,
        truncated_s=truncated_s,
        equal_group_s=equal_group_s,
    )


def groups_that_differ(
    raw_reward_s: torch.Tensor, group_id_s: torch.Tensor, counts_s: torch.Tensor | None = None
) -> torch.Tensor:
    """`[S]` bool: the sample counts, and its group's rewards that count are not all the same number."""
    groups = group_rewards(raw_reward_s, group_id_s, counts_s)
    return groups.to_samples(groups.filled_gn & ~groups.equal_g[:, None])
