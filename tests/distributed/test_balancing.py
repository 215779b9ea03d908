"""B47: data-parallel ranks with different data run equally many microbatches, and fillers train nothing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rlcore.collectives import all_reduce_, record_collectives
from rlcore.layout.balancing import plan_microbatches
from rlcore.layout.packing import PackedLayout, unpack_all
from tests.rank_pool import run_ranks

pytestmark = pytest.mark.distributed

BUDGET = 8
# The three samples of 5 tokens against three of 2; against one of 6; against no sample at all.
CASES = {
    "three_of_two": ([[5, 5, 5], [2, 2, 2]], [[1.0, 1.0, 1.0], [1.0, 4.0, 7.0]]),
    "one_of_six": ([[5, 5, 5], [6]], [[1.0, 1.0, 1.0], [4.0]]),
    "none": ([[5, 5, 5], []], [[1.0, 1.0, 1.0], []]),
}


def _train(rank, world_size, case, cp_size):
    """One step: token losses summed over this rank's microbatches, divided by the count of all ranks."""
    lengths, losses = (values[rank] for values in CASES[case])
    shape = (len(lengths), max(lengths, default=1) + 1)
    loss_sl = torch.tensor(losses, dtype=torch.float64).reshape(-1, 1).expand(shape)
    mask_sl = torch.arange(shape[1]) < torch.tensor(lengths, dtype=torch.int64).reshape(-1, 1)
    group_sl = (100 + torch.arange(shape[0])).reshape(-1, 1).expand(shape)
    with record_collectives() as calls:
        bins = plan_microbatches(lengths, BUDGET, dist.group.WORLD, cp_size=cp_size)
        planning = [(call.kind, call.num_bytes) for call in calls]
    layouts = [PackedLayout.of_rows(lengths, rows, cp_size=cp_size) for rows in bins]
    sums, outputs, fillers = torch.zeros(2, dtype=torch.float64), [], []
    for layout, rows in zip(layouts, bins, strict=True):
        mask_t = layout.pack(mask_sl, False)
        # Filler and padding hold junk: only the mask keeps it out.
        loss_t = layout.pack(loss_sl, 1e6)
        sums += torch.stack([torch.where(mask_t, loss_t, 0.0).sum(), mask_t.sum()])
        outputs.append(loss_t * 10)
        if not rows:
            fillers.append((int(mask_t.sum()), set(layout.pack(group_sl, -1).tolist()), layout.rows))
    all_reduce_(sums, "sum", dist.group.WORLD)
    joined = unpack_all(layouts, outputs, 0.0, shape)
    expected = torch.where(mask_sl, loss_sl * 10, 0.0)
    return (
        len(bins),
        float(sums[0] / sums[1]),
        float(sums[1]),
        fillers,
        torch.equal(joined, expected),
        planning,
    )


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize(
    ("case", "value", "count", "num_fillers"),
    [("three_of_two", 39 / 21, 21, 0), ("one_of_six", 39 / 21, 21, 2), ("none", 1.0, 15, 3)],
)
def test_b47_ranks_run_equally_many_microbatches(case, value, count, num_fillers, cp_size):
    """1.857143. A filler that repeats a real sample twice would give 43/25 = 1.72 or 63/33."""
    results = run_ranks(_train, 2, case, cp_size)
    for num_microbatches, loss, num_tokens, fillers, in_order, planning in results:
        assert num_microbatches == 3 and num_tokens == count
        assert loss == pytest.approx(value, abs=1e-12)
        assert in_order
        assert planning == [("all_reduce", 16)]
        assert all(filler == (0, {-1}, (-1,)) for filler in fillers)
    assert [len(result[3]) for result in results] == [0, num_fillers]


def _plan_in_groups(rank, world_size, multiple):
    lengths = [[5, 5, 5], [2, 2, 2]][rank]
    return plan_microbatches(lengths, BUDGET, dist.group.WORLD, count_multiple=multiple)


def test_the_count_is_raised_to_a_multiple_on_every_rank():
    """Three microbatches become four; no row is lost or repeated, and what is missing is a filler."""
    for bins in run_ranks(_plan_in_groups, 2, 4):
        assert len(bins) == 4 and sorted(row for rows in bins for row in rows) == [0, 1, 2]
    assert [len(bins) for bins in run_ranks(_plan_in_groups, 2, 3)] == [3, 3]


def _too_long(rank, world_size):
    with pytest.raises(ValueError) as caught:
        plan_microbatches([[4, 9], [4, 4]][rank], BUDGET, dist.group.WORLD)
    return str(caught.value)


def test_a_sequence_over_the_budget_on_one_rank_stops_all():
    own, other = run_ranks(_too_long, 2)
    assert "sequence 1 has 9 tokens" in own and "train.token_budget=8" in own
    assert "another data-parallel rank" in other and "train.token_budget=8" in other
