"""Bins under a token budget: every row once, never over the budget, few and of about equal size."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.layout.balancing import balance
from rlcore.layout.packing import PackedLayout, length_multiples


def loads(bins, lengths):
    return sorted(sum(lengths[row] for row in rows) for rows in bins)


def test_two_bins_where_longest_first_into_the_emptiest_needs_three():
    """Budget 6: 3 3 | 2 2 2. Longest first into the emptiest bin gives 3 2 2 | 3 2, which is over it."""
    assert sorted(balance([2, 3, 2, 3, 2], 6)) == [[0, 2, 4], [1, 3]]


def test_two_bins_are_of_about_equal_size():
    """Budget 10: best fit alone fills one bin, 6 4 | 1 1 1."""
    lengths = [6, 4, 1, 1, 1]
    assert loads(balance(lengths, 10), lengths) == [6, 7]


def test_more_bins_than_needed_are_spread_evenly():
    assert loads(balance([5, 4, 3, 2, 1, 1], 100, 4), [5, 4, 3, 2, 1, 1]) == [3, 4, 4, 5]
    assert balance([2, 2, 2], 8, 3) == [[0], [1], [2]]
    assert balance([2, 2], 8, 4) == [[0], [1], [], []]
    assert balance([], 8, 2) == [[], []] and balance([], 8) == []


def test_the_budget_counts_padding():
    """CP 2: rows of 1 token take 4. Three fit a budget of 12 and of 15, two a budget of 11."""
    assert [len(rows) for rows in balance([1, 1, 1], 15, cp_size=2)] == [3]
    assert sorted(len(rows) for rows in balance([1, 1, 1], 11, cp_size=2)) == [1, 2]
    # TP 4 rounds the row of 9 up to 12.
    assert len(balance([5, 4], 11, tp_size=4)) == 2 and len(balance([5, 4], 12, tp_size=4)) == 1


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 40), max_size=12),
    slack=st.integers(0, 60),
    extra=st.integers(0, 4),
    cp_size=st.integers(1, 3),
    tp_size=st.integers(1, 3),
)
def test_every_row_once_within_the_budget_and_near_the_fewest(lengths, slack, extra, cp_size, tp_size):
    multiple, total_multiple = length_multiples(cp_size, tp_size)
    padded = [-(-length // multiple) * multiple for length in lengths]
    budget = -(-max(padded, default=1) // total_multiple) * total_multiple + slack
    bins = balance(lengths, budget, cp_size=cp_size, tp_size=tp_size)
    bound = sum(padded) / (budget // total_multiple * total_multiple)
    assert all(bins) and len(bins) <= 11 / 9 * max(bound, fewest(padded, budget, total_multiple)) + 6 / 9
    more = balance(lengths, budget, len(bins) + extra, cp_size=cp_size, tp_size=tp_size)
    assert len(more) == len(bins) + extra
    for chosen in (bins, more):
        assert sorted(itertools.chain.from_iterable(chosen)) == list(range(len(lengths)))
        assert all(rows == sorted(rows) for rows in chosen)
        for rows in chosen:
            layout = PackedLayout.of_rows(lengths, rows, cp_size=cp_size, tp_size=tp_size)
            assert not rows or layout.num_tokens <= budget
    if bins:
        spread = loads(bins, padded)
        assert spread[-1] <= max(2 * sum(padded) / len(bins), max(padded))


def fewest(padded, budget, total_multiple):
    """The true minimum by exhaustive search with pruning, for the few rows of the test above."""
    capacity, best = budget // total_multiple * total_multiple, len(padded)
    rows = sorted(padded, reverse=True)

    def place(index, free):
        nonlocal best
        if len(free) >= best:
            return
        if index == len(rows):
            best = len(free)
            return
        for room in set(free):
            if room >= rows[index]:
                rest = list(free)
                rest.remove(room)
                place(index + 1, [*rest, room - rows[index]])
        place(index + 1, [*free, capacity - rows[index]])

    place(0, [])
    return best


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"sequence 1 has 9 tokens, 12 with padding: train.token_budget=10"):
        balance([3, 9], 10, cp_size=2)
    with pytest.raises(ValueError, match=r"Raise the token budget to at least 12"):
        balance([3, 9], 10, cp_size=2)
    with pytest.raises(ValueError, match="sequence 0 has 0 tokens"):
        balance([0, 2], 10)
    with pytest.raises(ValueError, match=r"10 tokens need 2 microbatches of 6 tokens; num_bins=1 is too few"):
        balance([5, 5], 6, 1)
