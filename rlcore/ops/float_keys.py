"""Floats as integers in the same order: halving between two of them ends after as many steps as a float has
bits, however far apart they are.
"""

from __future__ import annotations

import torch

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def key_quarters(low_u: torch.Tensor, high_u: torch.Tensor) -> torch.Tensor:
    """`[u, 3]`, descending: the floats at three quarters, a half and a quarter of the way from low to high,
    counted in floats; within a few floats. Both ends may be infinite.
    """
    low_key_u, high_key_u = _key_of(low_u), _key_of(high_u)
    # Quartered before the difference, which would not fit.
    step_u = (high_key_u >> 2) - (low_key_u >> 2)
    key_up = torch.stack([high_key_u - step_u * part for part in (1, 2, 3)], dim=1)
    key_up = torch.maximum(key_up, low_key_u[:, None])
    bits_up = _flip(key_up, low_u.dtype).to(_BITS[low_u.dtype])
    return bits_up.view(low_u.dtype)


def _key_of(value_u: torch.Tensor) -> torch.Tensor:
    return _flip(value_u.contiguous().view(_BITS[value_u.dtype]).long(), value_u.dtype)


def _flip(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bits to key and back: of a negative float all bits but the sign, because their order is reversed."""
    return torch.where(bits < 0, bits ^ torch.iinfo(_BITS[dtype]).max, bits)
