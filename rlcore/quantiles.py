"""A mergeable quantile sketch: counts over log-spaced buckets of both signs. Merging is adding the counts.

Error bound: each order statistic x is read back within `RELATIVE_ERROR` * |x| where `SMALLEST` <= |x| <=
`LARGEST`, and within `SMALLEST` below; beyond `LARGEST` (inf included) it reads as about `LARGEST` with x's
sign. A quantile between two order statistics is interpolated linearly between what they read as, so it is off
by at most the same interpolation of their two errors. Counts are whole numbers in float64, so every way of
cutting the values into parts gives the same sketch, bit for bit.
Source: Masson, Rim, Lee 2019 (DDSketch), with buckets fixed beforehand so that it travels in one all-reduce.
"""

from __future__ import annotations

import math

import torch

RELATIVE_ERROR = 0.01
"""Of an order statistic's value."""
SMALLEST = 1e-8
"""Magnitudes below share the bucket of 0."""
LARGEST = 1e8
"""Magnitudes above share the last bucket of their sign."""

# Ratio of a bucket's ends: its harmonic mean is then within RELATIVE_ERROR of both.
_RATIO = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_NUM_PER_SIGN = math.ceil(math.log(LARGEST / SMALLEST) / math.log(_RATIO))

NUM_COUNTS = 2 * _NUM_PER_SIGN + 2
"""Negative buckets from the largest magnitude, the bucket of 0, positive ones, and the count of NaN."""


def counts_of(value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`[NUM_COUNTS]` float64: how many of the masked-in values fell into each bucket.

    `value` and `mask` (bool) have one shape; masked-out values may be anything. No size depends on the data
    and nothing is read back from the device.
    """
    value_n = torch.where(mask, value.detach().to(torch.float64), 0.0).reshape(-1)
    magnitude_n = value_n.abs().nan_to_num(nan=0.0).clamp(SMALLEST, LARGEST)
    step_n = ((magnitude_n / SMALLEST).log() / math.log(_RATIO)).long().clamp(max=_NUM_PER_SIGN - 1) + 1
    step_n = torch.where(value_n.abs() < SMALLEST, 0, step_n)
    index_n = _NUM_PER_SIGN + torch.where(value_n < 0, -step_n, step_n)
    index_n = torch.where(torch.isnan(value_n), NUM_COUNTS - 1, index_n)
    counts = torch.zeros(NUM_COUNTS, dtype=torch.float64, device=value.device)
    return counts.index_add_(0, index_n, mask.reshape(-1).to(torch.float64))


def quantile_of(counts: torch.Tensor, level: float) -> float:
    """The quantile from the counts of at least one value, interpolated as `torch.quantile` does; NaN where
    one value was NaN.
    """
    if bool(counts[-1] > 0):
        return math.nan
    below = counts[:-1].cumsum(0)
    position = level * (float(below[-1]) - 1.0)
    low, high = (_order_statistic(below, rank) for rank in (math.floor(position), math.ceil(position)))
    return low + (high - low) * (position - math.floor(position))


def _order_statistic(below: torch.Tensor, rank: int) -> float:
    """What the value of this rank (from 0, ascending) reads as; `below` are the cumulative counts."""
    bucket = int(torch.searchsorted(below, torch.tensor(rank, dtype=below.dtype), right=True))
    step = bucket - _NUM_PER_SIGN
    if step == 0:
        return 0.0
    return math.copysign(SMALLEST * _RATIO ** (abs(step) - 1) * (1 + RELATIVE_ERROR), step)
