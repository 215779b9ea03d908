"""A real GPTModel on packed rows: logits of every real token and gradients of every parameter equal those of
padded rows under Megatron's own attention, under context, tensor, sequence, pipeline and data parallelism."""

from __future__ import annotations

import pytest
import torch

from tests.megatron.layout_cases import assert_same
from tests.megatron.packing_cases import BINS, LENGTHS, SHAPE, make_ids, packed_step, padded_step
from tests.rank_pool import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]

REAL = torch.arange(SHAPE[1]) < torch.tensor(LENGTHS)[:, None]

# name -> (world size, parallel config, CP)
LAYOUTS = {
    "one": (1, {}, 1),
    "cp2": (2, {}, 2),
    "tp2+sp": (2, {"tp": 2, "sequence_parallel": True}, 1),
    "tp2+sp+cp2": (4, {"tp": 2, "sequence_parallel": True}, 2),
    "pp2+cp2": (4, {"pp": 2}, 2),
    "dp2+cp2": (4, {}, 2),
    "cp4": (4, {}, 4),
}


@pytest.fixture(scope="module")
def expected():
    """Padded rows under Megatron's own core attention."""
    return run_ranks(padded_step, 1, {}, 1, False)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_rows_equal_padded_rows(layout, expected):
    """Logits to 1e-5 and gradients, summed over CP, to 1e-5 of the largest entry."""
    world_size, parallel, cp_size = LAYOUTS[layout]
    logits, gradients = expected
    seen = torch.zeros(SHAPE).bool()
    for ours, own_gradients in run_ranks(packed_step, world_size, parallel, cp_size):
        assert_same(own_gradients, gradients, layout)
        if ours is not None:
            held = ~torch.isnan(ours).any(-1)
            assert not (held & ~REAL).any()
            torch.testing.assert_close(ours[held], logits[held], rtol=0, atol=1e-5)
            seen |= held
    assert torch.equal(seen, REAL)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_padded_rows_under_our_attention_equal_megatron_s(cp_size, expected):
    logits, gradients = expected
    for ours, own_gradients in run_ranks(padded_step, cp_size, {}, cp_size, True):
        torch.testing.assert_close(ours[REAL], logits[REAL], rtol=0, atol=1e-5)
        assert_same(own_gradients, gradients, cp_size)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_b45_a_sequence_does_not_see_its_neighbours(cp_size):
    """B (row 2) alone, after A (row 0), and after A' (other ids): equal to 1e-5, while A's logits move."""
    ids, other = make_ids(), make_ids()
    other[0] = (other[0] + 1) % 13
    runs = [
        run_ranks(packed_step, cp_size, {}, cp_size, bins, ids_sl)[0][0]
        for bins, ids_sl in (([[2]], ids), ([[0, 2]], ids), ([[0, 2]], other))
    ]
    own = slice(0, LENGTHS[2])
    for logits in runs[1:]:
        torch.testing.assert_close(logits[2, own], runs[0][2, own], rtol=0, atol=1e-5)
    moved = (runs[1] - runs[2])[0, : LENGTHS[0]].abs().amax(-1)
    assert bool((moved > 1e-3).all())


def test_the_batch_has_what_the_layouts_could_get_wrong():
    """Two microbatches of different T, rows out of order, a row of one token, padding inside sequences."""
    assert [row for rows in BINS for row in rows] != sorted(row for rows in BINS for row in rows)
    totals = {cp: [sum(-(-LENGTHS[r] // (2 * cp)) * 2 * cp for r in rows) for rows in BINS] for cp in (2, 4)}
    assert totals == {2: [40, 16], 4: [48, 24]} and min(LENGTHS) == 1
