"""Whitening of token values over every rank that holds tokens: mean 0, sample deviation 1."""

from __future__ import annotations

import torch

from rlcore.collectives import Group, all_gather


def whiten(value: torch.Tensor, mask: torch.Tensor, group: Group = None) -> torch.Tensor:
    """(value - mean) / sample deviation (Bessel) over all masked-in entries of all ranks of `group`.

    Shapes: `value` any, floating; `mask` bool, same shape; result float32, 0 where masked out. Masked-out
    values may be NaN or inf. A rank's shape is its own; it may hold nothing that counts.
    Layout: `group` holds ranks with disjoint entries: DP x CP where each CP rank has its slice of a sequence,
    DP where every CP rank has the whole.
    Collectives: one all-gather of three float64 numbers a rank, entered by every rank whatever its data: each
    sees all ranks' moments and adds them in the same order. Sums of squares in one all-reduce would cancel.
    Entries that are all equal, and a single one, become exactly 0. Backward: none. Mutates: nothing.
    Raises `ValueError` on every rank alike where an entry that counts is NaN or inf.
    Source: Hu 2025 (REINFORCE++); moments added as in Chan, Golub, LeVeque 1979.
    """
    value = torch.where(mask, value.detach().to(torch.float64), 0.0)
    moments_r3 = all_gather(_moments(value, mask), group)
    broken = (~torch.isfinite(moments_r3)).any(dim=1).nonzero()
    if broken.numel():
        raise ValueError(
            f"a value to be whitened on rank {int(broken[0])} of {len(moments_r3)} is NaN, inf or too large "
            "to square: advantages and rewards must be finite. Fix the task's reward."
        )
    moments_r3 = moments_r3[moments_r3[:, 0] > 0]
    if moments_r3.numel() == 0:
        return torch.zeros_like(value, dtype=torch.float32)
    count_r, mean_r, square_r = moments_r3.unbind(1)
    # Means are averaged as distances from one of them: exactly 0 apart where all values are equal.
    start = mean_r.amin()
    offset_r = mean_r - start
    offset = (count_r * offset_r).sum() / count_r.sum()
    square = square_r.sum() + (count_r * (offset_r - offset).square()).sum()
    deviation = (square / (count_r.sum() - 1).clamp(min=1)).sqrt()
    centred = torch.where(mask, value - start - offset, 0.0)
    return (centred / torch.where(deviation > 0, deviation, 1.0)).to(torch.float32)


def _moments(value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`[3]` float64: count, mean, sum of squares about the mean; all 0 for nothing.

    The mean of equal values is that value to the last bit: it is taken as a distance from the smallest.
    """
    if value.numel() == 0:
        return torch.zeros(3, dtype=torch.float64, device=value.device)
    count = mask.sum().to(torch.float64)
    low = torch.where(count > 0, torch.where(mask, value, torch.inf).amin(), 0.0)
    offset = torch.where(mask, value - low, 0.0)
    mean = offset.sum() / count.clamp(min=1)
    square = torch.where(mask, (offset - mean).square(), 0.0).sum()
    return torch.stack([count, low + mean, square])
