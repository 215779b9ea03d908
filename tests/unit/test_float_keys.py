"""Quarters between floats, counted in floats."""

import itertools
import math

import pytest
import torch

from rlcore.ops.float_keys import key_quarters


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("part", [0, 1, 2, 3])
def test_quarters_are_ordered_and_end_after_half_as_many_steps_as_a_float_has_bits(dtype, part):
    """From any two ends, to whichever side."""
    largest = torch.finfo(dtype).max
    tiny = torch.nextafter(torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype)).item()
    ends = [-math.inf, -largest, -1.0, -tiny, -0.0, tiny, 1.0, 1.0 + 1e-3, largest, math.inf]
    pairs = [(a, b) for a in ends for b in ends if a < b]
    low_u, high_u = torch.tensor(pairs, dtype=dtype).unbind(1)
    for _ in range(torch.finfo(dtype).bits // 2):
        at = [high_u, *key_quarters(low_u, high_u).unbind(1), low_u]
        for above, below in itertools.pairwise(at):
            assert bool((above >= below).all())
        high_u, low_u = at[part], at[part + 1]
    for _ in range(16):
        low_u = torch.nextafter(low_u, high_u)
    assert torch.equal(low_u, high_u)
