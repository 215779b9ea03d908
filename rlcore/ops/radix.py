"""Support search for a large top-k or a top-p of the whole row, without candidates.

The bits of the threshold are found eight at a time, most significant first, from histograms of count and mass
over the ordered integer keys of the floats. The descent ends on a key that occurs in the row: the search is
exact. Every level sends `2 x 256` numbers a token, whatever V and TP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rlcore.collectives import Group, all_reduce_
from rlcore.ops.rows import RowStats, Support, min_p_floor, row_chunks, sums_from, temper
from rlcore.sampling import SamplingSpec

RADIX_BITS = 8
NUM_BINS = 1 << RADIX_BITS


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """Where one descent ended, per row."""

    threshold_t: torch.Tensor
    num_above_t: torch.Tensor
    """int64: eligible entries strictly above the threshold."""
    mass_above_t: torch.Tensor
    """float64: their sum of exp(y)."""
    num_tied_t: torch.Tensor
    """int64: entries equal to the threshold."""
    mass_t: torch.Tensor
    """float64: exp(y) of one entry at the threshold."""
    total_mass_t: torch.Tensor
    """float64: sum of exp(y) of all eligible entries."""


def support_from_radix(
    logits_tv: torch.Tensor,
    stats: RowStats,
    spec: SamplingSpec,
    top_k: int | None,
    tp_group: Group,
    entropy: bool,
) -> Support:
    """Support of each row. One all-reduce a level of each descent (top-k, top-p), one more for the
    entropy.
    """
    search = _Search(logits_tv, stats, spec, tp_group)
    lowest_t = min_p_floor(stats, spec)
    if top_k is not None:
        cut = search.descend(lowest_t, strict=False, goal_count=top_k)
        num_group_t = _clamp_group(top_k - cut.num_above_t, cut.num_tied_t, spec)
        if spec.effective_top_p is not None:
            cut, num_group_t = _nucleus_inside(search, cut, num_group_t, spec)
    else:
        cut = search.descend(lowest_t, strict=False, goal_mass=spec.top_p_cut)
        num_group_t = _group_for_mass(cut, spec.top_p_cut * cut.total_mass_t, cut.num_tied_t, spec)
    return _finish(search, cut, num_group_t, entropy)


def _nucleus_inside(
    search: _Search, outer: _Cut, num_outer_t: torch.Tensor, spec: SamplingSpec
) -> tuple[_Cut, torch.Tensor]:
    """top-p on what top-k left: either it stops strictly above top-k's cut, or inside the group tied at that
    cut.
    """
    goal_t = spec.top_p_cut * (outer.mass_above_t + num_outer_t * outer.mass_t)
    inner = search.descend(outer.threshold_t, strict=True, goal_mass_t=goal_t)
    num_inner_t = _group_for_mass(inner, goal_t, inner.num_tied_t, spec)
    num_last_t = _group_for_mass(outer, goal_t, num_outer_t, spec)
    stops_inside_t = outer.mass_above_t < goal_t
    merged = {
        name: torch.where(stops_inside_t, getattr(outer, name), getattr(inner, name))
        for name in _Cut.__dataclass_fields__
    }
    return _Cut(**merged), torch.where(stops_inside_t, num_last_t, num_inner_t)


def _group_for_mass(
    cut: _Cut, goal_t: torch.Tensor, num_available_t: torch.Tensor, spec: SamplingSpec
) -> torch.Tensor:
    """`[t]` int64: entries of the tied group needed until the mass above the next one reaches the goal."""
    needed_t = ((goal_t - cut.mass_above_t) / cut.mass_t).ceil()
    # 0/0 where the group has no mass at all: one entry is as good as none.
    needed_t = torch.where(torch.isfinite(needed_t), needed_t, 1.0).clamp(max=2.0**62)
    if spec.ties == "all":
        return num_available_t
    return torch.minimum(needed_t.long().clamp(min=1), num_available_t)


def _clamp_group(wanted_t: torch.Tensor, num_tied_t: torch.Tensor, spec: SamplingSpec) -> torch.Tensor:
    return num_tied_t if spec.ties == "all" else torch.minimum(wanted_t, num_tied_t)


def _finish(search: _Search, cut: _Cut, num_group_t: torch.Tensor, entropy: bool) -> Support:
    """The support of a cut, with one more pass when its entropy is wanted."""
    sum_t = cut.mass_above_t + num_group_t * cut.mass_t
    dtype = search.stats.max_t.dtype
    entropy_t = None
    if entropy:
        sums_tc = sums_from(search.logits_tv, cut.threshold_t, search.stats, search.spec, entropy=True)
        weighted_t = all_reduce_(sums_tc[:, 2].contiguous(), "sum", search.tp_group).double()
        y_cut_t = (cut.threshold_t - search.stats.max_t).double()
        weighted_t = weighted_t - (cut.num_tied_t - num_group_t) * cut.mass_t * y_cut_t
        entropy_t = (sum_t.log() - weighted_t / sum_t).to(dtype)
    return Support(
        threshold_t=cut.threshold_t,
        share_t=(num_group_t / cut.num_tied_t.clamp(min=1)).to(dtype),
        log_sum_t=sum_t.log().to(dtype),
        num_kept_t=cut.num_above_t + num_group_t,
        entropy_t=entropy_t,
    )


class _Search:
    """Descents over the same rows."""

    def __init__(self, logits_tv: torch.Tensor, stats: RowStats, spec: SamplingSpec, tp_group: Group) -> None:
        self.logits_tv, self.stats, self.spec, self.tp_group = logits_tv, stats, spec, tp_group
        self.num_bits = 64 if stats.max_t.dtype == torch.float64 else 32

    def descend(
        self,
        lowest_t: torch.Tensor,
        *,
        strict: bool,
        goal_count: int | None = None,
        goal_mass: float = 1.0,
        goal_mass_t: torch.Tensor | None = None,
    ) -> _Cut:
        """The largest value at which the entries from it upwards reach the goal, among entries >= (>)
        `lowest_t`.

        The goal is a count, a mass `[t]`, or a part of the eligible mass. Rows that never reach it end on
        their lowest eligible value.
        """
        num_rows, device = self.logits_tv.shape[0], self.logits_tv.device
        prefix_t = torch.zeros(num_rows, dtype=torch.int64, device=device)
        num_above_t = torch.zeros(num_rows, dtype=torch.float64, device=device)
        mass_above_t = torch.zeros_like(num_above_t)
        total_mass_t = torch.zeros_like(num_above_t)
        for shift in range(self.num_bits - RADIX_BITS, -1, -RADIX_BITS):
            histogram_tb2 = self._histogram(prefix_t, shift, lowest_t, strict)
            count_tb, mass_tb = (
                all_reduce_(histogram_tb2, "sum", self.tp_group).double().flip(1).unbind(dim=2)
            )
            if shift == self.num_bits - RADIX_BITS:
                total_mass_t = mass_tb.sum(dim=1)
            if goal_count is not None:
                reached_tb = num_above_t[:, None] + count_tb.cumsum(dim=1) >= goal_count
            else:
                goal_t = goal_mass_t if goal_mass_t is not None else goal_mass * total_mass_t
                reached_tb = mass_above_t[:, None] + mass_tb.cumsum(dim=1) >= goal_t[:, None]
            bin_t = _first_reached_or_last_filled(reached_tb, count_tb > 0)
            num_above_t += (count_tb.cumsum(dim=1) - count_tb).gather(1, bin_t[:, None])[:, 0]
            mass_above_t += (mass_tb.cumsum(dim=1) - mass_tb).gather(1, bin_t[:, None])[:, 0]
            prefix_t = (prefix_t << RADIX_BITS) | (NUM_BINS - 1 - bin_t)
        num_tied_t = count_tb.gather(1, bin_t[:, None])[:, 0]
        threshold_t = self._value_of(prefix_t)
        return _Cut(
            threshold_t=threshold_t,
            num_above_t=num_above_t.long(),
            mass_above_t=mass_above_t,
            num_tied_t=num_tied_t.long(),
            mass_t=(threshold_t - self.stats.max_t).exp().double(),
            total_mass_t=total_mass_t,
        )

    def _histogram(
        self, prefix_t: torch.Tensor, shift: int, lowest_t: torch.Tensor, strict: bool
    ) -> torch.Tensor:
        """`[t, bins, 2]`: count and mass of this shard's eligible entries by the digit at `shift`, prefix
        matching.
        """
        device, dtype = self.logits_tv.device, self.stats.max_t.dtype
        out_tb2 = torch.empty((self.logits_tv.shape[0], NUM_BINS, 2), dtype=dtype, device=device)
        for rows in row_chunks(self.logits_tv):
            z_tv = temper(self.logits_tv[rows], self.spec)
            key_tv = ordered_keys(z_tv)
            eligible_tv = (z_tv > lowest_t[rows, None]) if strict else (z_tv >= lowest_t[rows, None])
            eligible_tv &= z_tv > -math.inf
            if shift + RADIX_BITS < self.num_bits:
                eligible_tv &= _digits(key_tv, shift + RADIX_BITS, self.num_bits) == prefix_t[rows, None]
            bin_tv = _digits(key_tv, shift, self.num_bits) & (NUM_BINS - 1)
            # Summed in float64: one bin can hold a whole row.
            parts_tbx = torch.zeros((2, z_tv.shape[0], NUM_BINS), dtype=torch.float64, device=device)
            exp_tv = (z_tv - self.stats.max_t[rows, None]).exp()
            parts_tbx[0].scatter_add_(1, bin_tv, eligible_tv.double())
            parts_tbx[1].scatter_add_(1, bin_tv, torch.where(eligible_tv, exp_tv, 0.0).double())
            out_tb2[rows] = parts_tbx.permute(1, 2, 0).to(dtype)
        return out_tb2

    def _value_of(self, prefix_t: torch.Tensor) -> torch.Tensor:
        """The float whose ordered key is the given unsigned number."""
        if self.num_bits == 64:
            key_t = prefix_t ^ (-(2**63))
            return (key_t ^ ((key_t >> 63) & (2**63 - 1))).view(torch.float64)
        key_t = (prefix_t - 2**31).to(torch.int32)
        return (key_t ^ ((key_t >> 31) & (2**31 - 1))).view(torch.float32)


def ordered_keys(z_tv: torch.Tensor) -> torch.Tensor:
    """Signed integers in the order of the floats; both zeros share one key."""
    if z_tv.dtype == torch.float64:
        bits_tv = (z_tv + 0.0).view(torch.int64)
        return bits_tv ^ ((bits_tv >> 63) & (2**63 - 1))
    bits_tv = (z_tv + 0.0).view(torch.int32)
    return bits_tv ^ ((bits_tv >> 31) & (2**31 - 1))


def _digits(key_tv: torch.Tensor, shift: int, num_bits: int) -> torch.Tensor:
    """int64: the unsigned order of the keys, shifted right."""
    key_tv = key_tv.long()
    if num_bits == 64:
        # The sign bit is flipped to get the unsigned order; the arithmetic shift's copies of it are masked
        # off.
        return ((key_tv ^ (-(2**63))) >> shift) & ((1 << (64 - shift)) - 1)
    return (key_tv + 2**31) >> shift


def _first_reached_or_last_filled(reached_tb: torch.Tensor, filled_tb: torch.Tensor) -> torch.Tensor:
    """`[t]` int64: first filled bin at which the goal is reached, or the last filled bin when it never is."""
    index_b = torch.arange(reached_tb.shape[1], device=reached_tb.device)
    first_t = torch.where(reached_tb & filled_tb, index_b, NUM_BINS).amin(dim=1)
    last_t = torch.where(filled_tb, index_b, 0).amax(dim=1)
    return torch.minimum(first_t, last_t)
