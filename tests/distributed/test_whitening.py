"""Whitening over context- and data-parallel ranks against the whole, and against CASES B40."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from rlcore.advantages import reinforce_pp_advantages
from rlcore.collectives import record_collectives
from rlcore.whitening import whiten
from tests.rank_pool import run_ranks

pytestmark = pytest.mark.distributed

VALUES = [1.0, 2.0, 3.0, 10.0]
# Two context-parallel ranks, one sequence of four tokens, zigzag.
OWNED = {0: [0, 3], 1: [1, 2]}


def _zigzag(rank, world_size, values, mask):
    own = OWNED[rank] if world_size == 2 else range(4)
    value_t = torch.tensor(values)[list(own)]
    mask_t = torch.tensor(mask).bool()[list(own)]
    with record_collectives() as calls:
        whitened_t = whiten(value_t, mask_t, dist.group.WORLD)
    return whitened_t.tolist(), [(call.kind, call.num_bytes) for call in calls]


def whole(results):
    """The ranks' slices in the order of the sequence."""
    if len(results) == 1:
        return results[0][0]
    out = [0.0] * 4
    for rank, (slice_t, _) in enumerate(results):
        for position, value in zip(OWNED[rank], slice_t, strict=True):
            out[position] = value
    return out


@pytest.mark.parametrize("world_size", [1, 2])
def test_b40_a_sequence_cut_by_context_parallelism(world_size):
    """Each rank on its own slice would give -0.707107 and 0.707107."""
    results = run_ranks(_zigzag, world_size, VALUES, [1, 1, 1, 1])
    assert whole(results) == pytest.approx([-0.734847, -0.489898, -0.244949, 1.469694], abs=1e-6)
    assert all(calls == [("all_gather", 24)] * (world_size - 1) for _, calls in results)


@pytest.mark.parametrize("garbage", [2.0, math.nan, math.inf])
def test_b40_an_empty_rank_enters_the_collective_and_is_neutral(garbage):
    """1 and 10: mean 5.5, deviation 6.363961. Rank 1 holds nothing that counts."""
    results = run_ranks(_zigzag, 2, [1.0, garbage, garbage, 10.0], [1, 0, 0, 1])
    assert whole(results) == pytest.approx([-0.707107, 0.0, 0.0, 0.707107], abs=1e-6)
    assert results[0][1] == results[1][1] == [("all_gather", 24)]


def test_nothing_one_and_all_equal_are_zero():
    """0.9 on every rank is 0 exactly: sums of squares would leave a residue that the division blows up."""
    for values, mask in (
        (VALUES, [0, 0, 0, 0]),
        (VALUES, [0, 1, 0, 0]),
        ([0.9] * 4, [1, 1, 1, 1]),
        ([0.9, 7.0, 0.9, 0.9], [1, 0, 1, 1]),
    ):
        assert whole(run_ranks(_zigzag, 2, values, mask)) == [0.0] * 4


def _equal(rank, world_size, value, num_per_rank):
    value_t = torch.full((num_per_rank[rank],), value, dtype=torch.float64)
    return whiten(value_t, torch.ones_like(value_t).bool(), dist.group.WORLD).tolist()


@pytest.mark.parametrize("num_per_rank", [[7, 0], [0, 7], [3, 4], [11, 6]])
@pytest.mark.parametrize("value", [0.9, 0.69, -7.1, 1e20])
def test_equal_values_are_exactly_zero_whatever_each_rank_holds(value, num_per_rank):
    """A mean of seven 0.69 misses it by a rounding; an empty rank's 0 must not count as a value."""
    for whitened in run_ranks(_equal, 2, value, num_per_rank):
        assert whitened == [0.0] * len(whitened)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_value_that_is_not_finite_raises_on_every_rank(bad):
    """Nobody is left waiting: the moments carry the news."""
    results = run_ranks(_raises, 2, [1.0, bad, 3.0, 10.0])
    assert all("rank 1 of 2 is NaN" in message for message in results)


def _raises(rank, world_size, values):
    try:
        _zigzag(rank, world_size, values, [1, 1, 1, 1])
    except ValueError as error:
        return str(error)
    return ""


def test_a_large_offset_does_not_cancel():
    """1e8 + [0, 1, 2, 3]: deviation 1.290994; E[x^2] - E[x]^2 in float64 keeps one digit of it."""
    values = [1e8 + i for i in range(4)]
    value_t = torch.tensor(values, dtype=torch.float64)
    got = whiten(value_t, torch.ones(4).bool()).tolist()
    assert got == pytest.approx([-1.161895, -0.387298, 0.387298, 1.161895], abs=1e-6)


def _reinforce(rank, world_size, counts):
    """Eight samples of ragged length; rank r takes every world_size-th one."""
    generator = torch.Generator().manual_seed(3)
    reward_s = torch.randn(8, generator=generator, dtype=torch.float64) * 5 + 100
    length_s = torch.randint(1, 6, (8,), generator=generator)
    mask_sl = torch.arange(6) < length_s[:, None]
    counts_s = torch.tensor(counts).bool()
    rows = torch.arange(rank, 8, world_size)
    own_sl = reinforce_pp_advantages(reward_s[rows], mask_sl[rows], counts_s[rows], dist.group.WORLD)
    counted_sl = mask_sl & counts_s[:, None]
    token_t = reward_s[:, None].expand(8, 6)[counted_sl]
    whitened_s = (reward_s - token_t.mean()) / token_t.std()
    expected_sl = torch.where(counted_sl, whitened_s[:, None], 0.0)[rows].float()
    torch.testing.assert_close(own_sl, expected_sl, rtol=1e-6, atol=1e-6)
    return int(counted_sl[rows].sum())


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_reinforce_pp_is_that_of_the_whole_batch(world_size):
    counts = [1, 1, 0, 0, 1, 1, 1, 0]  # at 4: rank 3 has no sample that counts
    counted = run_ranks(_reinforce, world_size, counts)
    assert world_size < 4 or counted[3] == 0
