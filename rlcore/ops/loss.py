"""THE LOSS: the clipped policy-gradient term per token, and its sum over a denominator known before the step.

Source: PPO's clipped surrogate (Schulman et al., 2017) with separate lower and upper epsilon (DAPO's
    clip-higher).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Clamp of the log ratio before exp, in nats: a ratio of exp(20) is clipped by any surrogate, and stays
# finite.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, kw_only=True)
class PolicyTerms:
    """Per-token policy-gradient term and what diagnostics read. `[t]`."""

    loss_t: torch.Tensor
    """float32, exactly 0 outside the mask."""
    ratio_t: torch.Tensor
    """float32, detached: exp(logprob - old logprob); 1 outside the mask."""
    log_ratio_t: torch.Tensor
    """float32, detached: its logarithm, not read back from it: the ratio underflows long before."""
    clipped_low_t: torch.Tensor
    """bool: the lower bound decided this token's loss."""
    clipped_high_t: torch.Tensor
    """bool: the upper bound decided this token's loss."""


def masked_log_ratio(
    logprob_t: torch.Tensor, old_logprob_t: torch.Tensor, mask_t: torch.Tensor
) -> torch.Tensor:
    """`[t]` logprob - old logprob where `mask_t`, 0 elsewhere; no gradient flows from masked slots.

    Both operands are selected before they are subtracted: a masked -inf, +inf or NaN never meets an
        operation.
    """
    return torch.where(mask_t, logprob_t, 0.0) - torch.where(mask_t, old_logprob_t, 0.0)


def clipped_policy_terms(
    logprob_t: torch.Tensor,
    old_logprob_t: torch.Tensor,
    advantage_t: torch.Tensor,
    mask_t: torch.Tensor,
    ratio_clip_min: float,
    ratio_clip_max: float,
) -> PolicyTerms:
    """PPO/GRPO clip: -min(r A, clip(r, 1 - ratio_clip_min, 1 + ratio_clip_max) A) with r = exp(logprob -
    old).

    Shapes: all `[t]`; `mask_t` bool, the actor mask. Dtypes: float32. Layout: any; elementwise. Collectives:
        none.
    Backward: to `logprob_t`, exactly 0 outside the mask and where the clip decides. Mutates: nothing.
    The log ratio is clamped at +20 before exp, so the loss is finite for every finite input.
    """
    log_ratio_t = masked_log_ratio(logprob_t, old_logprob_t, mask_t)
    log_ratio_t = log_ratio_t.clamp(max=MAX_LOG_RATIO)
    ratio_t = log_ratio_t.exp()
    advantage_t = torch.where(mask_t, advantage_t, 0.0)
    plain_t = -advantage_t * ratio_t
    bounded_t = -advantage_t * ratio_t.clamp(1.0 - ratio_clip_min, 1.0 + ratio_clip_max)
    decided_t = mask_t & (bounded_t.detach() > plain_t.detach())
    ratio_t = ratio_t.detach()
    return PolicyTerms(
        loss_t=torch.where(mask_t, torch.maximum(plain_t, bounded_t), 0.0),
        ratio_t=ratio_t,
        log_ratio_t=log_ratio_t.detach(),
        clipped_low_t=decided_t & (ratio_t < 1.0),
        clipped_high_t=decided_t & (ratio_t > 1.0),
    )


def token_sum_over(loss_t: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Sum of per-token losses over a global count; a count of 0 gives a differentiable 0, because the sum is
    0 too.
    """
    return loss_t.sum() / denominator.clamp(min=1)
