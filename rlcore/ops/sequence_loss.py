"""GSPO: the clip with one ratio per sequence, under packing and context parallelism."""

from __future__ import annotations

import torch

from rlcore.collectives import Group, all_reduce_
from rlcore.ops.loss import (
    ClipBounds,
    PolicyTerms,
    PolicyTokens,
    clipped,
    masked_log_ratio,
    old_logprob_of,
    ratio_limits,
    selected,
    terms_of,
    weighted,
)
from rlcore.ops.passes import compute_dtype
from rlcore.ops.pointwise import differentiable, evaluate
from rlcore.ops.segments import Segments, row_of, sums_and_counts


def gspo_terms(
    tokens: PolicyTokens, bounds: ClipBounds, segments: Segments, cp_group: Group = None
) -> PolicyTerms:
    """GSPO: -min(s A, clip(s, 1 - low, 1 + high) A) on each token, s = exp(mean of its sequence's log
    ratios).

    Maths: the mean runs over the sequence's tokens in the actor mask, on all CP ranks; the mean is clamped at
        +20, not the tokens.
    Shapes: all `[t]`; diagnostics hold the sequence's ratio on each of its tokens in the mask.
    Dtypes: float32 maths, sums in float64. Layout: packed in any order.
    Collectives: one all-reduce (sum) of 16 bytes a sequence over `cp_group`, whatever the data; in backward
        none.
    Backward: -s A to the token's own logprob (GSPO-token's gradient). d s / d logprob is s / n for each of n
        tokens and every one of the n terms holds s: where advantage, weight and multiplier are the same all
        over a sequence, that sum is this, so each rank needs its own tokens only. Where they differ, each
        token has the credit of its own advantage instead of the sequence's average.
    Mutates: nothing. Filler and fully masked sequences contribute exactly 0.
    Source: Zheng et al. 2025 (GSPO, and GSPO-token in its section 4.3).
    """
    old_logprob_t = old_logprob_of(tokens)
    limits = ratio_limits(bounds, tokens.logprob_t)

    def compute(logprob_t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        places = (tokens.mask_t, segments.segment_t, segments.num_segments)
        (sums_s2,) = evaluate(_log_ratio_sums, logprob_t, old_logprob_t, *places)
        all_reduce_(sums_s2, "sum", cp_group)
        log_ratio_s = (sums_s2[:, 0] / sums_s2[:, 1].clamp(min=1)).to(compute_dtype(logprob_t))
        given = (tokens.advantage_t, tokens.mask_t, segments.segment_t, log_ratio_s)
        factors = (tokens.weight_t, tokens.multiplier_t)
        return evaluate(_sequence_clip, *given, *factors, *limits)

    return terms_of(differentiable(tokens.logprob_t, compute), tokens.multiplier_t is not None)


def _log_ratio_sums(
    logprob_t: torch.Tensor,
    old_logprob_t: torch.Tensor,
    mask_t: torch.Tensor,
    segment_t: torch.Tensor,
    num_segments: int,
) -> tuple[torch.Tensor, ...]:
    dtype = compute_dtype(logprob_t)
    log_ratio_t = masked_log_ratio(logprob_t.to(dtype), old_logprob_t.to(dtype), mask_t)
    return (sums_and_counts(log_ratio_t, mask_t, segment_t, num_segments),)


def _sequence_clip(
    advantage_t: torch.Tensor,
    mask_t: torch.Tensor,
    segment_t: torch.Tensor,
    log_ratio_s: torch.Tensor,
    weight_t: torch.Tensor | None,
    multiplier_t: torch.Tensor | None,
    *limits: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    dtype = log_ratio_s.dtype
    # A token of no sequence has no ratio: masked by contract, and here.
    mask_t = mask_t & (segment_t >= 0)
    padded_s = torch.cat([log_ratio_s, log_ratio_s.new_zeros(1)])
    log_ratio_t = torch.where(mask_t, padded_s[row_of(segment_t, log_ratio_s.shape[0])], 0.0)
    loss_t, slope_t, *rest = clipped(log_ratio_t, selected(advantage_t, mask_t, dtype), *limits)
    loss_t, slope_t = weighted(loss_t, slope_t, mask_t, weight_t)
    if multiplier_t is None:
        return loss_t, slope_t, *rest
    multiplier_t = multiplier_t.to(dtype)
    return (loss_t * multiplier_t).sum(), slope_t * multiplier_t, loss_t, *rest
