"""From rewards to advantages. One function per estimator; groups are told apart by id, never by position."""

from __future__ import annotations

import torch


def grpo_advantages(
    reward_s: torch.Tensor, group_id_s: torch.Tensor, normalize_std: bool = True
) -> torch.Tensor:
    """GRPO: reward minus its group's mean, over the group's sample standard deviation (Bessel).

    Shapes: `reward_s [S]` floating, `group_id_s [S]` integer, result `[S]` float32. Rows of one group may
    stand anywhere; permuting rows permutes the result.
    A group of one, and a group whose rewards are all equal, has advantage exactly 0. There is no epsilon: the
    deviation is computed from centred rewards in float64, so it is 0 only where the group is equal.
    Raises `ValueError` naming the sample for a reward that is not finite, and for an empty batch.
    Source: Shao et al. 2024 (DeepSeekMath), equation 3 with the sample deviation.
    """
    check_rewards(reward_s, group_id_s)
    reward_s = reward_s.to(torch.float64)
    _, index_s = torch.unique(group_id_s, return_inverse=True)
    count_s = _group_sum(torch.ones_like(reward_s), index_s)
    centred_s = reward_s - _group_sum(reward_s, index_s) / count_s
    # The mean of equal numbers can miss them by a rounding; compare the rewards themselves instead.
    equal_s = _group_extreme(reward_s, index_s, "amax") == _group_extreme(reward_s, index_s, "amin")
    advantage_s = torch.where(equal_s, 0.0, centred_s)
    if normalize_std:
        variance_s = _group_sum(advantage_s.square(), index_s) / (count_s - 1).clamp(min=1)
        advantage_s = torch.where(equal_s, 0.0, advantage_s / torch.where(equal_s, 1.0, variance_s).sqrt())
    return advantage_s.to(torch.float32)


def check_rewards(reward_s: torch.Tensor, group_id_s: torch.Tensor) -> None:
    """Every reward is a finite number and has a group id, or `ValueError` naming the first bad sample."""
    if reward_s.ndim != 1 or reward_s.shape != group_id_s.shape:
        raise ValueError(
            f"rewards have shape {tuple(reward_s.shape)} and group ids {tuple(group_id_s.shape)}: expected "
            "one of each per sample."
        )
    if reward_s.numel() == 0:
        raise ValueError(
            "no sample in the batch: a step needs at least one response. Raise rollout.prompts_per_step."
        )
    bad = (~torch.isfinite(reward_s)).nonzero()
    if bad.numel():
        row = int(bad[0])
        raise ValueError(
            f"the reward of sample {row} (group {int(group_id_s[row])}) is {float(reward_s[row])}: a reward "
            "function must return a finite number. Fix the task's reward, or return 0.0 for a response that "
            "cannot be graded."
        )


def _group_sum(value_s: torch.Tensor, index_s: torch.Tensor) -> torch.Tensor:
    """`[S]`: for each row the sum over its group."""
    return torch.zeros_like(value_s).index_add_(0, index_s, value_s)[index_s]


def _group_extreme(value_s: torch.Tensor, index_s: torch.Tensor, reduce: str) -> torch.Tensor:
    """`[S]`: for each row the largest (`amax`) or smallest (`amin`) value of its group."""
    start = torch.zeros_like(value_s)
    return start.scatter_reduce(0, index_s, value_s, reduce=reduce, include_self=False)[index_s]
