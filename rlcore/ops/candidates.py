"""Support search for a small top-k: every kept value is among the shards' k largest, so their union decides.

The first `count` entries of the sorted union are the kept multiset: exactly k of weight after top-k, the
minimal count after top-p. Only how that weight spreads over ids tied at the cut needs the number of such ids
in the whole row.
"""

from __future__ import annotations

import math

import torch

from rlcore.ops.rows import RowStats, Support, finite
from rlcore.sampling import SamplingSpec


def support_from_candidates(
    tie_count_rt: torch.Tensor, values_rtk: torch.Tensor, stats: RowStats, spec: SamplingSpec, entropy: bool
) -> Support:
    """Support of each row. Communicates nothing; every rank computes the same.

    `values_rtk [r, t, k]`: each shard's k largest tempered logits, descending, -inf where the shard has
    fewer. `tie_count_rt [r, t]`: how many entries of the shard equal its last candidate.
    """
    num_shards, num_rows, k = values_rtk.shape
    values_tk = values_rtk.transpose(0, 1).reshape(num_rows, num_shards * k).topk(k, dim=1).values
    y_tk = (values_tk - stats.max_t[:, None]).double()
    mass_tk = y_tk.exp()
    index_k = torch.arange(k, device=values_tk.device)

    alive_tk = (values_tk > -math.inf) & (y_tk >= spec.min_p_cut)
    count_t = alive_tk.sum(dim=1).clamp(min=1)
    if spec.effective_top_p is not None:
        last_t = _at(values_tk, count_t)
        listed_t = ((values_tk == last_t[:, None]) & (index_k < count_t[:, None])).sum(dim=1)
        unlisted_t = _num_tied(tie_count_rt, values_rtk, last_t) - listed_t if spec.ties == "all" else 0
        mass_tk = torch.where(index_k < count_t[:, None], mass_tk, 0.0)
        total_t = mass_tk.sum(dim=1) + unlisted_t * _at(mass_tk, count_t)
        above_tk = mass_tk.cumsum(dim=1) - mass_tk
        reaches_tk = (above_tk < spec.top_p_cut * total_t[:, None]) & (index_k < count_t[:, None])
        count_t = reaches_tk.sum(dim=1).clamp(min=1)

    threshold_t = _at(values_tk, count_t)
    above_tk = values_tk > threshold_t[:, None]
    num_above_t = above_tk.sum(dim=1)
    num_tied_t = _num_tied(tie_count_rt, values_rtk, threshold_t)
    num_group_t = num_tied_t if spec.ties == "all" else count_t - num_above_t
    weight_tk = above_tk.double()
    y_cut_t = (threshold_t - stats.max_t).double()
    sum_t = (weight_tk * y_tk.exp()).sum(dim=1) + num_group_t * y_cut_t.exp()
    log_sum_t = sum_t.log()
    entropy_t = None
    if entropy:
        weighted_t = (weight_tk * y_tk.exp() * finite(y_tk)).sum(dim=1)
        weighted_t += num_group_t * y_cut_t.exp() * finite(y_cut_t)
        entropy_t = (log_sum_t - weighted_t / sum_t).to(stats.max_t.dtype)
    return Support(
        threshold_t=threshold_t,
        share_t=(num_group_t / num_tied_t.clamp(min=1)).to(stats.max_t.dtype),
        log_sum_t=log_sum_t.to(stats.max_t.dtype),
        num_kept_t=num_above_t + num_group_t,
        entropy_t=entropy_t,
    )


def _at(values_tk: torch.Tensor, count_t: torch.Tensor) -> torch.Tensor:
    """`[t]`: the `count`-th entry of each row."""
    return values_tk.gather(1, (count_t - 1)[:, None])[:, 0]


def _num_tied(tie_count_rt: torch.Tensor, values_rtk: torch.Tensor, value_t: torch.Tensor) -> torch.Tensor:
    """`[t]` int64: entries of the whole row equal to `value_t`, which is at least each shard's last full
    candidate.

    A shard whose last candidate is the value may have more of it than it listed; elsewhere the list is
    complete.
    """
    listed_rt = (values_rtk == value_t[None, :, None]).sum(dim=2)
    at_last_rt = values_rtk[:, :, -1] == value_t
    return torch.where(at_last_rt, tie_count_rt.long(), listed_rt).sum(dim=0)
