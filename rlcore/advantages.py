"""From rewards to advantages. One function per estimator; groups are told apart by id, never by position.

GRPO and RLOO compare a sample with its own group, which lies whole on one rank; REINFORCE++ compares tokens
with those of every rank. GAE, which needs a critic, is in `gae`.
"""

from __future__ import annotations

import torch

from rlcore.collectives import Group
from rlcore.reward_groups import RewardGroups, group_rewards
from rlcore.whitening import whiten


def grpo_advantages(
    reward_s: torch.Tensor,
    group_id_s: torch.Tensor,
    normalize_std: bool = True,
    leave_one_out: bool = False,
    counts_s: torch.Tensor | None = None,
) -> torch.Tensor:
    """GRPO: reward minus its group's mean, over the group's sample standard deviation (Bessel).

    `leave_one_out` takes mean and deviation from the group's other samples; where those are all equal, or
    only one, there is no deviation and the sample stays unnormalised.
    Shapes: `reward_s [S]` floating, `group_id_s [S]` integer, `counts_s [S]` bool (None: all), result `[S]`
    float32. Rows of one group may stand anywhere; permuting rows permutes the result, bit for bit.
    Samples that do not count are outside the statistics, may hold NaN, and have advantage 0. A group of one,
    and a group whose rewards are all equal, has advantage exactly 0. There is no epsilon: deviations are
    taken from a reward of the group in float64, so they are 0 only where the group is equal.
    Collectives: none. Mutates: nothing. Raises `ValueError` naming the sample for a reward that is not
    finite, and for an empty batch.
    Source: Shao et al. 2024 (DeepSeekMath), equation 3, sample deviation; leave-one-out as in NeMo-RL.
    """
    groups = group_rewards(reward_s, group_id_s, counts_s)
    if leave_one_out:
        advantage_gn = _less_the_others(groups)
        if normalize_std:
            advantage_gn = advantage_gn / _deviation_of_the_others(groups, torch.finfo(reward_s.dtype).eps)
    else:
        deviation_gn = groups.deviation_gn
        centred_gn = deviation_gn - deviation_gn.sum(dim=1, keepdim=True) / groups.size_g1
        advantage_gn = torch.where(groups.filled_gn, centred_gn, 0.0)
        if normalize_std:
            # Squares of differences below 1e-154 would underflow.
            advantage_gn = advantage_gn / _largest(advantage_gn)
            variance_g1 = advantage_gn.square().sum(dim=1, keepdim=True) / (groups.size_g1 - 1).clamp(min=1)
            advantage_gn = advantage_gn / _one_for_zero(variance_g1).sqrt()
    return groups.to_samples(advantage_gn).to(torch.float32)


def rloo_advantages(
    reward_s: torch.Tensor, group_id_s: torch.Tensor, counts_s: torch.Tensor | None = None
) -> torch.Tensor:
    """RLOO: reward minus the mean reward of the group's other samples; 0 for a group of one.

    Shapes, masks, errors: as `grpo_advantages`. Collectives: none. Mutates: nothing.
    Source: Kool et al. 2019; Ahmadian et al. 2024 (Back to Basics).
    """
    groups = group_rewards(reward_s, group_id_s, counts_s)
    return groups.to_samples(_less_the_others(groups)).to(torch.float32)


def reinforce_pp_advantages(
    reward_s: torch.Tensor,
    token_mask_sl: torch.Tensor,
    counts_s: torch.Tensor | None = None,
    group: Group = None,
) -> torch.Tensor:
    """REINFORCE++: every response token carries its sample's reward, whitened over all tokens of all ranks.

    Shapes: `reward_s [S]` floating, `token_mask_sl [S, L]` bool, `counts_s [S]` bool (None: all), result `[S,
    L]` float32, 0 outside the mask and for samples that do not count. Longer responses weigh more in the
    statistics: they are per token, as in the source.
    Collectives, group and errors: those of `whiten`. Mutates: nothing.
    Source: Hu 2025 (REINFORCE++), global advantage normalisation; gamma 1, the KL term stays in the loss.
    """
    mask_sl = token_mask_sl if counts_s is None else token_mask_sl & counts_s[:, None]
    return whiten(reward_s[:, None].expand_as(mask_sl), mask_sl, group)


def _less_the_others(groups: RewardGroups) -> torch.Tensor:
    """`[G, N]`: reward minus the mean of the group's other rewards; 0 in empty slots and groups of one."""
    deviation_gn = groups.deviation_gn
    baseline_gn = _sum_of_the_others(deviation_gn) / (groups.size_g1 - 1).clamp(min=1)
    return torch.where(groups.filled_gn, deviation_gn - baseline_gn, 0.0)


# Rewards that differ by this many roundings of their own dtype are the same number reached in two ways.
ROUNDINGS = 8


def _deviation_of_the_others(groups: RewardGroups, eps: float) -> torch.Tensor:
    """`[G, N]`: sample standard deviation (Bessel) of the group's other rewards; 1 where there is none.

    None: fewer than two others, or others that deviate by no more than `ROUNDINGS` x `eps` of the group's
    largest reward. Without that bound a rounding in one reward would multiply an advantage by 1e15.
    """
    largest_g1 = _largest(groups.deviation_gn)
    unit_gn = groups.deviation_gn / largest_g1
    others_g1 = groups.size_g1 - 1
    # The sample's own term never enters, so an outlier does not cancel in what the others leave. The median
    # lies between the others, so their sum of squares is not small against its terms.
    square_gn = _sum_of_the_others(unit_gn.square())
    square_gn = square_gn - _sum_of_the_others(unit_gn).square() / others_g1.clamp(min=1)
    deviation_gn = (square_gn.clamp(min=0) / (others_g1 - 1).clamp(min=1)).sqrt() * largest_g1
    rounding_g1 = ROUNDINGS * eps * groups.reward_gn.abs().amax(dim=1, keepdim=True)
    return torch.where(deviation_gn > rounding_g1, deviation_gn, 1.0)


def _sum_of_the_others(value_gn: torch.Tensor) -> torch.Tensor:
    """`[G, N]`: the row's sum without the slot itself, added up from both ends; nothing is subtracted."""
    nothing_g1 = torch.zeros_like(value_gn[:, :1])
    before_gn = torch.cat([nothing_g1, value_gn[:, :-1]], dim=1).cumsum(dim=1)
    after_gn = torch.cat([nothing_g1, value_gn.flip(1)[:, :-1]], dim=1).cumsum(dim=1).flip(1)
    return before_gn + after_gn


def _largest(value_gn: torch.Tensor) -> torch.Tensor:
    """`[G, 1]`: the largest magnitude of each row, 1 where all are 0."""
    return _one_for_zero(value_gn.abs().amax(dim=1, keepdim=True))


def _one_for_zero(value: torch.Tensor) -> torch.Tensor:
    """A divisor: what is 0 / 0 otherwise stays 0."""
    return torch.where(value > 0, value, 1.0)
