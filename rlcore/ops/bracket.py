"""Support search for rows that the candidate list does not settle: a large top-k, or a nucleus with a long
tail.

The threshold is the value at which the count (top-k) or mass (top-p) of the entries from it upwards reaches a
goal. A bracket around it is narrowed by passes that sum above a few pivots at once, placed by interpolation;
then the values inside are listed, so the search ends on a value that occurs in the row. Which rows are still
open, and so how many passes run, is read from sums that are the same on every rank of the group: all ranks
make the same calls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from rlcore.collectives import Group, all_gather
from rlcore.ops.candidates import top_values
from rlcore.ops.float_keys import key_quarters
from rlcore.ops.passes import BLOCK, Passes
from rlcore.ops.pivots import Bracket, clamp_inside, just_below, place_pivots, spread, tighten
from rlcore.ops.rows import Cut, RowParams, RowStats, Support

# Values listed per shard and round once the bracket is narrow.
NUM_LISTED = 64
# Pivot passes before values are listed.
PASSES_PER_ROUND = 4
# Of this many blocks of columns one is in the sample, and so many passes over it cost less than one over all.
SAMPLE_STRIDE = 16
SAMPLE_PASSES = 4
# Entries of the open rows below which passes over a sample cost as much as passes over everything.
SAMPLE_FROM_ELEMENTS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class OpenRows:
    """The rows of a search and everything needed to run a pass over them."""

    passes: Passes
    logits_tv: torch.Tensor
    row_u: torch.Tensor
    """Their indices in `logits_tv`."""
    stats: RowStats
    params: RowParams
    tp_group: Group
    entropy: bool

    def subset(self, index_a: torch.Tensor) -> OpenRows:
        """Some of these rows, in ascending order."""
        if index_a.shape[0] == self.row_u.shape[0]:
            return self
        return replace(
            self, row_u=self.row_u[index_a], stats=self.stats.rows(index_a), params=self.params.rows(index_a)
        )

    def picks(self) -> torch.Tensor | None:
        """What the passes take: None when these are all rows, so that none is picked by index."""
        return None if self.row_u.shape[0] == self.logits_tv.shape[0] else self.row_u

    def sample(self) -> OpenRows:
        """The same rows with one block of columns in SAMPLE_STRIDE, copied; a short shard stays whole."""
        whole = self.logits_tv.shape[1] // BLOCK
        rows_uv = self.logits_tv
        if whole >= SAMPLE_STRIDE:
            blocks_tbk = self.logits_tv[:, : whole * BLOCK].unflatten(1, (whole, BLOCK))[:, ::SAMPLE_STRIDE]
            rows_uv = blocks_tbk.flatten(1)
        if self.picks() is not None:
            rows_uv = rows_uv[self.row_u]
        return replace(self, logits_tv=rows_uv, row_u=torch.arange(len(self.row_u), device=rows_uv.device))

    def cut_at(self, threshold_u: torch.Tensor) -> Cut:
        """Sums of the whole rows around a threshold: one pass, one all-gather of 4 float64 a row."""
        sums_u4 = self.passes.sums_above(
            self.logits_tv,
            self.picks(),
            self.params.temperature_t,
            self.stats.max_t,
            threshold_u,
            self.entropy,
        )
        # Gathered and added in rank order, so that every rank holds the same bits.
        sums_u4 = all_gather(sums_u4, self.tp_group).sum(dim=0)
        return Cut(
            threshold_t=threshold_u,
            mass_above_t=sums_u4[:, 0],
            num_above_t=sums_u4[:, 1].long(),
            num_tied_t=sums_u4[:, 2].long(),
            weighted_above_t=sums_u4[:, 3],
        )

    def pivot_sums(self, pivot_up: torch.Tensor) -> torch.Tensor:
        """`[u, P, 2]` float64 mass and count of the entries >= each pivot: one pass, one all-gather."""
        sums_up2 = self.passes.pivot_sums(
            self.logits_tv, self.picks(), self.params.temperature_t, self.stats.max_t, pivot_up
        )
        return all_gather(sums_up2, self.tp_group).sum(dim=0)

    def values_below(self, high_u: torch.Tensor) -> torch.Tensor:
        """`[u, NUM_LISTED]`: the row's largest values below `high_u`, descending, as a multiset."""
        temperature_u, rows = self.params.temperature_t, self.picks()
        maxima_ub = self.passes.block_maxima(self.logits_tv, rows, temperature_u, high_u)
        local_uc = top_values(self.logits_tv, rows, temperature_u, high_u, NUM_LISTED, maxima_ub)
        gathered_ruc = all_gather(local_uc, self.tp_group)
        return gathered_ruc.transpose(0, 1).flatten(1).topk(NUM_LISTED, dim=1).values


def support_from_search(rows: OpenRows, high_u: torch.Tensor, high_u2: torch.Tensor) -> Support:
    """The support of each open row.

    `high_u`: a value to start below, with the mass and count `[u, 2]` of the entries from it upwards.
    """
    stats, params = rows.stats, rows.params
    cut = _everything(rows)
    num_group_u = torch.zeros_like(cut.num_tied_t)
    low_u2 = torch.stack([cut.mass_above_t, cut.num_above_t.double()], dim=1)
    bracket = Bracket(low_u=cut.threshold_t, high_u=high_u, low_u2=low_u2, high_u2=high_u2)
    if params.max_top_k > 0:
        cut = _locate_some(rows, params.top_k_t < cut.num_above_t, bracket, params.top_k_t.double(), 1, cut)
        num_group_u = torch.minimum((params.top_k_t - cut.num_above_t).clamp(min=0), cut.num_tied_t)
        num_group_u = num_group_u if params.shares_ties else cut.num_tied_t
    if params.any_top_p:
        group_u = num_group_u * (cut.threshold_t - stats.max_t).double().exp()
        total_u = cut.mass_above_t + torch.where(num_group_u > 0, group_u, 0.0)
        goal_u = params.top_p_cut_t * total_u
        low_u2 = torch.stack([total_u, (cut.num_above_t + num_group_u).double()], dim=1)
        # What lies below x weighs less than V exp(x): this far down the tail cannot hold what top-p drops.
        tail_u = ((total_u - goal_u).clamp(min=1e-30) / stats.num_finite_t.clamp(min=1)).log()
        bound_u = stats.max_t + tail_u.to(stats.max_t.dtype)
        bracket = replace(bracket, low_u=cut.threshold_t, low_u2=low_u2)
        ends_above_u = cut.mass_above_t >= goal_u
        inner = _locate_some(rows, ends_above_u, bracket, goal_u, 0, cut, bound_u)
        # Not above: the nucleus ends inside top-k's own last group, of which top-k left this much.
        available_u = torch.where(ends_above_u, inner.num_tied_t, num_group_u)
        num_group_u = torch.minimum(inner.group_for_mass(goal_u, stats.max_t), available_u)
        cut = inner
    return Support.of_cut(cut, num_group_u, stats, params.shares_ties, rows.entropy)


def _everything(rows: OpenRows) -> Cut:
    """The cut just below everything that min-p keeps: one pass, and none when min-p is off."""
    stats, params = rows.stats, rows.params
    weighted_t = (stats.log_sum_t - stats.entropy_t).double() * stats.sum_t
    whole = Cut(
        threshold_t=torch.full_like(stats.max_t, -math.inf),
        mass_above_t=stats.sum_t,
        num_above_t=stats.num_finite_t,
        num_tied_t=torch.zeros_like(stats.num_finite_t),
        weighted_above_t=weighted_t,
    )
    if not params.any_min_p:
        return whole
    floored = replace(
        rows.cut_at(just_below(stats.max_t + params.min_p_cut_t)),
        num_tied_t=torch.zeros_like(stats.num_finite_t),
    )
    return floored.with_rows_where(torch.isneginf(params.min_p_cut_t), whole)


def _locate_some(
    rows: OpenRows,
    open_u: torch.Tensor,
    bracket: Bracket,
    goal_u: torch.Tensor,
    column: int,
    settled: Cut,
    bound_u: torch.Tensor | None = None,
) -> Cut:
    """`settled`, with the rows of `open_u` replaced by the cut at the largest value whose entries reach the
    goal.

    `column`: 0, the goal is a mass; 1, a count. `bound_u`: the goal is reached above it for certain. Rows
    that never reach it end on their lowest eligible value.
    What decides is the sum over the entries >= a value as `pivot_sums` adds it up: it never falls as the
    value falls, so a row ends on the same value whatever pivots led there and whatever rows it came with.
    """
    active_a = open_u.nonzero()[:, 0]
    bracket, goal_a = bracket.rows(active_a), goal_u[active_a]
    # The end that the caller knows may reach this goal already: then the search starts above the row's
    # largest value.
    too_low_a = bracket.high_u2[:, column] >= goal_a
    top_a = rows.stats.max_t[active_a]
    bracket = replace(
        bracket,
        high_u=torch.where(
            too_low_a, torch.nextafter(top_a, torch.full_like(top_a, math.inf)), bracket.high_u
        ),
        high_u2=torch.where(too_low_a[:, None], 0.0, bracket.high_u2),
    )
    bound_a = None if bound_u is None else bound_u[active_a]
    hint_up = _hint(rows.subset(active_a), bracket, goal_a, column, bound_a)
    if bound_a is not None:
        bracket = replace(bracket, low_u=torch.maximum(bracket.low_u, bound_a))
    num_rounds = 0
    while active_a.numel():
        open_rows = rows.subset(active_a)
        bracket = _narrow(open_rows, bracket, goal_a, column, hint_up, num_rounds >= 2)
        cut, bracket, done_a = _list_and_cut(open_rows, bracket, goal_a, column)
        settled = settled.with_rows(active_a, cut)
        still_a = (~done_a).nonzero()[:, 0]
        bracket, active_a, goal_a = bracket.rows(still_a), active_a[still_a], goal_a[still_a]
        hint_up, num_rounds = None, num_rounds + 1
    return settled


def _hint(
    rows: OpenRows, bracket: Bracket, goal_u: torch.Tensor, column: int, bound_u: torch.Tensor | None
) -> torch.Tensor | None:
    """`[u, 3]` pivots close to the goal, from a sample of the columns; None where a sample would not pay.

    Only where to look first comes from the sample: what is found is the same without it.
    """
    # The number of entries, because every rank of the group knows it: all of them sample, or none.
    if not goal_u.numel() or int(rows.stats.num_finite_t.sum()) < SAMPLE_FROM_ELEMENTS:
        return None
    sample = rows.sample()
    # The float above: banned ids are in no count.
    lowest_u = torch.nextafter(bracket.low_u, torch.full_like(bracket.low_u, math.inf))
    first_u = lowest_u if bound_u is None else torch.maximum(bound_u, lowest_u)
    sums_up2 = sample.pivot_sums(torch.stack([bracket.high_u, first_u, lowest_u], dim=1))
    high_u2, low_u2 = sums_up2[:, 0], sums_up2[:, 2]
    num_between_u = (low_u2 - high_u2)[:, 1]
    # What is missing from the nearer end, at the sample's rate: the entries far from the goal, whose mass
    # varies most from sample to sample, are then in no estimate.
    rate_u = num_between_u / bracket.num_inside().clamp(min=1.0)
    from_high_u = (goal_u - bracket.high_u2[:, column]) * rate_u
    from_low_u = (bracket.low_u2[:, column] - goal_u) * rate_u
    sample_goal_u = torch.where(
        from_low_u <= from_high_u, low_u2[:, column] - from_low_u, high_u2[:, column] + from_high_u
    )
    inside = Bracket(low_u=bracket.low_u, high_u=bracket.high_u, low_u2=low_u2, high_u2=high_u2)
    inside = tighten(inside, first_u[:, None], sums_up2[:, 1:2], sample_goal_u, column)
    # Two standard deviations of the rank of a quantile among this many values, at its largest.
    error_u = num_between_u.sqrt()
    for index in range(SAMPLE_PASSES):
        pivot_up = place_pivots(inside, sample_goal_u, column, spread(inside) if index % 2 else None)
        inside = tighten(inside, pivot_up, sample.pivot_sums(pivot_up), sample_goal_u, column, error_u)
    spread_u = (error_u / inside.num_inside().clamp(min=1.0)).to(bracket.high_u.dtype)
    return clamp_inside(place_pivots(inside, sample_goal_u, column, spread_u, clamp=False), bracket)


def _narrow(
    rows: OpenRows,
    bracket: Bracket,
    goal_u: torch.Tensor,
    column: int,
    hint_up: torch.Tensor | None,
    late: bool,
) -> Bracket:
    """The bracket after a few passes, each row until it holds no more values than one listing takes.

    `late`: two rounds were not enough, so values lie far apart: every other pass quarters floats, not nats.
    """
    for index in range(PASSES_PER_ROUND):
        wide_w = (bracket.num_inside() > NUM_LISTED).nonzero()[:, 0]
        if not wide_w.numel():
            break
        part, goal_w = bracket.rows(wide_w), goal_u[wide_w]
        if hint_up is not None and index == 0:
            pivot_wp = hint_up[wide_w]
        elif late and index % 2 == 0:
            pivot_wp = clamp_inside(key_quarters(part.low_u, part.high_u), part)
        else:
            pivot_wp = place_pivots(part, goal_w, column, spread(part) if index % 2 else None)
        sums_wp2 = rows.subset(wide_w).pivot_sums(pivot_wp)
        bracket = bracket.with_rows(wide_w, tighten(part, pivot_wp, sums_wp2, goal_w, column))
    return bracket


def _list_and_cut(
    rows: OpenRows, bracket: Bracket, goal_u: torch.Tensor, column: int
) -> tuple[Cut, Bracket, torch.Tensor]:
    """The cut at the value where the listed entries reach the goal, or at the last one listed; the bracket
    around what is left; and is the cut final?
    """
    value_uc = rows.values_below(bracket.high_u)
    eligible_uc = value_uc > bracket.low_u[:, None]
    weight_uc = (
        (value_uc - rows.stats.max_t[:, None]).double().exp() if column == 0 else torch.ones_like(value_uc)
    )
    sum_uc = torch.where(eligible_uc, weight_uc.double(), 0.0).cumsum(dim=1)
    reached_uc = (bracket.high_u2[:, column, None] + sum_uc >= goal_u[:, None]) & eligible_uc
    num_eligible_u = eligible_uc.sum(dim=1)
    first_u = reached_uc.to(torch.int8).argmax(dim=1)
    index_u = torch.where(reached_uc.any(dim=1), first_u, (num_eligible_u - 1).clamp(min=0))
    # Nothing eligible below the upper end: rounding alone kept the goal from being reached above it.
    threshold_u = torch.where(
        num_eligible_u > 0, value_uc.gather(1, index_u[:, None])[:, 0], just_below(bracket.high_u)
    )
    larger_uc = torch.where(value_uc > threshold_u[:, None], value_uc, bracket.high_u[:, None])
    pivot_u2 = torch.stack([larger_uc.amin(dim=1), threshold_u], dim=1)
    sums_u22 = rows.pivot_sums(pivot_u2)
    above_u2, from_u2 = sums_u22.unbind(1)
    cut = Cut(
        threshold_t=threshold_u,
        mass_above_t=above_u2[:, 0],
        num_above_t=above_u2[:, 1].long(),
        num_tied_t=(from_u2 - above_u2)[:, 1].long(),
        weighted_above_t=rows.cut_at(threshold_u).weighted_above_t if rows.entropy else above_u2[:, 0],
    )
    final_u = (above_u2[:, column] < goal_u) & (from_u2[:, column] >= goal_u)
    # All values inside add up to less than the goal; where pivot sums disagree, the search goes on upwards.
    exhausted_u = ~reached_uc.any(dim=1) & (num_eligible_u < NUM_LISTED)
    exhausted_u &= ~(above_u2[:, column] >= goal_u) | (num_eligible_u == 0)
    return cut, tighten(bracket, pivot_u2, sums_u22, goal_u, column), final_u | exhausted_u
