"""Gathering what CP ranks computed: packed order, gradients counted once, groups that start anywhere."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rlcore.collectives import record_collectives
from rlcore.layout.context_parallel import ZigZag
from tests.rank_pool import run_ranks

pytestmark = pytest.mark.distributed

_groups: dict[str, object] = {}


def _cp_group(world_size, layout):
    """All ranks, or (pairs) ranks 0 1 and 2 3, or (strided) 0 2 and 1 3: the last two include groups that do
    not start at global rank 0. Made once a process."""
    if layout == "world":
        return dist.group.WORLD
    if layout not in _groups:
        pairs = [[0, 1], [2, 3]] if layout == "pairs" else [[0, 2], [1, 3]]
        for ranks in pairs:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                _groups[layout] = group
    return _groups[layout]


def _b43(rank, world_size, group_layout):
    group = _cp_group(world_size, group_layout)
    cp_size = dist.get_world_size(group)
    layout = ZigZag.of_lengths([8], cp_size)
    whole_t = -0.1 * (torch.arange(8, dtype=torch.float64) + 1)
    own_t = layout.split(whole_t, group).requires_grad_()
    with record_collectives() as calls:
        joined_t = layout.gather(own_t, group)
        forward = [(call.kind, call.group_size, call.num_bytes) for call in calls]
        total = joined_t[[3, 4]].sum()
        (grad_t,) = torch.autograd.grad(total, own_t)
        backward = len(calls) - len(forward)
    return dist.get_rank(group), float(total), grad_t.tolist(), forward, backward


@pytest.mark.parametrize(("world_size", "groups"), [(2, "world"), (4, "pairs"), (4, "strided")])
def test_b43_masked_sum_and_gradient(world_size, groups):
    """Positions 3 and 4 of 8 are rank 1's: -0.9, gradient 1 there and 0 on rank 0. Rank order gives -1.1; a
    gradient summed over ranks gives 2."""
    for cp_rank, total, grad, forward, backward in run_ranks(_b43, world_size, groups):
        assert total == pytest.approx(-0.9, abs=1e-12)
        assert grad == ([0.0, 1.0, 1.0, 0.0] if cp_rank == 1 else [0.0] * 4)
        assert forward == [("all_gather", 2, 32)] and backward == 0


LENGTHS = [24, 8, 16]


def _problem(dtype):
    generator = torch.Generator().manual_seed(2)
    value = torch.randn(sum(LENGTHS), 3, 2, dtype=torch.float64, generator=generator).to(dtype)
    weight = torch.randn(4, sum(LENGTHS), 3, 2, dtype=torch.float64, generator=generator).to(dtype)
    return value, weight


def _gather(rank, world_size, name):
    """Each rank weighs the gathered tensor by weights of its own."""
    group = dist.group.WORLD
    layout = ZigZag.of_lengths(LENGTHS, world_size)
    value, weight = _problem(torch.float64)
    own = layout.split(value, group).requires_grad_()
    with record_collectives() as calls:
        joined = getattr(layout, name)(own, group)
        (grad,) = torch.autograd.grad((joined * weight[rank]).sum(), own)
    return joined.detach(), grad, [(call.kind, call.num_bytes) for call in calls]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gather_takes_the_own_part_and_gather_summed_everybody_s(world_size):
    value, weight = _problem(torch.float64)
    layout = ZigZag.of_lengths(LENGTHS, world_size)
    own_bytes = value.numel() * 8 // world_size
    for rank, (joined, grad, calls) in enumerate(run_ranks(_gather, world_size, "gather")):
        assert torch.equal(joined, value)
        assert torch.equal(grad, weight[rank][layout.owned_rt[rank]])
        assert calls == ([("all_gather", own_bytes)] if world_size > 1 else [])
    summed = weight[:world_size].sum(0)
    for rank, (joined, grad, calls) in enumerate(run_ranks(_gather, world_size, "gather_summed")):
        assert torch.equal(joined, value)
        torch.testing.assert_close(grad, summed[layout.owned_rt[rank]], rtol=0, atol=1e-12)
        both = [("all_gather", own_bytes), ("reduce_scatter", own_bytes * world_size)]
        assert calls == (both if world_size > 1 else [])


def _split(rank, world_size):
    """Integers, bools and half precision travel too; the gradient of the split is this rank's part."""
    group = dist.group.WORLD
    layout = ZigZag.of_lengths(LENGTHS, world_size)
    seen = []
    for dtype in (torch.int64, torch.bool, torch.bfloat16):
        value_t = (torch.arange(sum(LENGTHS)) % 7 * 3 % 5).to(dtype)
        seen.append(torch.equal(layout.gather(layout.split(value_t, group), group), value_t))
    whole = torch.zeros(sum(LENGTHS), dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(layout.split(whole, group).sum(), whole)
    return seen, grad


@pytest.mark.parametrize("world_size", [2, 4])
def test_split_and_gather_of_every_dtype(world_size):
    results = run_ranks(_split, world_size)
    assert all(seen == [True] * 3 for seen, _ in results)
    assert torch.equal(sum(grad for _, grad in results), torch.ones(sum(LENGTHS), dtype=torch.float64))
    assert [int(grad.sum()) for _, grad in results] == [sum(LENGTHS) // world_size] * world_size


def _wrong(rank, world_size):
    layout = ZigZag.of_lengths([8], 4)
    with pytest.raises(ValueError) as caught:
        layout.gather(torch.zeros(2), dist.group.WORLD)
    return str(caught.value)


def test_a_layout_for_another_number_of_ranks_is_refused():
    for message in run_ranks(_wrong, 2):
        assert "cuts over cp_size=4 ranks, the group has 2" in message
