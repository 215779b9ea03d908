"""What each token counts in a step's loss: multipliers, importance weights and filters, known on every
pipeline stage before the first forward.

Every denominator belongs to the whole step: token and sequence counts over all microbatches and
data-parallel ranks, in one all-reduce. A replica's ranks (TP, PP, CP) hold the same whole sequences, so
nothing here depends on how those are cut.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rlcore.batch import TrainBatch
from rlcore.collectives import Group
from rlcore.config import ImportanceConfig, LossConfig
from rlcore.masks import kl_mask, retained_mask, sequence_check, why_tokens_left
from rlcore.metrics import Metric, Sum
from rlcore.ops.aggregation import (
    LossCounts,
    count_step,
    fixed_length,
    seq_mean_token_mean,
    seq_mean_token_sum,
    token_mean,
)
from rlcore.ops.importance import (
    ImportanceWeights,
    SequenceFilter,
    WeightBounds,
    geometric,
    icepop,
    importance_metrics,
    seq_mask_tis,
    sequence,
    tis,
)
from rlcore.ops.segments import Segments


@dataclass(frozen=True, kw_only=True)
class StepWeights:
    """Token-aligned `[S, L]`, like the batch; counts are 0-dim float64 over the whole step and all ranks."""

    policy_multiplier_sl: torch.Tensor
    """float32: what one token's policy-gradient loss counts; 0 outside the mask that is counted."""
    kl_multiplier_sl: torch.Tensor
    """float32: the same for the reference KL, over the valid tokens."""
    nll_multiplier_sl: torch.Tensor
    """float32: the same for the positive-example term, over the retained tokens with a positive advantage."""
    sequence_keep_sl: torch.Tensor
    """bool: the token's sequence passed the sequence check."""
    importance_sl: torch.Tensor | None
    """float32, >= 0: importance weight; None without a correction."""
    importance_keep_sl: torch.Tensor | None
    """bool: False where the correction dropped the token."""
    num_valid: torch.Tensor
    """token & sample."""
    num_retained: torch.Tensor
    """token & sample & keep_old."""
    metrics: dict[str, Metric]
    """What the correction and the check did on this rank's samples."""


def weigh_step(
    batch: TrainBatch, loss: LossConfig, importance: ImportanceConfig, truncates: bool, dp_group: Group
) -> StepWeights:
    """The weights of a batch, from what is known before the current policy's forward.

    Collectives: one all-reduce of 6 float64 over `dp_group`, whatever the data. Mutates: nothing.
    """
    shape = batch.token_mask_sl.shape
    sample_sl = batch.sample_mask_s[:, None].expand(shape)
    keep_s = _check_sequences(batch, importance, kl_mask(batch.token_mask_sl, sample_sl), truncates)
    keep_sl = keep_s[:, None].expand(shape)
    valid_t = kl_mask(batch.token_mask_sl, sample_sl, keep_sl).reshape(-1)
    retained_sl = retained_mask(batch.token_mask_sl, sample_sl, batch.keep_old_sl, keep_sl)
    retained_t = retained_sl.reshape(-1)
    positive_t = retained_t & (batch.advantage_sl > 0).reshape(-1)
    index_s = torch.arange(shape[0], device=valid_t.device)
    segments = Segments(segment_t=index_s.repeat_interleave(shape[1]), num_segments=shape[0])
    per_sequence = [mask_t.view(shape).sum(dim=1).double() for mask_t in (valid_t, retained_t, positive_t)]
    valid, retained, positive = count_step(per_sequence, dp_group)
    policy = (valid_t, valid) if loss.actor_denominator == "valid" else (retained_t, retained)
    if loss.actor_denominator == "retained_exact":
        # Megatron divides by the exact count once every microbatch has said its part of it.
        policy_multiplier_t = retained_t.float()
    else:
        policy_multiplier_t = _multipliers(loss, *policy, segments)
    weights, metrics = _correct(batch, importance, retained_t, segments)
    return StepWeights(
        policy_multiplier_sl=policy_multiplier_t.view(shape),
        kl_multiplier_sl=_multipliers(loss, valid_t, valid, segments).view(shape),
        nll_multiplier_sl=token_mean(positive_t, positive).view(shape),
        sequence_keep_sl=keep_sl,
        importance_sl=None if weights is None else weights.weight_t.float().view(shape),
        importance_keep_sl=None if weights is None else weights.kept_t.view(shape),
        num_valid=valid.num_tokens,
        num_retained=retained.num_tokens,
        metrics=metrics,
    )


def empty_step_metrics(batch: TrainBatch, weights: StepWeights) -> dict[str, Metric]:
    """Why the tokens of this rank's samples left, for a step that ends before its first forward."""
    shape = batch.token_mask_sl.shape
    position_sl = torch.arange(shape[1], device=batch.ids_sl.device).expand(shape)
    reasons = why_tokens_left(
        (position_sl > 0) & (position_sl < batch.length_s[:, None]),
        batch.token_mask_sl,
        batch.sample_mask_s[:, None].expand(shape),
        batch.keep_old_sl,
        torch.ones_like(batch.token_mask_sl),
        weights.importance_keep_sl,
        weights.sequence_keep_sl,
    )
    return reasons | weights.metrics


def _multipliers(
    loss: LossConfig, mask_t: torch.Tensor, counts: LossCounts, segments: Segments
) -> torch.Tensor:
    match loss.aggregation:
        case "token_mean":
            return token_mean(mask_t, counts)
        case "seq_mean_token_mean":
            return seq_mean_token_mean(mask_t, segments, counts)
        case "seq_mean_token_sum":
            return seq_mean_token_sum(mask_t, counts)
        case "fixed_length":
            assert loss.fixed_length is not None, "a config rule sees to it"
            return fixed_length(mask_t, counts, loss.fixed_length)


def _check_sequences(
    batch: TrainBatch, importance: ImportanceConfig, valid_sl: torch.Tensor, truncates: bool
) -> torch.Tensor:
    """`[S]` bool: sequences that the check lets through; all of them where it is off."""
    if importance.sequence_error_max is None:
        return torch.ones_like(batch.sample_mask_s)
    assert batch.old_logprob_sl is not None, "a config rule sees to it"
    return sequence_check(
        batch.sampler_logprob_sl,
        batch.old_logprob_sl,
        valid_sl,
        importance.sequence_error_max,
        truncates,
    )


def _correct(
    batch: TrainBatch, importance: ImportanceConfig, retained_t: torch.Tensor, segments: Segments
) -> tuple[ImportanceWeights | None, dict[str, Metric]]:
    """The correction that the config names, on the retained tokens, and its metrics.

    A weight needs both logprobs: a token outside the sampler's own support has none and is dropped, and says
    nothing about its sequence.
    """
    if importance.correction == "none":
        return None, {}
    assert batch.old_logprob_sl is not None, "a config rule sees to it"
    both_t = retained_t & ~torch.isneginf(batch.sampler_logprob_sl.reshape(-1))
    weights = _weights(batch, importance, both_t, segments)
    outside_t = retained_t & ~both_t
    weights = replace(
        weights,
        weight_t=torch.where(outside_t, 0.0, weights.weight_t),
        kept_t=weights.kept_t & ~outside_t,
    )
    metrics = importance_metrics(weights, both_t)
    return weights, {**metrics, "importance/dropped": Sum((retained_t & ~weights.kept_t).sum())}


def _weights(
    batch: TrainBatch, importance: ImportanceConfig, mask_t: torch.Tensor, segments: Segments
) -> ImportanceWeights:
    assert batch.old_logprob_sl is not None, "a config rule sees to it"
    given = (batch.old_logprob_sl.reshape(-1), batch.sampler_logprob_sl.reshape(-1), mask_t)
    cap = importance.cap if importance.cap is not None else 0.0
    match importance.correction:
        case "tis":
            return tis(*given, cap)
        case "icepop":
            return icepop(*given, _bounds(importance))
        case "seq_mask_tis":
            rule = SequenceFilter(
                bounds=_bounds(importance), cap=importance.cap, statistic=importance.statistic
            )
            return seq_mask_tis(*given, segments, rule)
        case "sequence":
            return sequence(*given, segments, cap)
        case "geometric":
            return geometric(*given, segments, cap)
    raise AssertionError(f"correction {importance.correction} is off or unknown")


def _bounds(importance: ImportanceConfig) -> WeightBounds:
    assert importance.low is not None and importance.high is not None, "a config rule sees to it"
    return WeightBounds(low=importance.low, high=importance.high)
