"""THE LOSS: policy-gradient terms per token, each a small function, and their sum over a denominator known
before the step.

One function per surrogate. Methods that differ in the aggregation alone are the same function:
- GRPO, PPO: `clip_terms`; DAPO: the same with unequal epsilons and the token mean; Dr.GRPO: the same with the
  fixed length (`ops/aggregation.py`), and advantages without the deviation;
- GSPO: `ops/sequence_loss.py`; CISPO, REINFORCE and RLOO, on-policy, positive-example NLL, entropy bonus:
  here.

Every derivative is written by hand in the pass that computes the value (`ops/pointwise.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from rlcore.ops.passes import compute_dtype
from rlcore.ops.pointwise import Core, per_token, weighted_total

# Clamp of the log ratio before exp, in nats: a ratio of exp(20) is clipped by any surrogate, and stays
# finite.
MAX_LOG_RATIO = 20.0
# The ratio at which that clamp decides a loss: a rounding below exp(20), so that a clamped ratio is above it.
MAX_RATIO = math.exp(MAX_LOG_RATIO) * (1.0 - 1e-6)


@dataclass(frozen=True, kw_only=True)
class PolicyTerms:
    """Per-token policy-gradient term and what diagnostics read. `[t]`; float64 for float64 logprobs."""

    loss_t: torch.Tensor
    """float32, exactly 0 outside the mask. Detached where `total` is given."""
    ratio_t: torch.Tensor
    """float32, detached: exp(logprob - old logprob), or the sequence's ratio; 1 outside the mask."""
    log_ratio_t: torch.Tensor
    """float32, detached: its logarithm, not read back from it: the ratio underflows long before."""
    clipped_low_t: torch.Tensor
    """bool: the lower bound decided this token's loss."""
    clipped_high_t: torch.Tensor
    """bool: an upper bound (clip, dual clip, MAX_LOG_RATIO) decided this token's loss."""
    total: torch.Tensor | None = None
    """0-dim: sum of loss_t x multiplier_t, where `PolicyTokens.multiplier_t` was given; carries the
    gradient."""


@dataclass(frozen=True, kw_only=True)
class PolicyTokens:
    """What a policy loss reads about each token. `[t]`; masked slots may hold anything, NaN included.

    Everything but `logprob_t` is a constant to the gradient.
    """

    logprob_t: torch.Tensor
    """Of the policy being trained; any float dtype."""
    advantage_t: torch.Tensor
    """float."""
    mask_t: torch.Tensor
    """bool: the actor mask."""
    old_logprob_t: torch.Tensor | None = None
    """Recomputed before the update; None for losses without a ratio."""
    weight_t: torch.Tensor | None = None
    """float >= 0: importance weight (`ops/importance.py`), multiplied into the loss; None is 1."""
    multiplier_t: torch.Tensor | None = None
    """float, `[t]` or 0-dim, finite in every slot: what a token's loss counts (`ops/aggregation.py`). Given,
    the sum is part of the pass: see `PolicyTerms.total`.
    """


@dataclass(frozen=True, kw_only=True)
class ClipBounds:
    """Epsilons, not bounds: the ratio is clipped to [1 - low, 1 + high]."""

    low: float
    """In [0, 1]."""
    high: float
    """>= 0."""
    dual: float | None = None
    """c > 1: with a negative advantage a token's loss is at most -c x advantage. None: no bound."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= 1.0:
            raise ValueError(f"clip epsilon low={self.low}: expected 0 to 1, the distance below ratio 1.")
        if not self.high >= 0.0:
            raise ValueError(f"clip epsilon high={self.high}: expected >= 0, the distance above ratio 1.")
        if self.dual is not None and not self.dual > 1.0:
            raise ValueError(
                f"dual clip c={self.dual}: expected more than 1; a smaller one would bound the loss of a "
                "ratio of 1. Set None for no dual clip."
            )


def clip_terms(tokens: PolicyTokens, bounds: ClipBounds) -> PolicyTerms:
    """PPO/GRPO clip: -min(r A, clip(r, 1 - low, 1 + high) A), r = exp(logprob - old); where A < 0, at
    most -c A.

    Shapes: all `[t]`. Dtypes: float32 maths; float64 for float64 logprobs. Layout: any; elementwise.
    Collectives: none. Backward: -A r to `logprob_t`; exactly 0 outside the mask and where a bound decides.
    Mutates: nothing. The log ratio is clamped at +20 before exp: finite for every finite input.
    Source: Schulman et al. 2017 (PPO); Ye et al. 2020 (dual clip); Yu et al. 2025 (DAPO: high apart from
    low).
    """
    return _ratio_terms(_clip, tokens, bounds)


def cispo_terms(tokens: PolicyTokens, bounds: ClipBounds) -> PolicyTerms:
    """CISPO: -stop(clip(r, 1 - low, 1 + high)) A logprob. The weight is clipped, on both sides; no token
    loses its gradient.

    Shapes, dtypes, layout, collectives: as `clip_terms`. Backward: -clip(r) A. Mutates: nothing.
    `ValueError` for a dual clip: there is no objective to bound.
    Source: MiniMax-M1 (2025), with a lower bound too.
    """
    if bounds.dual is not None:
        raise ValueError("CISPO has no dual clip: it clips the weight, not the objective. Set dual to None.")
    return _ratio_terms(_cispo, tokens, bounds)


def reinforce_terms(tokens: PolicyTokens) -> PolicyTerms:
    """REINFORCE / RLOO: -A logprob. The estimators differ in the advantage alone.

    Shapes, dtypes, layout, collectives: as `clip_terms`. Backward: -A. Mutates: nothing.
    On-policy: the ratio is 1 by definition and reported so; an old logprob is not read.
    Source: Williams 1992; Ahmadian et al. 2024 (RLOO).
    """
    return _plain_terms(_reinforce, tokens, tokens.advantage_t)


def on_policy_terms(tokens: PolicyTokens) -> PolicyTerms:
    """The unclipped surrogate -r A at r = 1: value -A, gradient -A; for data drawn by this very policy.

    Shapes, dtypes, layout, collectives: as `clip_terms`. Backward: -A. Mutates: nothing.
    An old logprob is not read. Source: Schulman et al. 2017, at the first update.
    """
    return _plain_terms(_on_policy, tokens, tokens.advantage_t)


def positive_nll_terms(tokens: PolicyTokens, positive_t: torch.Tensor) -> PolicyTerms:
    """-logprob where `positive_t` (bool `[t]`: the token's sample was right); 0 elsewhere. No advantage.

    To be divided by the number of positive tokens of the whole step (`aggregation.token_mean` on the mask &
    `positive_t`), added to the policy loss with a coefficient.
    Shapes, dtypes, layout, collectives: as `clip_terms`. Backward: -1. Mutates: nothing.
    Source: VAPO (Yue et al. 2025), positive-example LM loss.
    """
    return _plain_terms(_negative_logprob, tokens, tokens.mask_t & positive_t)


def entropy_terms(
    entropy_t: torch.Tensor, mask_t: torch.Tensor, multiplier_t: torch.Tensor | None = None
) -> PolicyTerms:
    """Entropy bonus: -entropy where `mask_t`, 0 elsewhere; to be added with a coefficient.

    `entropy_t [t]` comes from the op, exact under TP. Backward: -1 to `entropy_t`. Ratio 1. Mutates: nothing.
    Source: Williams and Peng 1991.
    """
    tokens = PolicyTokens(
        logprob_t=entropy_t, advantage_t=entropy_t, mask_t=mask_t, multiplier_t=multiplier_t
    )
    return _plain_terms(_negative_logprob, tokens, mask_t)


def clipped_policy_terms(
    logprob_t: torch.Tensor,
    old_logprob_t: torch.Tensor,
    advantage_t: torch.Tensor,
    mask_t: torch.Tensor,
    ratio_clip_min: float,
    ratio_clip_max: float,
) -> PolicyTerms:
    """`clip_terms` without dual clip, weights or multipliers."""
    tokens = PolicyTokens(
        logprob_t=logprob_t, old_logprob_t=old_logprob_t, advantage_t=advantage_t, mask_t=mask_t
    )
    return clip_terms(tokens, ClipBounds(low=ratio_clip_min, high=ratio_clip_max))


def token_sum_over(loss_t: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Sum of per-token losses over a global count; a count of 0 gives a differentiable 0, because the sum is
    0 too.
    """
    return loss_t.sum() / denominator.clamp(min=1)


def masked_log_ratio(
    logprob_t: torch.Tensor, old_logprob_t: torch.Tensor, mask_t: torch.Tensor
) -> torch.Tensor:
    """`[t]` logprob - old logprob where `mask_t`, 0 elsewhere; no gradient flows from masked slots.

    Both operands are selected before they are subtracted: a masked -inf, +inf or NaN never meets an
        operation.
    """
    return torch.where(mask_t, logprob_t, 0.0) - torch.where(mask_t, old_logprob_t, 0.0)


# --- from a core to terms


def terms_of(outputs: tuple[torch.Tensor, ...], has_total: bool) -> PolicyTerms:
    """Terms of `(loss_t, ratio_t, log_ratio_t, clipped_low_t, clipped_high_t)`, the total first if there is
    one.
    """
    total = outputs[0] if has_total else None
    loss_t, ratio_t, log_ratio_t, clipped_low_t, clipped_high_t = outputs[has_total:]
    return PolicyTerms(
        loss_t=loss_t,
        ratio_t=ratio_t,
        log_ratio_t=log_ratio_t,
        clipped_low_t=clipped_low_t,
        clipped_high_t=clipped_high_t,
        total=total,
    )


def old_logprob_of(tokens: PolicyTokens) -> torch.Tensor:
    """The old logprobs a ratio needs, or `ValueError`."""
    if tokens.old_logprob_t is None:
        raise ValueError(
            "this loss has a ratio and needs old_logprob_t: score the batch before the update, or choose "
            "REINFORCE or on-policy."
        )
    return tokens.old_logprob_t


def _run(core: Core, tokens: PolicyTokens, *arguments: Any) -> tuple[torch.Tensor, ...]:
    if tokens.multiplier_t is None:
        return per_token(core, tokens.logprob_t, *arguments)
    return weighted_total(core, tokens.logprob_t, tokens.multiplier_t, *arguments)


def _ratio_terms(core: Core, tokens: PolicyTokens, bounds: ClipBounds) -> PolicyTerms:
    given = (old_logprob_of(tokens), tokens.advantage_t, tokens.mask_t, tokens.weight_t)
    limits = ratio_limits(bounds, tokens.logprob_t)
    return terms_of(_run(core, tokens, *given, *limits), tokens.multiplier_t is not None)


def ratio_limits(bounds: ClipBounds, logprob_t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`(lowest, highest, ceiling)` of the ratio, in the maths' dtype on the logprobs' device.

    Tensors, because compiled code is made again for every new number.
    """
    ceiling = MAX_RATIO if bounds.dual is None else min(bounds.dual, MAX_RATIO)
    limits = (1.0 - bounds.low, min(1.0 + bounds.high, MAX_RATIO), ceiling)
    return tuple(logprob_t.new_full((), limit, dtype=compute_dtype(logprob_t)) for limit in limits)


def _plain_terms(core: Core, tokens: PolicyTokens, given_t: torch.Tensor) -> PolicyTerms:
    """Terms of a loss without a ratio. The ones are new numbers: no diagnostic shares memory with a
    logprob."""
    outputs = _run(core, tokens, given_t, tokens.mask_t, tokens.weight_t)
    loss_t = outputs[-1].detach()
    never_t = torch.zeros_like(loss_t, dtype=torch.bool)
    rest = (torch.ones_like(loss_t), torch.zeros_like(loss_t), never_t, never_t)
    return terms_of((*outputs, *rest), tokens.multiplier_t is not None)


# --- the arithmetic of each loss: `(loss_t, slope_t, *diagnostics)`


def weighted(
    loss_t: torch.Tensor, slope_t: torch.Tensor, mask_t: torch.Tensor, weight_t: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and slope times the importance weight."""
    if weight_t is None:
        return loss_t, slope_t
    weight_t = torch.where(mask_t, weight_t.to(loss_t.dtype), 0.0)
    return loss_t * weight_t, slope_t * weight_t


def clipped(
    log_ratio_t: torch.Tensor,
    advantage_t: torch.Tensor,
    lowest: torch.Tensor,
    highest: torch.Tensor,
    ceiling: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """`(loss_t, slope_t, ratio_t, log_ratio_t, clipped_low_t, clipped_high_t)` of the clipped surrogate.

    The worse of -r A and -clip(r) A is -A times the ratio kept to one side: at most `highest` for A > 0, at
    least `lowest` for A < 0, where the dual clip is an upper bound of the ratio too. `log_ratio_t` and
    `advantage_t` are 0 outside the mask; then so is all that follows, and the ratio 1.
    """
    log_ratio_t = log_ratio_t.clamp(max=MAX_LOG_RATIO)
    ratio_t = log_ratio_t.exp()
    least_t = torch.where(advantage_t < 0.0, lowest, 0.0)
    most_t = torch.where(advantage_t > 0.0, highest, ceiling)
    # maximum and minimum hand a NaN on: a broken model must not look like a small loss.
    bounded_t = torch.minimum(torch.maximum(ratio_t, least_t), most_t)
    loss_t = -advantage_t * bounded_t
    slope_t = torch.where(bounded_t == ratio_t, loss_t, 0.0)
    above_t = (ratio_t > most_t) & (advantage_t != 0.0)
    return loss_t, slope_t, ratio_t, log_ratio_t, ratio_t < least_t, above_t


def selected(value_t: torch.Tensor, mask_t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`value_t` in the maths' dtype where `mask_t`, 0 elsewhere."""
    return torch.where(mask_t, value_t.to(dtype), 0.0)


def _clip(
    logprob_t: torch.Tensor,
    old_logprob_t: torch.Tensor,
    advantage_t: torch.Tensor,
    mask_t: torch.Tensor,
    weight_t: torch.Tensor | None,
    *limits: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    dtype = compute_dtype(logprob_t)
    log_ratio_t = masked_log_ratio(logprob_t.to(dtype), old_logprob_t.to(dtype), mask_t)
    loss_t, slope_t, *rest = clipped(log_ratio_t, selected(advantage_t, mask_t, dtype), *limits)
    return *weighted(loss_t, slope_t, mask_t, weight_t), *rest


def _cispo(
    logprob_t: torch.Tensor,
    old_logprob_t: torch.Tensor,
    advantage_t: torch.Tensor,
    mask_t: torch.Tensor,
    weight_t: torch.Tensor | None,
    *limits: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    dtype = compute_dtype(logprob_t)
    lowest, highest, _ = limits
    logprob_t = selected(logprob_t, mask_t, dtype)
    log_ratio_t = logprob_t - selected(old_logprob_t, mask_t, dtype)
    bounded_t = log_ratio_t.clamp(max=MAX_LOG_RATIO)
    ratio_t = bounded_t.exp()
    slope_t = -selected(advantage_t, mask_t, dtype) * ratio_t.clamp(lowest, highest)
    loss_t, slope_t = weighted(slope_t * logprob_t, slope_t, mask_t, weight_t)
    return loss_t, slope_t, ratio_t, bounded_t, ratio_t < lowest, ratio_t > highest


def _reinforce(
    logprob_t: torch.Tensor, advantage_t: torch.Tensor, mask_t: torch.Tensor, weight_t: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    dtype = compute_dtype(logprob_t)
    slope_t = -selected(advantage_t, mask_t, dtype)
    return weighted(slope_t * selected(logprob_t, mask_t, dtype), slope_t, mask_t, weight_t)


def _on_policy(
    logprob_t: torch.Tensor, advantage_t: torch.Tensor, mask_t: torch.Tensor, weight_t: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    slope_t = -selected(advantage_t, mask_t, compute_dtype(logprob_t))
    return weighted(slope_t, slope_t, mask_t, weight_t)


def _negative_logprob(
    value_t: torch.Tensor, counted_t: torch.Tensor, mask_t: torch.Tensor, weight_t: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    dtype = compute_dtype(value_t)
    slope_t = torch.where(counted_t, -1.0, 0.0).to(dtype)
    return weighted(-selected(value_t, counted_t, dtype), slope_t, mask_t, weight_t)
