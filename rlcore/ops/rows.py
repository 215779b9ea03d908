"""What the support search passes around: parameters, statistics and support of each row.

y is a tempered logit relative to the largest of its whole row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch

from rlcore.sampling import RowSampling, SamplingSpec

T = TypeVar("T")

# Rows whose top-k is off, as a count: larger than any vocabulary.
NO_TOP_K = 2**31


@dataclass(frozen=True, kw_only=True)
class RowParams:
    """The sampling parameters of each row as tensors, and what is known of them without reading one back."""

    temperature_t: torch.Tensor
    """`[t]` compute dtype: what the logits are divided by."""
    top_k_t: torch.Tensor
    """`[t]` int64; NO_TOP_K where it is off."""
    top_p_cut_t: torch.Tensor
    """`[t]` float64: see `SamplingSpec.top_p_cut`; inf where it is off."""
    min_p_cut_t: torch.Tensor
    """`[t]` compute dtype: see `SamplingSpec.min_p_cut`; -inf where it is off."""
    max_top_k: int
    """Largest top-k of the rows that have one; 0 when none has."""
    all_top_k: bool
    """Has every row a top-k?"""
    any_top_p: bool
    any_min_p: bool
    shares_ties: bool
    """`ties="share"`: the last kept group carries what is left of the count; else all of it is kept."""

    @staticmethod
    def of(
        spec: SamplingSpec | RowSampling, logits_tv: torch.Tensor, vocab_size: int, dtype: torch.dtype
    ) -> RowParams:
        """The parameters for these rows. A top-k of at least `vocab_size` is off. `ValueError` on a wrong row
        count, and on penalties: they belong to the logits, so whoever applies them takes them off the spec.
        """
        if spec.penalises:
            raise ValueError(
                f"{spec.penalty_fields} counts the tokens before each position: pass them as "
                "`penalties=PenaltyTokens.of(...)`, or switch the penalty off."
            )
        num_rows, device = logits_tv.shape[0], logits_tv.device
        if isinstance(spec, RowSampling):
            return _from_rows(spec, num_rows, vocab_size, dtype, device)
        top_k = spec.effective_top_k
        top_k = None if top_k is None or top_k >= vocab_size else top_k
        has_top_p = spec.effective_top_p is not None

        def full(value: float, kind: torch.dtype) -> torch.Tensor:
            return torch.full((1,), value, dtype=kind, device=device).expand(num_rows)

        return RowParams(
            temperature_t=full(spec.effective_temperature, dtype),
            top_k_t=full(NO_TOP_K if top_k is None else top_k, torch.int64),
            top_p_cut_t=full(spec.top_p_cut if has_top_p else math.inf, torch.float64),
            min_p_cut_t=full(spec.min_p_cut, dtype),
            max_top_k=top_k or 0,
            all_top_k=top_k is not None,
            any_top_p=has_top_p,
            any_min_p=spec.min_p > 0.0,
            shares_ties=spec.ties == "share",
        )

    @property
    def truncates(self) -> bool:
        """Can any row drop an id?"""
        return self.max_top_k > 0 or self.any_top_p or self.any_min_p

    def untruncated(self) -> RowParams:
        """The same temperatures, with every filter off."""
        return replace(self, max_top_k=0, all_top_k=False, any_top_p=False, any_min_p=False)

    def rows(self, row_u: torch.Tensor) -> RowParams:
        """The parameters of some rows."""
        return pick_rows(self, row_u)


@dataclass(frozen=True, kw_only=True)
class RowStats:
    """Of each whole row (all shards)."""

    max_t: torch.Tensor
    """`[t]`: largest tempered logit."""
    sum_t: torch.Tensor
    """`[t]` float64: sum of exp(y)."""
    log_sum_t: torch.Tensor
    """`[t]`: its logarithm; NaN where the row has a NaN, a +inf, or nothing finite."""
    entropy_t: torch.Tensor
    """`[t]`: entropy of the whole distribution; meaningless unless it was asked for."""
    num_finite_t: torch.Tensor
    """`[t]` int64: ids that are not banned."""

    def rows(self, row_u: torch.Tensor) -> RowStats:
        """The statistics of some rows."""
        return pick_rows(self, row_u)


@dataclass(frozen=True, kw_only=True)
class Support:
    """The kept set of each row."""

    threshold_t: torch.Tensor
    """`[t]`: smallest kept tempered logit."""
    share_t: torch.Tensor
    """`[t]`: weight of each entry equal to the threshold; entries above it weigh 1."""
    log_sum_t: torch.Tensor
    """`[t]`: log of the weighted sum of exp(y) over the support."""
    num_kept_t: torch.Tensor
    """`[t]` int64: the support's size, a shared group counting its share."""
    entropy_t: torch.Tensor
    """`[t]`: entropy of the truncated distribution; meaningless unless it was asked for."""

    @staticmethod
    def of_cut(
        cut: Cut, num_group_t: torch.Tensor, stats: RowStats, shares_ties: bool, entropy: bool
    ) -> Support:
        """The support that keeps everything above the cut, and `num_group_t` of weight of the group tied at
        it.
        """
        dtype = stats.max_t.dtype
        if not shares_ties:
            num_group_t = cut.num_tied_t
        y_cut_t = (cut.threshold_t - stats.max_t).double()
        group_mass_t = num_group_t * y_cut_t.exp()
        sum_t = cut.mass_above_t + group_mass_t
        log_sum_t = sum_t.log()
        weighted_t = cut.weighted_above_t + group_mass_t * y_cut_t.clamp(min=-1e4) if entropy else sum_t
        return Support(
            threshold_t=cut.threshold_t,
            share_t=num_group_t.to(dtype) / cut.num_tied_t.clamp(min=1).to(dtype),
            log_sum_t=log_sum_t.to(dtype),
            num_kept_t=cut.num_above_t + num_group_t,
            entropy_t=(log_sum_t - weighted_t / sum_t).to(dtype),
        )

    def with_rows(self, row_u: torch.Tensor, other: Support) -> Support:
        """This support with some rows taken from `other`, in the order of `row_u`."""
        return write_rows(self, row_u, other)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Sums of a whole row around a threshold."""

    threshold_t: torch.Tensor
    """`[t]` compute dtype."""
    mass_above_t: torch.Tensor
    """`[t]` float64: sum of exp(y) over entries strictly above it."""
    num_above_t: torch.Tensor
    """`[t]` int64: how many those are."""
    num_tied_t: torch.Tensor
    """`[t]` int64: entries equal to it."""
    weighted_above_t: torch.Tensor
    """`[t]` float64: sum of exp(y) y over entries above it; 0 unless the entropy was asked for."""

    def with_rows(self, row_u: torch.Tensor, other: Cut) -> Cut:
        """This cut with some rows taken from `other`, in the order of `row_u`."""
        return write_rows(self, row_u, other)

    def with_rows_where(self, condition_t: torch.Tensor, other: Cut) -> Cut:
        """This cut with the rows of the condition taken from `other`, which has as many rows."""
        return Cut(
            **{
                f.name: torch.where(condition_t, getattr(other, f.name), getattr(self, f.name))
                for f in fields(self)
            }
        )

    def group_for_mass(self, goal_t: torch.Tensor, max_t: torch.Tensor) -> torch.Tensor:
        """`[t]` int64: entries of the tied group needed until the mass above the next one reaches the goal;
        at least 1.
        """
        mass_t = (self.threshold_t - max_t).double().exp()
        needed_t = ((goal_t - self.mass_above_t) / mass_t).ceil()
        # 0/0 where the group has no mass at all: one entry is as good as none.
        needed_t = torch.nan_to_num(needed_t, nan=1.0, posinf=2.0**40, neginf=1.0).clamp(min=1.0, max=2.0**40)
        return torch.minimum(needed_t.long(), self.num_tied_t)


def pick_rows(value: T, row_u: torch.Tensor) -> T:
    """A dataclass of one entry a row, of some rows; fields that are no tensor hold for all rows."""
    tensors = {f.name: getattr(value, f.name) for f in fields(value)}  # type: ignore[arg-type]
    picked = {name: v[row_u] for name, v in tensors.items() if isinstance(v, torch.Tensor)}
    return replace(value, **picked)  # type: ignore[type-var]


def write_rows(value: T, row_u: torch.Tensor, other: T) -> T:
    """`value` with the rows `row_u` taken from `other`, a dataclass of so many rows, in that order."""
    names = [f.name for f in fields(value)]  # type: ignore[arg-type]
    merged = {name: getattr(value, name).index_copy(0, row_u, getattr(other, name)) for name in names}
    return replace(value, **merged)  # type: ignore[type-var]


def _from_rows(
    spec: RowSampling, num_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> RowParams:
    if spec.num_rows != num_rows:
        raise ValueError(
            f"sampling parameters of {spec.num_rows} rows for logits of {num_rows} rows: expected one each."
        )
    top_k_t = spec.top_k_t.to(device)
    off_t = (top_k_t <= 0) | (top_k_t >= vocab_size)
    top_p_cut_t = spec.top_p_cut_t.to(device)
    return RowParams(
        temperature_t=spec.temperature_t.to(device, dtype),
        top_k_t=torch.where(off_t, NO_TOP_K, top_k_t),
        top_p_cut_t=top_p_cut_t,
        min_p_cut_t=spec.min_p_cut_t.to(device, dtype),
        max_top_k=min(spec.max_top_k, vocab_size),
        all_top_k=spec.all_top_k and spec.max_top_k < vocab_size,
        any_top_p=spec.any_top_p,
        any_min_p=spec.any_min_p,
        shares_ties=spec.ties == "share",
    )
