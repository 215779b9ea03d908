"""Who owns which packed position under zig-zag context parallelism."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.layout.context_parallel import ZigZag, owned_positions


def test_b43_the_owner_map():
    assert ZigZag.of_lengths([8], 2).owned_rt.tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert ZigZag.of_lengths([12], 3).owned_rt.tolist() == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


def test_each_sequence_is_cut_by_itself():
    """8 tokens, then 4: the row of 12 cut as one sequence would give rank 0 positions 0 1 2 and 9 10 11."""
    layout = ZigZag.of_lengths([8, 4], 2)
    assert layout.owned_rt.tolist() == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    assert layout.origin_t.tolist() == [0, 1, 6, 7, 8, 9, 2, 3, 4, 10, 11, 5]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(chunks=st.lists(st.integers(1, 5), min_size=1, max_size=6), cp_size=st.integers(1, 5))
def test_every_position_has_one_owner_and_work_is_equal(chunks, cp_size):
    """A causal query at position p of its sequence reads p + 1 keys: every rank reads equally many."""
    lengths = [chunk * 2 * cp_size for chunk in chunks]
    layout = ZigZag.of_lengths(lengths, cp_size)
    joined = layout.owned_rt.reshape(-1)
    assert torch.equal(joined.sort().values, torch.arange(sum(lengths)))
    assert torch.equal(joined[layout.origin_t], torch.arange(sum(lengths)))
    position_t = torch.cat([torch.arange(length) for length in lengths])
    assert len({int((position_t[owned] + 1).sum()) for owned in layout.owned_rt}) == 1


def test_one_rank_holds_everything_and_needs_no_padding():
    layout = ZigZag.of_lengths([3, 2], 1)
    value_t = torch.arange(5.0)
    assert layout.owned_rt.tolist() == [[0, 1, 2, 3, 4]]
    assert layout.split(value_t, None) is value_t
    assert layout.gather(value_t, None) is value_t


def test_what_does_not_divide_is_refused():
    with pytest.raises(
        ValueError, match=r"sequence 1 has 6 tokens: cp_size=2 needs a multiple of 4\. Pad it to 8"
    ):
        owned_positions([4, 6], 2, 0)
    layout = ZigZag.of_lengths([8], 2)
    with pytest.raises(ValueError, match="cuts over cp_size=2 ranks, the group has 1"):
        layout.split(torch.zeros(8), None)
    with pytest.raises(ValueError, match="expected 5 tokens of 5 over cp_size=1"):
        ZigZag.of_lengths([5], 1).gather(torch.zeros(6), None)
