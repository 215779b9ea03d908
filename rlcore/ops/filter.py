"""Support search: which ids a truncated distribution can draw, as a handful of numbers per token.

A support is a threshold on the tempered logit, the share of the group tied at it, the log-normaliser and a
count. Nothing vocabulary-sized is sent, saved or sorted. Logits are handed in as this rank's real columns
`[t, v]`.

One all-gather carries every shard's statistics and largest values. Those settle every row with a small top-k
and most nuclei (`candidates.py`); the rest is searched (`bracket.py`).
"""

from __future__ import annotations

import math

import torch

from rlcore.collectives import Group, all_gather
from rlcore.ops.bracket import OpenRows, support_from_search
from rlcore.ops.candidates import Candidates, support_from_candidates, top_values
from rlcore.ops.passes import Passes
from rlcore.ops.rows import RowParams, RowStats, Support

# Largest top-k that is found by gathering candidates: 4 KiB a token and rank.
MAX_CANDIDATES = 1024
# Candidates gathered for a top-p without a small top-k: most nuclei of a trained model are smaller.
NUCLEUS_CANDIDATES = 64
# Columns of the gathered summary before the candidates.
_TARGET, _MAX, _SUM_HIGH, _SUM_LOW, _WEIGHTED, _FINITE, _TIES, _LIST = range(8)


def find_support(
    passes: Passes,
    logits_tv: torch.Tensor,
    z_target_t: torch.Tensor,
    params: RowParams,
    tp_group: Group,
    entropy: bool,
) -> tuple[torch.Tensor, RowStats, Support]:
    """The target's tempered logit on every rank, the rows' statistics and their support.

    `z_target_t [t]` is -inf on the ranks that do not hold the target.
    Collectives over `tp_group`: one all-gather of 7 + C numbers a token; C is top_k up to MAX_CANDIDATES,
    else NUCLEUS_CANDIDATES, and 0 for min-p alone or no truncation. No other when every row has a top-k of at
    most MAX_CANDIDATES, or nothing truncates; one of 4 float64 for min-p alone; else a few small ones for the
    rows that the candidates leave open, none when there is none.
    """
    num_listed = num_candidates(params)
    summary_tc = _local_summary(passes, logits_tv, z_target_t, params, num_listed, entropy)
    gathered_rtc = all_gather(summary_tc, tp_group)
    z_target_t = gathered_rtc[:, :, _TARGET].amax(dim=0)
    stats = _combine(gathered_rtc, entropy)
    if not params.truncates:
        return z_target_t, stats, _whole_rows(stats)
    all_u = torch.arange(logits_tv.shape[0], device=logits_tv.device)
    rows = OpenRows(
        passes=passes,
        logits_tv=logits_tv,
        row_u=all_u,
        stats=stats,
        params=params,
        tp_group=tp_group,
        entropy=entropy,
    )
    if num_listed == 0:
        nothing_t = torch.full_like(stats.max_t, math.inf)
        return (
            z_target_t,
            stats,
            support_from_search(rows, nothing_t, torch.zeros_like(stats.sum_t)[:, None].expand(-1, 2)),
        )
    candidates = Candidates.merge(gathered_rtc[:, :, _LIST:], gathered_rtc[:, :, _TIES])
    support, settled_t = support_from_candidates(candidates, stats, params, entropy)
    if params.all_top_k and params.max_top_k <= num_listed:
        return z_target_t, stats, support
    open_u = (~settled_t).nonzero()[:, 0]
    if open_u.numel():
        high_u, high_u2 = _above_the_list(candidates.value_tc[open_u], stats.max_t[open_u])
        support = support.with_rows(open_u, support_from_search(rows.subset(open_u), high_u, high_u2))
    return z_target_t, stats, support


def num_candidates(params: RowParams) -> int:
    """How many values of each row are gathered, from what is known without reading a tensor back."""
    small_k = params.max_top_k if params.max_top_k <= MAX_CANDIDATES else 0
    if params.all_top_k and small_k:
        return small_k
    return max(small_k, NUCLEUS_CANDIDATES) if params.any_top_p or params.max_top_k else 0


def _above_the_list(value_uc: torch.Tensor, max_u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The float above the last listed value; mass and count `[u, 2]` of the row from there upwards."""
    last_u = value_uc[:, -1]
    above_uc = value_uc > last_u[:, None]
    mass_u = torch.where(above_uc, (value_uc - max_u[:, None]).double().exp(), 0.0).sum(dim=1)
    high_u = torch.nextafter(last_u, torch.full_like(last_u, math.inf))
    return high_u, torch.stack([mass_u, above_uc.sum(dim=1).double()], dim=1)


def _local_summary(
    passes: Passes,
    logits_tv: torch.Tensor,
    z_target_t: torch.Tensor,
    params: RowParams,
    num_listed: int,
    entropy: bool,
) -> torch.Tensor:
    """`[t, 7 + C]`: what this shard has to say, in the columns named above.

    Its sums are relative to its own max; a float64 sum travels as two numbers, its rounded value and the
    rest.
    """
    num_rows, dtype = logits_tv.shape[0], z_target_t.dtype
    temperature_t = params.temperature_t
    nothing_t = torch.full((num_rows,), math.inf, dtype=dtype, device=logits_tv.device)
    maxima_tb = passes.block_maxima(logits_tv, None, temperature_t, nothing_t)
    max_t = maxima_tb.amax(dim=1)
    listed, last_t = [], nothing_t
    if num_listed:
        listed.append(top_values(logits_tv, None, temperature_t, None, num_listed, maxima_tb))
        last_t = listed[0][:, -1].contiguous()
    sums_t4 = passes.exp_sums(
        logits_tv, None, temperature_t, torch.where(torch.isneginf(max_t), 0.0, max_t), last_t, entropy
    )
    sum_high_t = sums_t4[:, 0].to(dtype)
    sum_low_t = (sums_t4[:, 0] - sum_high_t.double()).to(dtype)
    columns = [z_target_t, max_t, sum_high_t, sum_low_t, *sums_t4[:, 1:].to(dtype).unbind(1)]
    return torch.cat([torch.stack(columns, dim=1), *listed], dim=1)


def _combine(gathered_rtc: torch.Tensor, entropy: bool) -> RowStats:
    """Statistics of whole rows from the shards' summaries `[r, t, c]`; the same on every rank."""
    max_rt = gathered_rtc[:, :, _MAX]
    sum_rt = gathered_rtc[:, :, _SUM_HIGH].double() + gathered_rtc[:, :, _SUM_LOW].double()
    max_t = max_rt.amax(dim=0)
    shift_rt = (max_rt - max_t).double()
    scale_rt = shift_rt.exp()
    sum_t = (sum_rt * scale_rt).sum(dim=0)
    # A NaN, a +inf, or nothing finite: make the row NaN as a whole, so that no finite value hides it.
    log_sum_t = torch.where(
        torch.isfinite(sum_t) & torch.isfinite(max_t) & (sum_t > 0), sum_t.log(), math.nan
    )
    entropy_t = torch.zeros_like(log_sum_t)
    if entropy:
        weighted_rt = gathered_rtc[:, :, _WEIGHTED].double() + sum_rt * shift_rt.clamp(min=-1e4)
        entropy_t = log_sum_t - (scale_rt * weighted_rt).sum(dim=0) / sum_t
    return RowStats(
        max_t=max_t,
        sum_t=sum_t,
        log_sum_t=log_sum_t.to(max_t.dtype),
        entropy_t=entropy_t.to(max_t.dtype),
        num_finite_t=gathered_rtc[:, :, _FINITE].sum(dim=0).long(),
    )


def _whole_rows(stats: RowStats) -> Support:
    """The support when nothing is truncated: every finite entry."""
    return Support(
        threshold_t=torch.full_like(stats.max_t, -math.inf),
        share_t=torch.ones_like(stats.max_t),
        log_sum_t=stats.log_sum_t,
        num_kept_t=stats.num_finite_t,
        entropy_t=stats.entropy_t,
    )
