"""Packed rows: where every token lies, the round trip, the shift before packing, refusals."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.layout.packing import (
    PackedLayout,
    length_multiples,
    shift_to_predictor,
    shift_to_token,
    unpack_all,
)

IDS = torch.tensor([[11, 12, 13, 0], [21, 0, 0, 0], [31, 32, 33, 34]])
LENGTHS = [3, 1, 4]


def test_a_row_of_three_sequences_by_hand():
    layout = PackedLayout.of_rows(LENGTHS)
    assert layout.pack(IDS, 0).tolist() == [11, 12, 13, 21, 31, 32, 33, 34]
    assert layout.row_t.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert layout.position_t.tolist() == layout.column_t.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert layout.cu_seqlens.tolist() == layout.cu_seqlens_padded.tolist() == [0, 3, 4, 8]
    assert (layout.num_tokens, layout.num_segments, layout.max_seqlen) == (8, 3, 4)


def test_a_row_padded_for_context_and_sequence_parallelism_by_hand():
    """CP 2 pads to multiples of 4. TP 3 needs T / CP to divide by 3: 12 of 4 + 4 + 4 does."""
    layout = PackedLayout.of_rows(LENGTHS, [2, 0, 1], cp_size=2, tp_size=3)
    assert layout.pack(IDS, -7).tolist() == [31, 32, 33, 34, 11, 12, 13, -7, 21, -7, -7, -7]
    assert layout.row_t.tolist() == [2, 2, 2, 2, 0, 0, 0, -1, 1, -1, -1, -1]
    assert layout.segment_t.tolist() == [0, 0, 0, 0, 1, 1, 1, -1, 2, -1, -1, -1]
    assert layout.position_t.tolist() == [0, 1, 2, 3] * 3
    assert layout.cu_seqlens.tolist() == [0, 4, 7, 8]
    assert layout.cu_seqlens_padded.tolist() == [0, 4, 8, 12]
    assert layout.cu_seqlens.dtype == layout.cu_seqlens_padded.dtype == torch.int32


def test_the_row_s_own_padding_goes_to_its_last_sequence():
    """4 + 4 + 4 tokens over CP 2 x TP 4 ranks need 16: the last sequence takes 8."""
    layout = PackedLayout.of_rows(LENGTHS, cp_size=2, tp_size=4)
    assert layout.padded_lengths == (4, 4, 8) and layout.max_seqlen == 8
    assert layout.position_t[8:].tolist() == list(range(8))
    assert layout.real_t.tolist() == [True] * 3 + [False, True] + [False] * 3 + [True] * 4 + [False] * 4


@pytest.mark.parametrize(
    ("cp_size", "tp_size", "expected"),
    [(1, 1, (1, 1)), (1, 4, (1, 4)), (2, 1, (4, 4)), (2, 2, (4, 4)), (3, 1, (6, 6)), (2, 3, (4, 12))],
)
def test_length_multiples(cp_size, tp_size, expected):
    assert length_multiples(cp_size, tp_size) == expected


PROBLEM = {
    "lengths": st.lists(st.integers(1, 20), min_size=1, max_size=8),
    "spare": st.integers(0, 3),
    "cp_size": st.integers(1, 4),
    "tp_size": st.integers(1, 4),
    "num_bins": st.integers(1, 5),
    "seed": st.integers(0, 10_000),
}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(**PROBLEM)
def test_unpack_undoes_pack(lengths, spare, cp_size, tp_size, num_bins, seed):
    """Rows dealt at random over microbatches, some of them empty: real tokens come back to the bit, the rest
    is the fill, and every gradient is 1 for a real token and 0 for padding, which holds NaN."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths) + spare)
    real_sl = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    value = torch.rand(*shape, 2, dtype=torch.float64, generator=generator)
    value = torch.where(real_sl[..., None], value, math.nan).requires_grad_()
    bin_s = torch.randint(0, num_bins, (len(lengths),), generator=generator).tolist()
    bins = [[row for row, chosen in enumerate(bin_s) if chosen == index] for index in range(num_bins)]
    layouts = [PackedLayout.of_rows(lengths, rows, cp_size=cp_size, tp_size=tp_size) for rows in bins]
    for layout in layouts:
        assert layout.num_tokens % (cp_size * tp_size) == 0
        assert all(length % (2 * cp_size if cp_size > 1 else 1) == 0 for length in layout.padded_lengths)
    packed = [layout.pack(value, math.nan) for layout in layouts]
    back = unpack_all(layouts, packed, -1.0, shape)
    assert torch.equal(back, torch.where(real_sl[..., None], value, -1.0))
    (grad,) = torch.autograd.grad(back.sum(), value)
    assert torch.equal(grad, real_sl[..., None].expand_as(grad).double())


@settings(max_examples=100, deadline=None, derandomize=True)
@given(lengths=PROBLEM["lengths"], cp_size=PROBLEM["cp_size"], seed=PROBLEM["seed"])
def test_targets_never_cross_a_boundary(lengths, cp_size, seed):
    """Shifted before packing: position j of a row predicts token j + 1 of its row, the last one the fill.
    A shift of the packed row would give it the next sequence's first token."""
    ids_sl = torch.randint(1, 99, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    target_sl = shift_to_predictor(ids_sl, torch.tensor(lengths), -5)
    assert target_sl.dtype == torch.int64
    layout = PackedLayout.of_rows(lengths, cp_size=cp_size)
    target_t = layout.pack(target_sl, -5)
    for row, column, target in zip(
        layout.row_t.tolist(), layout.column_t.tolist(), target_t.tolist(), strict=True
    ):
        predicts = row >= 0 and column + 1 < lengths[row]
        assert target == (int(ids_sl[row, column + 1]) if predicts else -5)


def test_the_shift_and_its_way_back_by_hand():
    """Junk behind a sequence's end, here 99, reaches neither."""
    value_sl = torch.tensor([[1.0, 2.0, 3.0, 99.0], [4.0, 99.0, 99.0, 99.0]])
    length_s = torch.tensor([3, 1])
    shifted = shift_to_predictor(value_sl, length_s, 0.5)
    assert shifted.tolist() == [[2.0, 3.0, 0.5, 0.5], [0.5] * 4]
    assert shift_to_token(shifted, length_s, 7.0).tolist() == [[7.0, 2.0, 3.0, 7.0], [7.0] * 4]
    flags = torch.tensor([[True, False, True, True]])
    assert shift_to_predictor(flags, torch.tensor([3]), True).tolist() == [[False, True, True, True]]


def test_b45_a_state_that_is_a_running_sum_restarts_at_each_sequence():
    """A = [1, 2], B = [3, 4]: states 1 3 | 3 7, positions 0 1 | 0 1. Across the boundary it would be 6 10."""
    layout = PackedLayout.of_rows([2, 2])
    ids_t = layout.pack(torch.tensor([[1, 2], [3, 4]]), 0)
    starts = layout.cu_seqlens_padded.tolist()
    state = [ids_t[a:b].cumsum(0) for a, b in itertools.pairwise(starts)]
    assert torch.cat(state).tolist() == [1, 3, 3, 7]
    assert layout.position_t.tolist() == [0, 1, 0, 1]


def test_a_filler_holds_no_token_of_the_batch():
    layout = PackedLayout.of_rows(LENGTHS, [], cp_size=2, tp_size=4)
    assert layout.rows == (-1,) and layout.num_tokens == 8
    assert not layout.real_t.any() and set(layout.segment_t.tolist()) == {-1}
    assert layout.pack(torch.ones(3, 4).bool(), False).tolist() == [False] * 8
    out = layout.unpack(torch.full((8,), math.nan), 0.25, (3, 4))
    assert torch.equal(out, torch.full((3, 4), 0.25))


def test_foreign_boundaries_give_the_layout_they_describe():
    ours = PackedLayout.of_rows(LENGTHS, cp_size=2, tp_size=4)
    for padded in (None, ours.cu_seqlens_padded, [0, 4, 8, 16]):
        theirs = PackedLayout.from_cu_seqlens(ours.cu_seqlens, padded, cp_size=2, tp_size=4)
        assert theirs.padded_lengths == ours.padded_lengths and theirs.lengths == ours.lengths
        assert torch.equal(theirs.row_t, ours.row_t) and torch.equal(theirs.position_t, ours.position_t)
    roomy = PackedLayout.from_cu_seqlens([0, 2, 3], [0, 5, 7])
    assert roomy.row_t.tolist() == [0, 0, -1, -1, -1, 1, -1]


@pytest.mark.parametrize(
    ("boundaries", "padded", "sizes", "message"),
    [
        ([0, 4, 3], None, {}, "cu_seqlens goes from 4 to 3 at sequence 1"),
        ([0, 4, 4], None, {}, "cu_seqlens goes from 4 to 4 at sequence 1"),
        ([1, 4], None, {}, r"cu_seqlens=\[1, 4\]: expected 0"),
        ([0], None, {}, r"cu_seqlens=\[0\]: expected 0"),
        ([0, 4, 6], [0, 4, 5], {}, "sequence 1 has 2 tokens in 1 positions"),
        ([0, 4, 6], [0, 6], {}, "cu_seqlens has 2 sequences, cu_seqlens_padded 1"),
        ([0, 3], [0, 6], {"cp_size": 2}, "for cp_size=2, a multiple of 4. Pad it to 4"),
        (
            [0, 3],
            [0, 4],
            {"cp_size": 2, "tp_size": 4},
            "4 positions do not divide over cp_size=2 x tp_size=4",
        ),
        ([0, 3], None, {"cp_size": 0}, "cp_size=0, tp_size=1"),
    ],
)
def test_boundaries_that_contradict_themselves_are_refused(boundaries, padded, sizes, message):
    with pytest.raises(ValueError, match=message):
        PackedLayout.from_cu_seqlens(boundaries, padded, **sizes)


def test_rows_and_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="sequence 1 has 0 tokens: expected at least 1"):
        PackedLayout.of_rows([3, 0])
    with pytest.raises(ValueError, match=r"rows \[0, 3\] of a batch of 3 sequences"):
        PackedLayout.of_rows(LENGTHS, [0, 3])
    with pytest.raises(ValueError, match=r"rows \[1, 1\]"):
        PackedLayout.of_rows(LENGTHS, [1, 1])
    layout = PackedLayout.of_rows(LENGTHS)
    for shape in ((3, 3), (2, 4)):
        with pytest.raises(ValueError, match="holds rows up to 2 and 4 tokens of a row"):
            layout.pack(torch.zeros(shape), 0.0)
        with pytest.raises(ValueError, match="holds rows up to 2 and 4 tokens of a row"):
            layout.unpack(torch.zeros(8), 0.0, shape)
    with pytest.raises(ValueError, match="this layout holds 8 tokens"):
        layout.unpack(torch.zeros(7), 0.0, (3, 4))
    with pytest.raises(ValueError, match=r"rows \[0, 1, 2\] and 1 values: .*every row from 0 to 3"):
        unpack_all([layout], [torch.zeros(8)], 0.0, (4, 4))
