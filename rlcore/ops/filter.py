"""Support search: which ids a truncated distribution can draw, as a handful of numbers per token.

A support is a threshold on the tempered logit, the share of the group tied at it, the log-normaliser and a
count. Nothing vocabulary-sized is sent, saved or sorted. Logits are handed in as this rank's real columns
`[t, v]`.

Two searches, chosen by the spec alone, so that every rank takes the same one:
- candidates: top-k is on and small. Each shard's k largest values are gathered; the support is a prefix of
  the sorted union, and top-p only needs the union.
- radix: the threshold's bits are found eight at a time from histograms of mass and count over the ordered
  integer keys of the floats. It ends on a value that occurs in the row, so it is exact.
"""

from __future__ import annotations

import math

import torch

from rlcore.collectives import Group, all_gather, all_reduce_
from rlcore.ops.candidates import support_from_candidates
from rlcore.ops.radix import support_from_radix
from rlcore.ops.rows import (
    RowStats,
    Support,
    compute_dtype,
    finite,
    min_p_floor,
    row_chunks,
    sums_from,
    temper,
)
from rlcore.sampling import SamplingSpec

# Largest top-k that is found by gathering candidates: k x TP floats a token must stay below the radix
# histograms.
MAX_CANDIDATES = 1024


def find_support(
    logits_tv: torch.Tensor,
    z_target_t: torch.Tensor,
    spec: SamplingSpec,
    tp_group: Group,
    vocab_size: int,
    entropy: bool,
) -> tuple[torch.Tensor, RowStats, Support]:
    """The target's tempered logit on every rank, the rows' statistics and their support.

    `z_target_t [t]` is -inf on the ranks that do not hold the target. `vocab_size` is V, of all shards.
    Collectives over `tp_group`, whatever the data: one all-gather; one all-reduce more for min-p alone; four
    all-reduces (eight for float64) for a large top-k, and as many for a top-p that has no small top-k before
    it, then one for the entropy when it is asked for.
    """
    top_k = (
        spec.effective_top_k
        if spec.effective_top_k is not None and spec.effective_top_k < vocab_size
        else None
    )
    small_k = top_k if top_k is not None and top_k <= MAX_CANDIDATES else 0
    local_tc = _local_summary(logits_tv, spec, small_k, entropy)
    gathered_rtc = all_gather(torch.cat([z_target_t[:, None], local_tc], dim=1), tp_group)
    z_target_t = gathered_rtc[:, :, 0].amax(dim=0)
    stats = _combine_stats(gathered_rtc[:, :, 1:4], entropy)
    if small_k:
        tie_count_rt, values_rtk = gathered_rtc[:, :, 5], gathered_rtc[:, :, 6:]
        return z_target_t, stats, support_from_candidates(tie_count_rt, values_rtk, stats, spec, entropy)
    if top_k is None and spec.effective_top_p is None:
        num_finite_t = gathered_rtc[:, :, 4].sum(dim=0)
        if spec.min_p == 0.0:
            return z_target_t, stats, _whole_row(stats, num_finite_t)
        return z_target_t, stats, _support_above_floor(logits_tv, stats, spec, tp_group, entropy)
    return z_target_t, stats, support_from_radix(logits_tv, stats, spec, top_k, tp_group, entropy)


def _local_summary(logits_tv: torch.Tensor, spec: SamplingSpec, small_k: int, entropy: bool) -> torch.Tensor:
    """`[t, 4 (+ 1 + k)]`: this shard's max, sum of exp(y), sum of exp(y) y, finite count (tie count, k
    largest).

    y is relative to the shard's own max. The tie count is that of the shard's k-th value, ties cut off by k
    included.
    """
    num_rows, width = logits_tv.shape
    dtype = compute_dtype(logits_tv)
    columns = 5 + small_k if small_k else 4
    summary_tc = torch.zeros((num_rows, columns), dtype=dtype, device=logits_tv.device)
    summary_tc[:, 0] = -math.inf
    summary_tc[:, 5:] = -math.inf
    if width == 0:
        return summary_tc
    num_local = min(small_k, width)
    for rows in row_chunks(logits_tv):
        z_tv = temper(logits_tv[rows], spec)
        max_t = z_tv.amax(dim=1)
        y_tv = z_tv - torch.where(torch.isneginf(max_t), 0.0, max_t)[:, None]
        exp_tv = y_tv.exp()
        summary_tc[rows, 0] = max_t
        summary_tc[rows, 1] = exp_tv.sum(dim=1)
        if entropy:
            summary_tc[rows, 2] = (exp_tv * finite(y_tv)).sum(dim=1)
        summary_tc[rows, 3] = (z_tv > -math.inf).sum(dim=1).to(dtype)
        if small_k:
            largest_tk = z_tv.topk(num_local, dim=1).values
            summary_tc[rows, 4] = (z_tv == largest_tk[:, -1:]).sum(dim=1).to(dtype)
            summary_tc[rows, 5 : 5 + num_local] = largest_tk
    return summary_tc


def _combine_stats(parts_rtc: torch.Tensor, entropy: bool) -> RowStats:
    """Statistics of whole rows from the shards' (max, sum, weighted sum) `[r, t, 3]`; the same on every
    rank.
    """
    max_rt, sum_rt, weighted_rt = parts_rtc.unbind(dim=2)
    max_t = max_rt.amax(dim=0)
    shift_rt = max_rt - max_t
    scale_rt = shift_rt.exp()
    sum_t = (sum_rt * scale_rt).sum(dim=0)
    log_sum_t = sum_t.log()
    # A NaN, a +inf, or nothing finite: make the row NaN as a whole, so that no finite value hides it.
    log_sum_t = torch.where(torch.isfinite(log_sum_t) & torch.isfinite(max_t), log_sum_t, math.nan)
    entropy_t = None
    if entropy:
        mean_t = (scale_rt * (weighted_rt + sum_rt * finite(shift_rt))).sum(dim=0) / sum_t
        entropy_t = log_sum_t - mean_t
    return RowStats(max_t=max_t, log_sum_t=log_sum_t, entropy_t=entropy_t)


def _whole_row(stats: RowStats, num_finite_t: torch.Tensor) -> Support:
    """The support when nothing is truncated: every finite entry."""
    return Support(
        threshold_t=torch.full_like(stats.max_t, -math.inf),
        share_t=torch.ones_like(stats.max_t),
        log_sum_t=stats.log_sum_t,
        num_kept_t=num_finite_t.long(),
        entropy_t=stats.entropy_t,
    )


def _support_above_floor(
    logits_tv: torch.Tensor, stats: RowStats, spec: SamplingSpec, tp_group: Group, entropy: bool
) -> Support:
    """min-p alone: the threshold is known, one pass sums what is above it."""
    floor_t = min_p_floor(stats, spec)
    sums_tc = all_reduce_(sums_from(logits_tv, floor_t, stats, spec, entropy), "sum", tp_group)
    mass_t, count_t, weighted_t = sums_tc.unbind(dim=1)
    log_sum_t = mass_t.log()
    return Support(
        threshold_t=floor_t,
        share_t=torch.ones_like(floor_t),
        log_sum_t=log_sum_t,
        num_kept_t=count_t.long(),
        entropy_t=log_sum_t - weighted_t / mass_t if entropy else None,
    )
