"""Importance corrections: weights old policy / sampler, for tokens that the rollout engine drew with other
numbers than the trainer's.

Every weight is clamped in log space before exp, so that an overflow becomes the cap, and is detached. Built
from old logprobs, not current ones: the policy update is the ratio's business. A token that neither side can
draw (both logprobs -inf) has no weight and is dropped. NaN of a token that counts is handed on by the
token-level corrections, so that the step is refused, and rejects the token or sequence where there are
bounds.

Filtered tokens leave the mask (`kept_t`) and stay in the denominator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from rlcore.collectives import Group
from rlcore.metrics import Metric, Sum, effective_size_over, mean_over
from rlcore.ops.passes import compute_dtype
from rlcore.ops.segments import Segments, segment_sums

# Clamp of a log weight that no cap bounds, in nats: exp(20) times any loss is far from float32's limit.
MAX_LOG_WEIGHT = 20.0
# What an infinite log weight counts as, in nats: sums over a sequence stay numbers, and exp of their mean
# over a million tokens still overflows into the cap or underflows to 0.
INFINITE_LOG_WEIGHT = 1e8

Statistic = Literal["geometric", "sum"]


@dataclass(frozen=True, kw_only=True)
class ImportanceWeights:
    """What a correction says about each token. `[t]`, detached; float64 for float64 logprobs."""

    weight_t: torch.Tensor
    """float32, finite, >= 0: 0 where dropped, 1 outside the mask."""
    kept_t: torch.Tensor
    """bool: False where the correction dropped the token; True outside the mask."""
    log_weight_t: torch.Tensor
    """float32: old logprob - sampler logprob, neither clipped nor averaged; 0 outside the mask. Finite, or
    NaN where a counting logprob is.
    """


@dataclass(frozen=True, kw_only=True)
class WeightBounds:
    """Weights (not epsilons, not logarithms) between which something is kept."""

    low: float
    """>= 0."""
    high: float
    """>= low."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.high:
            raise ValueError(
                f"importance bounds [{self.low}, {self.high}]: expected 0 <= low <= high, as weights."
            )

    def contain(self, log_weight: torch.Tensor) -> torch.Tensor:
        """bool, compared in log space; NaN is outside."""
        return (log_weight >= _log(self.low)) & (log_weight <= _log(self.high))


@dataclass(frozen=True, kw_only=True)
class SequenceFilter:
    """How `seq_mask_tis` rejects sequences, and weighs the tokens of the others."""

    bounds: WeightBounds
    """A sequence stays whose statistic is inside."""
    cap: float | None
    """Largest token weight of an accepted sequence. None: raw weights, bounded by exp(20) alone."""
    statistic: Statistic = "geometric"
    """`geometric`: exp of the mean log weight, whatever the length; `sum`: exp of the sum."""

    def __post_init__(self) -> None:
        if self.cap is not None:
            _check_cap(self.cap)


def tis(
    old_logprob_t: torch.Tensor, sampler_logprob_t: torch.Tensor, mask_t: torch.Tensor, cap: float
) -> ImportanceWeights:
    """Truncated importance sampling: min(exp(old - sampler), cap). Drops nothing. The contract of all below:

    Shapes: all `[t]`; `mask_t` bool: tokens that count and are in both supports. Dtypes: any float in,
    float32
        maths. Layout: any. Collectives: none. Backward: none. Mutates: nothing.
    Masked slots may hold anything. `ValueError` for a cap that is not a positive number.
    Source: Yao et al. 2025 (truncated importance sampling for rollout mismatch); Ionides 2008.
    """
    _check_cap(cap)
    log_weight_t, scorable_t = _log_weights(old_logprob_t, sampler_logprob_t, mask_t)
    return _weights(_capped(log_weight_t, cap), scorable_t, log_weight_t, mask_t)


def icepop(
    old_logprob_t: torch.Tensor, sampler_logprob_t: torch.Tensor, mask_t: torch.Tensor, bounds: WeightBounds
) -> ImportanceWeights:
    """exp(old - sampler) inside the bounds; a token outside them leaves the mask, with weight 0.

    Contract as `tis`. Source: IcePop (Ling team, 2025).
    """
    log_weight_t, scorable_t = _log_weights(old_logprob_t, sampler_logprob_t, mask_t)
    kept_t = scorable_t & (bounds.contain(log_weight_t) | ~mask_t)
    return _weights(_capped(log_weight_t, bounds.high), kept_t, log_weight_t, mask_t)


def seq_mask_tis(
    old_logprob_t: torch.Tensor,
    sampler_logprob_t: torch.Tensor,
    mask_t: torch.Tensor,
    segments: Segments,
    rule: SequenceFilter,
    cp_group: Group = None,
) -> ImportanceWeights:
    """Rejects whole sequences by the statistic of their log weights; the others' tokens have their own
    weights.

    Contract as `tis`, and one all-reduce (sum) of 16 bytes a sequence over `cp_group`, whatever the data.
    Source: sequence-level masked importance sampling (Liu et al. 2025, "When Speed Kills Stability").
    """
    log_weight_t, scorable_t = _log_weights(old_logprob_t, sampler_logprob_t, mask_t)
    log_statistic_t = _statistic(log_weight_t, scorable_t & mask_t, segments, rule.statistic, cp_group)
    kept_t = scorable_t & (rule.bounds.contain(log_statistic_t) | ~mask_t)
    return _weights(_capped(log_weight_t, rule.cap), kept_t, log_weight_t, mask_t)


def geometric(
    old_logprob_t: torch.Tensor,
    sampler_logprob_t: torch.Tensor,
    mask_t: torch.Tensor,
    segments: Segments,
    cap: float,
    cp_group: Group = None,
) -> ImportanceWeights:
    """One weight per sequence: exp(mean of old - sampler over its tokens in the mask), capped. GSPO's own.

    The mean, so that a weight does not shrink with the length of a reply, and matches GSPO's ratio.
    Contract as `seq_mask_tis`; drops nothing. Source: the statistic of GSPO (Zheng et al. 2025).
    """
    return _per_sequence(old_logprob_t, sampler_logprob_t, mask_t, segments, "geometric", cap, cp_group)


def sequence(
    old_logprob_t: torch.Tensor,
    sampler_logprob_t: torch.Tensor,
    mask_t: torch.Tensor,
    segments: Segments,
    cap: float,
    cp_group: Group = None,
) -> ImportanceWeights:
    """One weight per sequence: exp(sum of old - sampler over its tokens in the mask), capped. GSPO's option.

    The unbiased weight of a whole reply, with the variance of its length.
    Contract as `seq_mask_tis`; drops nothing. Source: importance sampling of trajectories (Precup et al.
    2000).
    """
    return _per_sequence(old_logprob_t, sampler_logprob_t, mask_t, segments, "sum", cap, cp_group)


def importance_metrics(weights: ImportanceWeights, mask_t: torch.Tensor) -> dict[str, Metric]:
    """Sums that add up over microbatches and ranks, over the tokens of `mask_t`.

    `effective_size`: how many equally weighted tokens the weights are worth. `raw_mean`: the mean of exp(old
    - sampler) before any cap or filter (log weights above 20 as 20), so that it shows what the correction
    hides. NaN, whether a filter dropped it or the step is refused for it, is in no mean and counted as `nan`.
    """
    raw_t = weights.log_weight_t.double().clamp(max=MAX_LOG_WEIGHT).exp()
    weighed_t = mask_t & ~torch.isnan(weights.weight_t)
    return {
        "importance/weight": mean_over(weights.weight_t, weighed_t),
        "importance/effective_size": effective_size_over(weights.weight_t, weighed_t),
        "importance/raw_mean": mean_over(raw_t, mask_t & ~torch.isnan(raw_t)),
        "importance/nan": Sum((mask_t & torch.isnan(weights.log_weight_t)).sum()),
        "importance/dropped": Sum((mask_t & ~weights.kept_t).sum()),
    }


def _log_weights(
    old_logprob_t: torch.Tensor, sampler_logprob_t: torch.Tensor, mask_t: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log weights, finite unless a counting logprob is NaN, 0 outside the mask; and where there is one.

    bool, True outside the mask.
    """
    dtype = compute_dtype(old_logprob_t)
    neither_t = mask_t & (old_logprob_t == -math.inf) & (sampler_logprob_t == -math.inf)
    both_t = mask_t & ~neither_t
    old_t = torch.where(both_t, old_logprob_t.detach().to(dtype), 0.0)
    sampler_t = torch.where(both_t, sampler_logprob_t.detach().to(dtype), 0.0)
    return (old_t - sampler_t).clamp(-INFINITE_LOG_WEIGHT, INFINITE_LOG_WEIGHT), ~neither_t


def _statistic(
    log_weight_t: torch.Tensor,
    mask_t: torch.Tensor,
    segments: Segments,
    statistic: Statistic,
    cp_group: Group,
) -> torch.Tensor:
    """`[t]`: logarithm of the statistic of each token's sequence, over all CP ranks."""
    sums_s2 = segment_sums(log_weight_t, mask_t, segments, cp_group)
    # A sequence without a token has sum 0: weight 1, and nobody to use it.
    log_s = sums_s2[:, 0] / (sums_s2[:, 1].clamp(min=1) if statistic == "geometric" else 1.0)
    return segments.pick(log_s).to(log_weight_t.dtype)


def _per_sequence(
    old_logprob_t: torch.Tensor,
    sampler_logprob_t: torch.Tensor,
    mask_t: torch.Tensor,
    segments: Segments,
    statistic: Statistic,
    cap: float,
    cp_group: Group,
) -> ImportanceWeights:
    _check_cap(cap)
    log_weight_t, scorable_t = _log_weights(old_logprob_t, sampler_logprob_t, mask_t)
    log_statistic_t = _statistic(log_weight_t, scorable_t & mask_t, segments, statistic, cp_group)
    return _weights(_capped(log_statistic_t, cap), scorable_t, log_weight_t, mask_t)


def _capped(log_weight_t: torch.Tensor, cap: float | None) -> torch.Tensor:
    """min(exp(log weight), cap), clamped first: no exp overflows. The cap is returned exactly."""
    log_cap = MAX_LOG_WEIGHT if cap is None else min(_log(cap), MAX_LOG_WEIGHT)
    weight_t = log_weight_t.clamp(max=log_cap).exp()
    return weight_t if cap is None else weight_t.clamp(max=cap)


def _weights(
    weight_t: torch.Tensor, kept_t: torch.Tensor, log_weight_t: torch.Tensor, mask_t: torch.Tensor
) -> ImportanceWeights:
    weight_t = torch.where(mask_t, torch.where(kept_t, weight_t, 0.0), 1.0)
    return ImportanceWeights(weight_t=weight_t, kept_t=kept_t, log_weight_t=log_weight_t)


def _log(weight: float) -> float:
    return math.log(weight) if weight > 0 else -math.inf


def _check_cap(cap: float) -> None:
    if not 0.0 < cap < math.inf:
        raise ValueError(f"importance cap {cap}: expected a positive number, the largest weight.")
