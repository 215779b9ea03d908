"""The quantile sketch against torch.quantile within its bound, over any split, and over ranks."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.collectives import record_collectives
from rlcore.metrics import Mean, Quantiles, Sum, add_metrics, neutral_like, quantiles_over, reduce_metrics
from rlcore.quantiles import LARGEST, NUM_COUNTS, RELATIVE_ERROR, SMALLEST, counts_of, quantile_of
from tests.rank_pool import run_ranks

# Rounding of the logarithm at a bucket's edge, relative to the bound.
ROUNDING = 1 + 1e-9


def bound(values: torch.Tensor, level: float) -> float:
    """The documented one: the errors of the two order statistics, interpolated as they are."""
    ordered = values.sort().values
    position = level * (len(values) - 1)
    low, high = ordered[math.floor(position)].abs(), ordered[math.ceil(position)].abs()
    share = position - math.floor(position)
    errors = [max(RELATIVE_ERROR * float(x), SMALLEST) for x in (low, high)]
    return (errors[0] * (1 - share) + errors[1] * share) * ROUNDING


def check(values: torch.Tensor, level: float) -> None:
    values = values.double()
    got = quantile_of(counts_of(values, torch.ones_like(values).bool()), level)
    assert abs(got - float(values.quantile(level))) <= bound(values, level)


_MAGNITUDES = st.floats(-9, 7.9).map(lambda exponent: 10.0**exponent)
_VALUES = st.lists(st.tuples(_MAGNITUDES, st.sampled_from([-1.0, 0.0, 1.0])), min_size=1, max_size=40)


@settings(max_examples=200, deadline=None)
@given(_VALUES, st.floats(0, 1))
def test_any_values_within_the_bound(values, level):
    """Seventeen decades, both signs, zeros and what is below the smallest bucket."""
    check(torch.tensor([magnitude * sign for magnitude, sign in values], dtype=torch.float64), level)


@pytest.mark.parametrize("level", [0.0, 0.05, 0.5, 0.95, 0.999, 1.0])
def test_distributions_within_the_bound(level):
    """What is reported in earnest: lengths, gaps of float32 size, ratios, signed log masses."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(5000, generator=generator)
    check(torch.randint(1, 4000, (5000,), generator=generator), level)
    check(normal * 1e-6, level)
    check((normal * 3).exp(), level)
    check(-normal.abs(), level)
    check(torch.full((7,), 3.0), level)


def test_the_bound_is_nearly_reached():
    """Across a few buckets the largest error is the bound: no slack is hidden in it, and none is missing."""
    values = torch.logspace(0, 0.1, 1000, dtype=torch.float64)
    read = [quantile_of(counts_of(value, torch.tensor(True)), 0.5) for value in values]
    error = ((torch.tensor(read, dtype=torch.float64) - values) / values).abs().amax()
    assert 0.97 * RELATIVE_ERROR < float(error) <= RELATIVE_ERROR * ROUNDING


def test_the_ends_of_the_range():
    """Beyond the last bucket, inf included, a value reads as about LARGEST with its sign; below, as 0."""
    for value, expected in ((math.inf, LARGEST), (-math.inf, -LARGEST), (1e30, LARGEST), (-1e9, -LARGEST)):
        read = quantile_of(counts_of(torch.tensor([value]), torch.tensor([True])), 0.5)
        assert read == pytest.approx(expected, rel=2 * RELATIVE_ERROR)
    assert quantile_of(counts_of(torch.tensor([SMALLEST / 2]), torch.tensor([True])), 0.5) == 0.0


def test_masked_values_may_be_anything_and_a_nan_that_was_seen_is_shown():
    value = torch.tensor([1.0, math.nan, math.inf, -math.inf, 1.0])
    mask = torch.tensor([True, False, False, False, True])
    reduced = reduce_metrics({"x": quantiles_over(value, mask)})
    assert reduced == pytest.approx(dict.fromkeys(("x/p05", "x/p50", "x/p95"), 1.0), rel=RELATIVE_ERROR)
    assert all(type(number) is float for number in reduced.values()) and json.dumps(reduced)
    seen = reduce_metrics({"x": quantiles_over(value, mask | value.isnan())})
    assert all(math.isnan(number) for number in seen.values())


def test_levels_name_their_entries():
    value, mask = torch.arange(1001.0), torch.ones(1001).bool()
    reduced = reduce_metrics({"n": quantiles_over(value, mask, (0.0, 0.25, 0.999, 1.0))})
    assert list(reduced) == ["n/p00", "n/p25", "n/p99.9", "n/p100"]
    assert reduced["n/p25"] == pytest.approx(250.0, rel=RELATIVE_ERROR)
    assert reduced["n/p99.9"] == pytest.approx(999.0, rel=RELATIVE_ERROR)


def test_nothing_seen_is_left_out_and_neutral():
    empty = quantiles_over(torch.zeros(0), torch.zeros(0).bool())
    hidden = quantiles_over(torch.full((3,), math.nan), torch.zeros(3).bool())
    some = quantiles_over(torch.tensor([2.0, 5.0]), torch.ones(2).bool())
    assert reduce_metrics({"x": empty, "y": hidden, "n": Sum(3)}) == {"n": 3.0}
    parts = [{"x": part} for part in (empty, some, hidden, neutral_like(some))]
    assert reduce_metrics(add_metrics(parts)) == reduce_metrics({"x": some})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(0, 2**31 - 1))
def test_every_split_gives_the_same_sketch(parts, seed):
    """Any assignment of tokens to microbatches, empty ones included: bit-equal, in any order of adding."""
    value = torch.randn(len(parts), generator=torch.Generator().manual_seed(seed)).exp()
    value[::7] = -value[::7]
    whole = quantiles_over(value, torch.ones_like(value).bool())
    sketches = [quantiles_over(value, torch.tensor(parts) == part) for part in range(4)]
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        total = add_metrics([{"x": sketches[part]} for part in order])["x"]
        assert isinstance(total, Quantiles) and torch.equal(total.counts, whole.counts)
        assert reduce_metrics({"x": total}) == reduce_metrics({"x": whole})


def _rank_quantiles(rank, world_size):
    """Rank 1 has nothing; the order of names differs from rank to rank."""
    value = torch.randn(120, generator=torch.Generator().manual_seed(5))
    owner = torch.arange(120) % world_size
    mask = (owner == rank) if world_size == 1 else (owner == rank) & (rank != 1)
    metrics = {"a": Mean(1, 1), "x": quantiles_over(value, mask), "z": Sum(1)}
    if rank % 2:
        metrics = dict(reversed(metrics.items()))
    with record_collectives() as calls:
        reduced = reduce_metrics(metrics, dist.group.WORLD)
    seen = value[owner != 1] if world_size > 1 else value
    return reduced, reduce_metrics({"x": quantiles_over(seen, torch.ones_like(seen).bool())}), calls


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_agree_in_one_all_reduce(world_size):
    """The sketch rides in the tensor of the sums; an empty rank is neutral; bit-equal to one process."""
    for reduced, whole, calls in run_ranks(_rank_quantiles, world_size):
        assert reduced == {"a": 1.0, **whole, "z": float(world_size)}
        size = 8 * (NUM_COUNTS + 3)
        assert [(call.kind, call.num_bytes) for call in calls] == [("all_reduce", size)] * (world_size > 1)
