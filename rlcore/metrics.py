"""Exact metric reductions: a metric's type says how it adds up over microbatches and ranks, its name says
nothing.

`Mean` keeps numerator and denominator apart until the end, so the result never depends on how a batch was
cut. An empty microbatch or rank is neutral for every type. Values stay tensors until `reduce_metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rlcore.collectives import Group, ReduceOp, all_reduce_

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


Metric = Mean | Sum | Min | Max


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
    whatever its data.
    `Mean` with denominator 0 gives 0.0; `Min` and `Max` over nothing are left out, on all ranks alike.
    """
    names = sorted(metrics)
    sums: list[Scalar] = []
    for name in names:
        metric = metrics[name]
        if isinstance(metric, Mean):
            sums += [metric.num, metric.den]
        elif isinstance(metric, Sum):
            sums.append(metric.value)
    minima = [metric.value for name in names if isinstance(metric := metrics[name], Min)]
    maxima = [metric.value for name in names if isinstance(metric := metrics[name], Max)]
    total = iter(_reduce_flat(sums, "sum", group, device))
    low = iter(_reduce_flat(minima, "min", group, device))
    high = iter(_reduce_flat(maxima, "max", group, device))
    reduced: dict[str, float] = {}
    for name in names:
        metric = metrics[name]
        if isinstance(metric, Mean):
            num, den = next(total), next(total)
            reduced[name] = num / den if den != 0 else 0.0
        elif isinstance(metric, Sum):
            reduced[name] = next(total)
        else:
            value = next(low) if isinstance(metric, Min) else next(high)
            empty = math.inf if isinstance(metric, Min) else -math.inf
            if value != empty:
                reduced[name] = value
    return {name: reduced[name] for name in metrics if name in reduced}


def _reduce_flat(
    values: Sequence[Scalar], op: ReduceOp, group: Group, device: torch.device | str
) -> list[float]:
    if not values:
        return []
    flat = torch.stack([_double(value).to(device) for value in values])
    return all_reduce_(flat, op, group).tolist()
