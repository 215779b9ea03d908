"""Generalised advantage estimation over the policy's own tokens. No part of the loop: it needs a critic."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class GaeEstimate:
    """`[S, L]` float32, 0 where masked out."""

    advantage_sl: torch.Tensor
    """How much better than the critic's value."""
    return_sl: torch.Tensor
    """Advantage + value: what the critic is trained towards."""


def gae_advantages(
    reward_sl: torch.Tensor, value_sl: torch.Tensor, mask_sl: torch.Tensor, gamma: float, lam: float
) -> GaeEstimate:
    """GAE in which only masked-in tokens are steps; observation tokens between them are not there at all.

    Maths: over the masked-in tokens of a row, delta = reward + gamma * next value - value and advantage =
    delta + gamma * lam * next advantage; after the last one both are 0.
    Shapes: all `[S, L]`, token-aligned; `mask_sl` bool: tokens that the policy drew. Dtypes: any floating;
    computed in float64.
    A reward at a masked-out position (a tool's result, the end of the text, padding) belongs to the last
    masked-in token before it, undiscounted; before the first one there is nobody to reward. Padding thus
    holds reward 0 or something that is not finite, which is no reward. Values at masked-out positions may
    be anything.
    Collectives: none; a row is whole. Backward: none. Mutates: nothing. Results are capped at float32's
    range. Raises `ValueError` for gamma or lam outside [0, 1], and for a masked-in reward or value that is
    not finite.
    Source: Schulman et al. 2016, equation 16.
    """
    _check(reward_sl, value_sl, mask_sl, gamma, lam)
    reward_sl = torch.where(torch.isfinite(reward_sl), reward_sl.detach().to(torch.float64), 0.0)
    value_sl = torch.where(mask_sl, value_sl.detach().to(torch.float64), 0.0)
    advantage_sl = torch.zeros_like(value_sl)
    next_value_s = torch.zeros_like(value_sl[:, 0]) if value_sl.shape[1] else value_sl.sum(dim=1)
    next_advantage_s, waiting_s = torch.zeros_like(next_value_s), torch.zeros_like(next_value_s)
    for position in reversed(range(value_sl.shape[1])):
        step_s = mask_sl[:, position]
        waiting_s = waiting_s + reward_sl[:, position]
        delta_s = waiting_s + gamma * next_value_s - value_sl[:, position]
        advantage_s = delta_s + gamma * lam * next_advantage_s
        advantage_sl[:, position] = torch.where(step_s, advantage_s, 0.0)
        next_advantage_s = torch.where(step_s, advantage_s, next_advantage_s)
        next_value_s = torch.where(step_s, value_sl[:, position], next_value_s)
        waiting_s = torch.where(step_s, 0.0, waiting_s)
    return GaeEstimate(advantage_sl=_to_float32(advantage_sl), return_sl=_to_float32(advantage_sl + value_sl))


def _to_float32(value_sl: torch.Tensor) -> torch.Tensor:
    limit = torch.finfo(torch.float32).max
    return value_sl.clamp(-limit, limit).to(torch.float32)


def _check(
    reward_sl: torch.Tensor, value_sl: torch.Tensor, mask_sl: torch.Tensor, gamma: float, lam: float
) -> None:
    if not (0.0 <= gamma <= 1.0 and 0.0 <= lam <= 1.0):
        raise ValueError(f"gamma={gamma}, lam={lam}: expected two numbers in [0, 1].")
    if not reward_sl.shape == value_sl.shape == mask_sl.shape or mask_sl.ndim != 2:
        raise ValueError(
            f"rewards {tuple(reward_sl.shape)}, values {tuple(value_sl.shape)} and mask "
            f"{tuple(mask_sl.shape)}: expected one shape [S, L]."
        )
    for name, tensor_sl in (("reward", reward_sl), ("value", value_sl)):
        bad = (mask_sl & ~torch.isfinite(tensor_sl)).nonzero()
        if bad.numel():
            row, position = bad[0].tolist()
            raise ValueError(
                f"the {name} of sample {row} at position {position} is {float(tensor_sl[row, position])}: "
                "expected a finite number at every token that counts."
            )
