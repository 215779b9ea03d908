"""Exact metric reductions: a metric's type says how it adds up over microbatches and ranks, its name says
nothing.

`Mean` keeps numerator and denominator apart until the end, so the result never depends on how a batch was
cut; the same holds for `Quantiles` and `EffectiveSize`. An empty microbatch or rank is neutral for every
type. Values stay tensors until `reduce_metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rlcore.collectives import Group, ReduceOp, all_reduce_
from rlcore.quantiles import NUM_COUNTS, counts_of, quantile_of

Scalar = torch.Tensor | float


def _double(value: Scalar) -> torch.Tensor:
    """A detached float64 scalar: counts stay exact and sums do not depend on the order of microbatches."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(torch.float64).reshape(())
    return torch.tensor(value, dtype=torch.float64)


@dataclass(frozen=True)
class Mean:
    """num / den. `den` counts what `num` sums; 0 / 0 is reported as 0.0: nothing was there to average."""

    num: Scalar
    den: Scalar

    def __add__(self, other: Mean) -> Mean:
        return Mean(_double(self.num) + _double(other.num), _double(self.den) + _double(other.den))

    def complement(self) -> Mean:
        """1 - this mean, over the same denominator: the dropped fraction from the kept fraction."""
        return Mean(_double(self.den) - _double(self.num), self.den)


@dataclass(frozen=True)
class Sum:
    """A count or a total."""

    value: Scalar

    def __add__(self, other: Sum) -> Sum:
        return Sum(_double(self.value) + _double(other.value))


@dataclass(frozen=True)
class Min:
    """Smallest value seen; +inf is "nothing seen" and is left out of the report."""

    value: Scalar

    def __add__(self, other: Min) -> Min:
        return Min(torch.minimum(_double(self.value), _double(other.value)))


@dataclass(frozen=True)
class Max:
    """Largest value seen; -inf is "nothing seen" and is left out of the report."""

    value: Scalar

    def __add__(self, other: Max) -> Max:
        return Max(torch.maximum(_double(self.value), _double(other.value)))


@dataclass(frozen=True)
class EffectiveSize:
    """(sum w)^2 / sum w^2 of importance weights w >= 0: how many equally weighted samples they are worth.

    0.0 where nothing was seen, or every weight is 0. Source: Kish 1965.
    """

    weight: Scalar
    """Sum of the weights."""
    square: Scalar
    """Sum of their squares."""

    def __add__(self, other: EffectiveSize) -> EffectiveSize:
        return EffectiveSize(
            _double(self.weight) + _double(other.weight), _double(self.square) + _double(other.square)
        )


@dataclass(frozen=True)
class Quantiles:
    """Quantiles of many values as a sketch of fixed size: see `rlcore.quantiles` for its error bound.

    Reported as `name/p05`, one entry a level; left out where nothing was seen, NaN where one NaN was.
    """

    counts: torch.Tensor
    """`[NUM_COUNTS]` float64: how many values fell into each bucket."""
    levels: tuple[float, ...] = (0.05, 0.5, 0.95)
    """Quantile levels in [0, 1]; those of one name are the same everywhere."""

    def __post_init__(self) -> None:
        assert tuple(self.counts.shape) == (NUM_COUNTS,) and self.counts.dtype == torch.float64
        assert all(0.0 <= level <= 1.0 for level in self.levels)

    def __add__(self, other: Quantiles) -> Quantiles:
        assert self.levels == other.levels, "one name, one set of levels"
        return Quantiles(self.counts + other.counts, self.levels)


Metric = Mean | Sum | Min | Max | EffectiveSize | Quantiles


def min_over(value: torch.Tensor, mask: torch.Tensor) -> Min:
    """`Min` of the values where `mask` (same shape, bool) is True; nothing seen where it is all False."""
    return Min(torch.where(mask, value.detach(), math.inf).amin() if value.numel() else math.inf)


def max_over(value: torch.Tensor, mask: torch.Tensor) -> Max:
    """`Max` of the values where `mask` (same shape, bool) is True; nothing seen where it is all False."""
    return Max(torch.where(mask, value.detach(), -math.inf).amax() if value.numel() else -math.inf)


def mean_over(value: torch.Tensor, mask: torch.Tensor) -> Mean:
    """`Mean` of the values where `mask` (same shape, bool) is True. Masked values may be inf or NaN."""
    kept = torch.where(mask, value.detach().to(torch.float64), 0.0)
    return Mean(kept.sum(), mask.sum())


def quantiles_over(
    value: torch.Tensor, mask: torch.Tensor, levels: tuple[float, ...] = (0.05, 0.5, 0.95)
) -> Quantiles:
    """`Quantiles` of the values where `mask` (same shape, bool) is True. Masked values may be inf or NaN."""
    return Quantiles(counts_of(value, mask), levels)


def effective_size_over(weight: torch.Tensor, mask: torch.Tensor) -> EffectiveSize:
    """`EffectiveSize` of the weights where `mask` (same shape, bool) is True. Masked ones may be inf or
    NaN.
    """
    kept = torch.where(mask, weight.detach().to(torch.float64), 0.0)
    return EffectiveSize(kept.sum(), kept.square().sum())


def neutral_like(metric: Metric) -> Metric:
    """The metric of nothing at all, of the same type: what a rank without data hands to the reduction."""
    match metric:
        case Mean():
            return Mean(0.0, 0.0)
        case Sum():
            return Sum(0.0)
        case Min():
            return Min(math.inf)
        case Max():
            return Max(-math.inf)
        case EffectiveSize():
            return EffectiveSize(0.0, 0.0)
        case Quantiles():
            return Quantiles(torch.zeros_like(metric.counts), metric.levels)


def add_metrics(parts: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Adds up the metrics of several microbatches by name and type.

    A part may lack a name; a name must keep its type: `ValueError` otherwise.
    """
    total: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            seen = total.get(name)
            if seen is None:
                total[name] = metric
            elif type(seen) is type(metric):
                total[name] = seen + metric  # type: ignore[operator]
            else:
                raise ValueError(
                    f"metric {name!r} is a {type(metric).__name__} in one microbatch and a "
                    f"{type(seen).__name__} in another. Give the two quantities two names."
                )
    return total


def reduce_metrics(
    metrics: Mapping[str, Metric], group: Group = None, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """The metrics over all ranks of `group`, as plain numbers in the order of `metrics`.

    Collectives: at most three all-reduces (sum, min, max) of one flat float64 tensor each, on `device`; a
    kind that no metric has is skipped, so every rank must hand in the same names with the same types,
    whatever its data. A `Quantiles` adds its `NUM_COUNTS` numbers to the sum's tensor.
    `Mean` with denominator 0 gives 0.0; `Min`, `Max` and `Quantiles` over nothing are left out, on all ranks
    alike.
    """
    names = sorted(metrics)
    sums = {name: _summed(metrics[name]) for name in names}
    minima = {name: [_double(metric.value)] for name in names if isinstance(metric := metrics[name], Min)}
    maxima = {name: [_double(metric.value)] for name in names if isinstance(metric := metrics[name], Max)}
    total = _reduce_flat({name: parts for name, parts in sums.items() if parts}, "sum", group, device)
    total |= _reduce_flat(minima, "min", group, device) | _reduce_flat(maxima, "max", group, device)
    reduced: dict[str, float] = {}
    for name, metric in metrics.items():
        reduced |= _report(name, metric, total[name])
    return reduced


def _summed(metric: Metric) -> list[torch.Tensor]:
    """What of the metric adds up over ranks, in the order in which `_report` reads it."""
    match metric:
        case Mean():
            return [_double(metric.num), _double(metric.den)]
        case Sum():
            return [_double(metric.value)]
        case EffectiveSize():
            return [_double(metric.weight), _double(metric.square)]
        case Quantiles():
            return [metric.counts]
        case _:
            return []


def _report(name: str, metric: Metric, total: torch.Tensor) -> dict[str, float]:
    """The entries of one metric from its reduced numbers `[n]`, on the CPU."""
    if isinstance(metric, Quantiles):
        if not bool(total.any()):
            return {}
        return {f"{name}/{_level_name(level)}": quantile_of(total, level) for level in metric.levels}
    first, *rest = total.tolist()
    if isinstance(metric, Mean):
        return {name: first / rest[0] if rest[0] != 0 else 0.0}
    if isinstance(metric, EffectiveSize):
        return {name: first * first / rest[0] if rest[0] != 0 else 0.0}
    empty = math.inf if isinstance(metric, Min) else -math.inf if isinstance(metric, Max) else None
    return {} if first == empty else {name: first}


def _level_name(level: float) -> str:
    """0.05 -> p05, 0.5 -> p50, 0.999 -> p99.9."""
    whole, _, fraction = f"{100 * level:.6g}".partition(".")
    return f"p{whole:0>2}" + (f".{fraction}" if fraction else "")


def _reduce_flat(
    parts: Mapping[str, Sequence[torch.Tensor]], op: ReduceOp, group: Group, device: torch.device | str
) -> dict[str, torch.Tensor]:
    """The numbers of each name over all ranks, on the CPU: one all-reduce, one copy."""
    if not parts:
        return {}
    flat = {name: torch.cat([part.to(device).reshape(-1) for part in parts[name]]) for name in parts}
    total = all_reduce_(torch.cat(list(flat.values())), op, group).cpu()
    return dict(zip(flat, total.split([part.numel() for part in flat.values()]), strict=True))
