"""Context parallelism: which tokens of a packed row each rank holds, and gathering what they computed.

Zig-zag (Megatron-core's order): each sequence is cut into 2 x CP equal chunks and rank r holds chunks r and
2 x CP - 1 - r, so that every rank has the same share of a causal mask. A rank keeps its tokens sequence by
sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlcore.collectives import Group, all_gather, group_rank, group_size, reduce_scatter


@dataclass(frozen=True, kw_only=True)
class ZigZag:
    """Owners of the T positions of a row of padded sequences. Build with `of_lengths`."""

    cp_size: int
    """Ranks of the context-parallel group."""
    owned_rt: torch.Tensor
    """`[CP, t]` int64: the packed positions of each rank, in its local order; t = T / CP."""
    origin_t: torch.Tensor
    """`[T]` int64: where each packed position lies in the ranks' tokens put end to end."""

    @classmethod
    def of_lengths(
        cls, padded_lengths: Sequence[int], cp_size: int, device: torch.device | str = "cpu"
    ) -> ZigZag:
        """For sequences of these padded lengths, end to end. `ValueError` where 2 x CP does not divide."""
        owned_rt = torch.stack([owned_positions(padded_lengths, cp_size, rank) for rank in range(cp_size)])
        return cls(
            cp_size=cp_size,
            owned_rt=owned_rt.to(device),
            origin_t=torch.argsort(owned_rt.reshape(-1)).to(device),
        )

    def split(self, value_t: torch.Tensor, cp_group: Group) -> torch.Tensor:
        """This rank's `[t, ...]` of a `[T, ...]` that every rank holds.

        Collectives: none. Backward: the gradient of this rank's part, 0 elsewhere. `ValueError` for another T
        or a group of another size.
        """
        self._check(value_t, self.origin_t.shape[0], cp_group)
        return value_t if self.cp_size == 1 else value_t[self.owned_rt[group_rank(cp_group)]]

    def gather(self, value_t: torch.Tensor, cp_group: Group) -> torch.Tensor:
        """`[T, ...]` in packed order on every rank from each rank's `[t, ...]`.

        For results that every rank then uses alike (a loss computed on all of them): backward takes this
        rank's own part of the gradient, once, not CP times.
        Collectives: forward one all-gather of this rank's bytes over `cp_group`; backward none.
        """
        self._check(value_t, self.owned_rt.shape[1], cp_group)
        return value_t if self.cp_size == 1 else _Gather.apply(value_t, self, cp_group)

    def gather_summed(self, value_t: torch.Tensor, cp_group: Group) -> torch.Tensor:
        """The same as `gather` for results that each rank uses in its own way (keys and values of its own
        queries): backward sums every rank's gradient of this rank's part.

        Collectives: forward one all-gather, backward one reduce-scatter of T / t times the bytes, both over
        `cp_group`, in the value's dtype. Every rank must run backward.
        """
        self._check(value_t, self.owned_rt.shape[1], cp_group)
        return value_t if self.cp_size == 1 else _GatherSummed.apply(value_t, self, cp_group)

    def _check(self, value_t: torch.Tensor, expected: int, cp_group: Group) -> None:
        if group_size(cp_group) != self.cp_size:
            raise ValueError(
                f"this layout cuts over cp_size={self.cp_size} ranks, the group has {group_size(cp_group)}. "
                "Build both from one parallel.cp."
            )
        if value_t.shape[0] != expected:
            raise ValueError(
                f"a value of shape {tuple(value_t.shape)}: expected {expected} tokens of "
                f"{self.origin_t.shape[0]} over cp_size={self.cp_size}."
            )


def owned_positions(padded_lengths: Sequence[int], cp_size: int, cp_rank: int) -> torch.Tensor:
    """`[t]` int64: the packed positions that rank `cp_rank` holds, in its local order.

    `ValueError` for a length that 2 x CP does not divide (CP > 1).
    """
    positions, start = [], 0
    for index, length in enumerate(padded_lengths):
        whole = torch.arange(start, start + length)
        if cp_size > 1:
            if length % (2 * cp_size):
                raise ValueError(
                    f"sequence {index} has {length} tokens: cp_size={cp_size} needs a multiple of "
                    f"{2 * cp_size}. Pad it to {-(-length // (2 * cp_size)) * 2 * cp_size}, or change "
                    "parallel.cp."
                )
            chunks = whole.chunk(2 * cp_size)
            whole = torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])
        positions.append(whole)
        start += length
    return torch.cat(positions)


def _gather(value_t: torch.Tensor, layout: ZigZag, cp_group: Group) -> torch.Tensor:
    """The collective answers in rank order; packed order is restored here."""
    return all_gather(value_t, cp_group).flatten(0, 1)[layout.origin_t]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value_t: torch.Tensor, layout: ZigZag, cp_group: Group) -> torch.Tensor:
        ctx.owned_t = layout.owned_rt[group_rank(cp_group)]
        return _gather(value_t, layout, cp_group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        return grads[0][ctx.owned_t], None, None


class _GatherSummed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value_t: torch.Tensor, layout: ZigZag, cp_group: Group) -> torch.Tensor:
        ctx.owned_t, ctx.cp_group = layout.owned_rt.reshape(-1), cp_group
        return _gather(value_t, layout, cp_group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        return reduce_scatter(grads[0][ctx.owned_t], ctx.cp_group), None, None
