"""Support search among the largest values of the row: what a small top-k needs, and what most nuclei need.

The shards' C largest values, merged and sorted, are the C largest of the row as a multiset. The kept entries
are a prefix of that list whenever top-k is at most C, or the list holds the mass that top-p asks for, or it
runs out of ids that min-p keeps; `resolved` says for which rows that is certain. Only how the last kept
entry's weight spreads over the ids tied with it needs the number of such ids in the whole row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rlcore.ops.passes import BLOCK, row_chunks, temper
from rlcore.ops.rows import Cut, RowParams, RowStats, Support


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The C largest tempered logits of each row, descending, and what ties with the last of each shard's."""

    value_tc: torch.Tensor
    """`[t, C]`, -inf where the row has fewer."""
    shard_value_rtc: torch.Tensor
    """`[r, t, C]`: the shards' own lists."""
    tie_count_rt: torch.Tensor
    """`[r, t]`: entries of the shard equal to the last of its list."""

    @staticmethod
    def merge(shard_value_rtc: torch.Tensor, tie_count_rt: torch.Tensor) -> Candidates:
        """From the gathered lists of all shards."""
        num_shards, num_rows, count = shard_value_rtc.shape
        flat_tc = shard_value_rtc.transpose(0, 1).reshape(num_rows, num_shards * count)
        value_tc = flat_tc.topk(count, dim=1).values
        return Candidates(value_tc=value_tc, shard_value_rtc=shard_value_rtc, tie_count_rt=tie_count_rt)

    def num_tied(self, value_t: torch.Tensor) -> torch.Tensor:
        """`[t]` int64: entries of the whole row equal to a value that is at least the last of the merged
        list.

        A shard whose list ends on the value may have more of it than it listed; elsewhere the list is
        complete.
        """
        listed_rt = (self.shard_value_rtc == value_t[None, :, None]).sum(dim=2)
        ends_there_rt = self.shard_value_rtc[:, :, -1] == value_t
        return torch.where(ends_there_rt, self.tie_count_rt.long(), listed_rt).sum(dim=0)

    def cut_at(self, index_t: torch.Tensor, stats: RowStats, entropy: bool) -> Cut:
        """The cut at the `index`-th entry of each list."""
        threshold_t = self.value_tc.gather(1, index_t[:, None])[:, 0]
        above_tc = self.value_tc > threshold_t[:, None]
        y_tc = (self.value_tc - stats.max_t[:, None]).double()
        exp_tc = torch.where(above_tc, y_tc.exp(), 0.0)
        mass_t = exp_tc.sum(dim=1)
        return Cut(
            threshold_t=threshold_t,
            mass_above_t=mass_t,
            num_above_t=above_tc.sum(dim=1),
            num_tied_t=self.num_tied(threshold_t),
            weighted_above_t=(exp_tc * y_tc.clamp(min=-1e4)).sum(dim=1)
            if entropy
            else torch.zeros_like(mass_t),
        )


def support_from_candidates(
    candidates: Candidates, stats: RowStats, params: RowParams, entropy: bool
) -> tuple[Support, torch.Tensor]:
    """The support of each row and `resolved [t]` bool: is it certain? Communicates nothing; the same on every
    rank.
    """
    value_tc = candidates.value_tc
    num_listed = value_tc.shape[1]
    y_tc = (value_tc - stats.max_t[:, None]).double()
    index_c = torch.arange(num_listed, device=value_tc.device)
    alive_tc = (value_tc > -math.inf) & (value_tc >= (stats.max_t + params.min_p_cut_t)[:, None])
    num_alive_t = alive_tc.sum(dim=1)
    # Everything min-p keeps is listed, or top-k needs no more than the list.
    complete_t = (num_alive_t < num_listed) | (params.top_k_t <= num_listed)
    count_t = torch.minimum(num_alive_t, params.top_k_t).clamp(min=1)
    last_t = value_tc.gather(1, (count_t - 1)[:, None])[:, 0]
    mass_tc = torch.where(index_c < count_t[:, None], y_tc.exp(), 0.0)
    total_t = mass_tc.sum(dim=1)
    if not params.shares_ties:
        unlisted_t = candidates.num_tied(last_t) - ((value_tc == last_t[:, None]) & (mass_tc > 0)).sum(dim=1)
        total_t = total_t + unlisted_t * (last_t - stats.max_t).double().exp()
    if params.any_top_p:
        # Without top-k and min-p the whole row's sum is known, however long the row is.
        whole_t = (params.top_k_t >= stats.num_finite_t) & torch.isneginf(params.min_p_cut_t)
        total_t = torch.where(whole_t & ~complete_t, stats.sum_t, total_t)
        goal_t = params.top_p_cut_t * total_t
        above_tc = mass_tc.cumsum(dim=1) - mass_tc
        reaches_tc = (above_tc < goal_t[:, None]) & (index_c < count_t[:, None])
        nucleus_t = reaches_tc.sum(dim=1).clamp(min=1)
        holds_t = mass_tc.sum(dim=1) >= goal_t
        complete_t = complete_t | (whole_t & holds_t)
        count_t = torch.minimum(count_t, nucleus_t)
    cut = candidates.cut_at(count_t - 1, stats, entropy)
    return Support.of_cut(cut, count_t - cut.num_above_t, stats, params.shares_ties, entropy), complete_t


def top_values(
    logits_tv: torch.Tensor,
    row_u: torch.Tensor | None,
    temperature_u: torch.Tensor,
    below_u: torch.Tensor | None,
    count: int,
    maxima_ub: torch.Tensor,
) -> torch.Tensor:
    """`[u, count]`: this shard's largest tempered logits (below `below_u`), descending, -inf where there are
    fewer.

    They lie in the `count` blocks with the largest maxima: a block that was not picked holds nothing larger
    than `count` entries of those that were. `maxima_ub` comes from `Passes.block_maxima` with the same bound.
    """
    num_rows, whole = maxima_ub.shape[0], logits_tv.shape[1] // BLOCK
    num_picked = min(count, whole)
    blocks_tbk = logits_tv[:, : whole * BLOCK].unflatten(1, (whole, BLOCK))
    rest_tk = logits_tv[:, whole * BLOCK :]
    out_uc = torch.full((num_rows, count), -math.inf, dtype=maxima_ub.dtype, device=logits_tv.device)
    for chunk in row_chunks(num_rows, (num_picked + 1) * BLOCK):
        row_c = torch.arange(chunk.start, chunk.stop, device=logits_tv.device)
        row_c = row_c if row_u is None else row_u[row_c]
        block_cb = maxima_ub[chunk, :whole].topk(num_picked, dim=1, sorted=False).indices
        # The shorter last block is always taken: its maximum does not compete.
        picked_ck = blocks_tbk[row_c[:, None], block_cb].flatten(1)
        if rest_tk.shape[1]:
            picked_ck = torch.cat([picked_ck, rest_tk[row_c]], dim=1)
        if below_u is not None:
            z_ck = temper(picked_ck, temperature_u[chunk])
            picked_ck = torch.where(z_ck >= below_u[chunk, None], -math.inf, picked_ck)
        num_values = min(count, picked_ck.shape[1])
        # Dividing keeps the order, so only what is returned is divided.
        largest_cc = picked_ck.topk(num_values, dim=1).values
        out_uc[chunk, :num_values] = temper(largest_cc, temperature_u[chunk])
    return out_uc
