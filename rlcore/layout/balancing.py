"""Which sequences share a microbatch: as few packed rows as a token budget allows, of about equal size.

Packing into bins: best-fit decreasing, then the smallest budget that needs no more bins (multifit: Coffman,
Garey and Johnson, 1978), and longest-processing-time (Graham, 1969) where that is better.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch

from rlcore.collectives import Group, all_reduce_
from rlcore.layout.packing import length_multiples

# Halvings of the range between the mean load and the budget. 16 leave 1/65,536 of it.
MULTIFIT_STEPS = 16


def balance(
    length_s: Sequence[int] | torch.Tensor,
    token_budget: int,
    num_bins: int | None = None,
    *,
    cp_size: int = 1,
    tp_size: int = 1,
) -> list[list[int]]:
    """Bins of row numbers, each row once; every bin's padded T is at most `token_budget`.

    `num_bins` None: as few bins as best-fit decreasing finds. A number: exactly so many, the rows spread over
    them; the last ones are empty when there are fewer rows than bins. Rows rise within a bin. The same
    lengths give the same bins on every rank. `length_s` is on the host; `tp_size` as in `PackedLayout`.

    `ValueError` for a row without tokens, one that does not fit the budget, and too few bins.
    """
    padded, capacity = _padded_and_capacity(length_s, token_budget, cp_size, tp_size)
    check_fits(length_s, token_budget, cp_size=cp_size, tp_size=tp_size)
    order = sorted(range(len(padded)), key=lambda row: (-padded[row], row))
    fewest = _best_fit(order, padded, capacity)
    wanted = len(fewest) if num_bins is None else num_bins
    if wanted < len(fewest):
        raise ValueError(
            f"{len(padded)} sequences of {sum(padded)} tokens need {len(fewest)} microbatches of "
            f"{token_budget} tokens; num_bins={wanted} is too few. Raise the token budget or num_bins."
        )
    candidates = [_spread(order, padded, wanted), _multifit(order, padded, wanted, capacity)]
    fitting = [bins for bins in candidates if _largest(bins, padded) <= capacity]
    best = min(fitting, key=lambda bins: _largest(bins, padded))
    return [sorted(rows) for rows in best] + [[] for _ in range(wanted - len(best))]


def check_fits(
    length_s: Sequence[int] | torch.Tensor, token_budget: int, *, cp_size: int = 1, tp_size: int = 1
) -> None:
    """`ValueError` naming the first row without tokens, or that does not fit the budget. As `balance`, which
    calls it.
    """
    padded, capacity = _padded_and_capacity(length_s, token_budget, cp_size, tp_size)
    for row, length in enumerate(length_s):
        if int(length) < 1:
            raise ValueError(f"sequence {row} has {int(length)} tokens: expected at least 1. Leave it out.")
        if padded[row] > capacity:
            total_multiple = length_multiples(cp_size, tp_size)[1]
            raise ValueError(
                f"sequence {row} has {int(length)} tokens, {padded[row]} with padding: "
                f"train.token_budget={token_budget} holds rows of at most {capacity}. Raise the token budget "
                f"to at least {-(-padded[row] // total_multiple) * total_multiple}, or shorten "
                "rollout.max_new_tokens."
            )


def plan_microbatches(
    length_s: Sequence[int] | torch.Tensor,
    token_budget: int,
    dp_group: Group,
    *,
    cp_size: int = 1,
    tp_size: int = 1,
    count_multiple: int = 1,
    device: torch.device | str = "cpu",
) -> list[list[int]]:
    """This data-parallel rank's `balance`d bins, equally many on every rank of the group: a multiple of
    `count_multiple`.

    A rank that needs fewer spreads its sequences; one with fewer sequences than bins has empty bins, each of
    which becomes a filler (`PackedLayout.of_rows(length_s, [])`).

    Collectives: one all-reduce (max) of two int64 over `dp_group`, entered whatever this rank's data.
    Raises `balance`'s `ValueError` on the rank that has it and a `ValueError` on all others.
    """
    bins, error = None, None
    try:
        bins = balance(length_s, token_budget, cp_size=cp_size, tp_size=tp_size)
    except ValueError as failure:
        error = failure
    mine = [0 if bins is None else len(bins), int(error is not None)]
    num_bins, failed = all_reduce_(torch.tensor(mine, device=device), "max", dp_group).tolist()
    if error is not None:
        raise error
    if failed or bins is None:
        raise ValueError(
            "another data-parallel rank has a sequence without tokens, or one that does not fit "
            f"train.token_budget={token_budget}; its own error names it."
        )
    num_bins = -(-num_bins // count_multiple) * count_multiple
    if num_bins == len(bins):
        return bins
    return balance(length_s, token_budget, num_bins, cp_size=cp_size, tp_size=tp_size)


def _padded_and_capacity(
    length_s: Sequence[int] | torch.Tensor, token_budget: int, cp_size: int, tp_size: int
) -> tuple[list[int], int]:
    """Padded length of every row, and what a bin holds: a row's T is rounded up to the multiple, and below
    this load that never passes the budget.
    """
    multiple, total_multiple = length_multiples(cp_size, tp_size)
    padded = [-(-int(length) // multiple) * multiple for length in length_s]
    return padded, token_budget // total_multiple * total_multiple


def _best_fit(order: Sequence[int], padded: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing: each row goes where the least room is left after it, else into a new bin."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (room left, bin), rising
    for row in order:
        place = bisect.bisect_left(room, (padded[row], -1))
        if place == len(room):
            bins.append([row])
            left, index = capacity, len(bins) - 1
        else:
            left, index = room.pop(place)
            bins[index].append(row)
        bisect.insort(room, (left - padded[row], index))
    return bins


def _spread(order: Sequence[int], padded: Sequence[int], num_bins: int) -> list[list[int]]:
    """Longest first, each into the bin with the fewest tokens; the budget is not looked at."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    load = [(0, index) for index in range(num_bins)]
    for row in order:
        tokens, index = load.pop(0)
        bins[index].append(row)
        bisect.insort(load, (tokens + padded[row], index))
    return [rows for rows in bins if rows]


def _multifit(order: Sequence[int], padded: Sequence[int], num_bins: int, capacity: int) -> list[list[int]]:
    """The bins of the smallest capacity found for which best-fit decreasing needs no more than `num_bins`."""
    best = _best_fit(order, padded, capacity)
    if not order:
        return best
    low, high = max(padded[order[0]], -(-sum(padded) // num_bins)), _largest(best, padded)
    for _ in range(MULTIFIT_STEPS):
        if low >= high:
            break
        middle = (low + high) // 2
        bins = _best_fit(order, padded, middle)
        if len(bins) <= num_bins:
            best, high = bins, min(middle, _largest(bins, padded))
        else:
            low = middle + 1
    return best


def _largest(bins: Sequence[Sequence[int]], padded: Sequence[int]) -> int:
    return max((sum(padded[row] for row in rows) for rows in bins), default=0)
