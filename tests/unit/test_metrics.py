"""Metric reductions against hand-computed figures, in one process and over ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from rlcore.collectives import record_collectives
from rlcore.metrics import (
    EffectiveSize,
    Max,
    Mean,
    Min,
    Sum,
    add_metrics,
    effective_size_over,
    max_over,
    mean_over,
    min_over,
    neutral_like,
    quantiles_over,
    reduce_metrics,
)
from tests.rank_pool import run_ranks


def test_mean_is_token_weighted():
    """CASES B36 (a): 0.4 over 1 token and 2.0 over 9 is 1.84; the mean of means would be 1.2."""
    total = add_metrics([{"entropy": Mean(0.4 * 1, 1)}, {"entropy": Mean(2.0 * 9, 9)}])
    assert reduce_metrics(total) == pytest.approx({"entropy": 1.84})


def test_affine_functions_come_from_the_pair():
    """CASES B36 (b): two microbatches hold 3 and 5 of 10 kept tokens: masked 0.2, not (1-.3)+(1-.5)."""
    kept = add_metrics([{"kept": Mean(3, 10)}, {"kept": Mean(5, 0)}])["kept"]
    assert isinstance(kept, Mean)
    assert reduce_metrics({"masked": kept.complement()}) == pytest.approx({"masked": 0.2})


def test_empty_microbatch_does_not_win_an_extreme():
    """CASES B36 (c): (0.8, 1.3) and (inf, -inf) are 0.8 and 1.3."""
    seen = {"ratio_min": Min(0.8), "ratio_max": Max(1.3)}
    empty = {"ratio_min": Min(math.inf), "ratio_max": Max(-math.inf)}
    assert reduce_metrics(add_metrics([empty, seen, empty])) == {"ratio_min": 0.8, "ratio_max": 1.3}


def test_counts_are_not_scaled():
    """CASES B36 (d): 3 + 2 valid samples are 5."""
    assert reduce_metrics(add_metrics([{"valid": Sum(3)}, {"valid": Sum(2)}])) == {"valid": 5.0}


def test_mean_of_raw_weights():
    """CASES B36 (e): raw weights .5, 3, 1 average 1.5; after a cap at 2 it would be 1.166667."""
    weight = torch.tensor([0.5, 3.0, 1.0, 99.0])
    mask = torch.tensor([True, True, True, False])
    assert reduce_metrics({"weight": mean_over(weight, mask)}) == {"weight": 1.5}


def test_type_decides_not_the_name():
    """ "terminated" contains "min", "max_entropy" is a mean."""
    first = {"terminated": Sum(2), "max_entropy": Mean(1, 1)}
    second = {"terminated": Sum(3), "max_entropy": Mean(3, 1)}
    assert reduce_metrics(add_metrics([first, second])) == {"terminated": 5.0, "max_entropy": 2.0}


def test_masked_values_may_be_anything():
    value = torch.tensor([1.0, math.nan, math.inf, -math.inf, 3.0])
    mask = torch.tensor([True, False, False, False, True])
    metrics = {"mean": mean_over(value, mask), "min": min_over(value, mask), "max": max_over(value, mask)}
    assert reduce_metrics(metrics) == {"mean": 2.0, "min": 1.0, "max": 3.0}


def test_nothing_seen_anywhere():
    """A mean of nothing is 0.0; an extreme of nothing is left out; a NaN that was really seen is shown."""
    empty, none = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    metrics = {"mean": mean_over(empty, none), "min": min_over(empty, none), "max": max_over(empty, none)}
    assert reduce_metrics(metrics) == {"mean": 0.0}
    assert math.isnan(reduce_metrics({"loss": Mean(math.nan, 1)})["loss"])


def test_accumulation_is_float64():
    """2^24 + 1 + 1 is lost in float32; a (num, den) pair holds the sum of many tokens."""
    total = add_metrics([{"n": Sum(torch.tensor(2.0**24))}] + [{"n": Sum(torch.tensor(1.0))}] * 2)
    assert reduce_metrics(total) == {"n": 2.0**24 + 2}


def test_metrics_hold_no_graph():
    weight = torch.ones(3, requires_grad=True)
    total = add_metrics([{"loss": Mean(weight.sum(), 3)}, {"loss": Mean(weight.sum(), 3)}])["loss"]
    assert isinstance(total, Mean) and isinstance(total.num, torch.Tensor) and not total.num.requires_grad


def test_a_name_keeps_its_type():
    with pytest.raises(ValueError, match="'x' is a Max"):
        add_metrics([{"x": Sum(1)}, {"x": Max(1)}])


@pytest.mark.parametrize("cut", range(5))
def test_effective_size_over_any_split(cut):
    """Weights 3, 1, 1, 1: 36 / 12 = 3. The sum of the parts' own sizes would be 4 for most cuts."""
    weight = torch.tensor([3.0, 1.0, 1.0, 1.0, math.nan])
    mask = torch.tensor([True, True, True, True, False])
    parts = [effective_size_over(weight[part], mask[part]) for part in (slice(cut), slice(cut, 5))]
    assert reduce_metrics(add_metrics([{"size": part} for part in parts])) == {"size": 3.0}


def test_effective_size_edges():
    """n equal weights are worth n; nothing and all zero are worth 0; squares of large float32 weights fit."""
    every = torch.ones(5).bool()
    for scale in (1e-20, 1.0, 1e30):
        size = reduce_metrics({"n": effective_size_over(torch.full((5,), scale), every)})["n"]
        assert size == pytest.approx(5.0)
    metrics = {"zero": effective_size_over(torch.zeros(5), every), "none": EffectiveSize(0, 0)}
    assert reduce_metrics(metrics) == {"zero": 0.0, "none": 0.0}


def test_neutral_like_adds_nothing():
    """What a rank without data hands in, for every type."""
    value, mask = torch.tensor([1.0, 4.0]), torch.ones(2).bool()
    metrics = {
        "mean": mean_over(value, mask),
        "sum": Sum(3.0),
        "min": min_over(value, mask),
        "max": max_over(value, mask),
        "size": effective_size_over(value, mask),
        "quantiles": quantiles_over(value, mask),
    }
    neutral = {name: neutral_like(metric) for name, metric in metrics.items()}
    assert reduce_metrics(add_metrics([neutral, metrics, neutral])) == reduce_metrics(metrics)
    assert reduce_metrics(neutral) == {"mean": 0.0, "sum": 0.0, "size": 0.0}


def _rank_metrics(rank: int, world_size: int) -> tuple[dict[str, float], list[str]]:
    """Rank 1 is empty; the order of names differs from rank to rank."""
    has_data = rank != 1
    metrics = {
        "mean": Mean(float(rank + 1) * 2, 2) if has_data else Mean(0, 0),
        "count": Sum(rank if has_data else 0),
        "low": Min(float(rank)) if has_data else Min(math.inf),
        "high": Max(float(rank)) if has_data else Max(-math.inf),
        "nothing": Max(-math.inf),
        "size": effective_size_over(torch.tensor([1.0, rank + 1.0]), torch.tensor([has_data] * 2)),
    }
    if rank % 2:
        metrics = dict(reversed(metrics.items()))
    with record_collectives() as calls:
        reduced = reduce_metrics(metrics, dist.group.WORLD)
    return reduced, [call.kind for call in calls]


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_agree_and_an_empty_rank_is_neutral(world_size):
    ranks = [rank for rank in range(world_size) if rank != 1]
    expected = {
        "mean": sum(rank + 1 for rank in ranks) / len(ranks),
        "count": float(sum(ranks)),
        "low": 0.0,
        "high": float(max(ranks)),
        "size": sum(rank + 2 for rank in ranks) ** 2 / sum(1 + (rank + 1) ** 2 for rank in ranks),
    }
    for reduced, kinds in run_ranks(_rank_metrics, world_size):
        assert reduced == expected
        assert kinds == ["all_reduce"] * (3 if world_size > 1 else 0)


def _rank_sums(rank: int, world_size: int) -> list[tuple[str, int]]:
    with record_collectives() as calls:
        reduce_metrics({"a": Sum(1), "b": Mean(1, 2)}, dist.group.WORLD)
    return [(call.kind, call.num_bytes) for call in calls]


@pytest.mark.distributed
def test_a_kind_without_metrics_sends_nothing():
    """Three float64 numbers in one all-reduce, nothing for minima and maxima."""
    assert run_ranks(_rank_sums, 2) == [[("all_reduce", 24)]] * 2
