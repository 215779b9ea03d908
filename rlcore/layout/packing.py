"""Sequences of different lengths laid end to end in one row of T tokens (Megatron's thd), and back.

A batch is token-aligned `[S, L]`. `shift_to_predictor` moves what describes a token to the position that
predicts it, on the whole sequence; `PackedLayout.pack` comes after it, the cut over CP ranks
(`rlcore.layout.context_parallel`) last. Results go the same way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

# Real tokens of a microbatch that exists only so that every rank runs equally many.
FILLER_LENGTH = 1
FILLER_ROW = -1


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Where each token of one packed microbatch comes from. Build with `of_rows` or `from_cu_seqlens`.

    Real tokens of a sequence come first, its padding follows: causal attention over a padded sequence never
    shows padding to a real token, so attention and rotary positions may work on padded lengths.
    """

    rows: tuple[int, ...]
    """The batch's row of each packed sequence, in packed order; `FILLER_ROW` for the filler."""
    lengths: tuple[int, ...]
    """Real tokens of each packed sequence (of the filler: tokens that nothing reads)."""
    padded_lengths: tuple[int, ...]
    """Tokens of each packed sequence with padding: multiples of 2 x CP where CP > 1."""
    cp_size: int
    """Context-parallel ranks that the padding allows to cut over."""
    row_t: torch.Tensor
    """`[T]` int64: the batch's row of each position; -1 in padding and filler."""
    column_t: torch.Tensor
    """`[T]` int64: the batch's column; -1 in padding and filler."""
    position_t: torch.Tensor
    """`[T]` int64: 0, 1, 2, ... in each sequence, on through its padding."""
    segment_t: torch.Tensor
    """`[T]` int64: index of the packed sequence; -1 in padding and filler."""
    cu_seqlens: torch.Tensor
    """`[S + 1]` int32: running sum of `lengths`, from 0."""
    cu_seqlens_padded: torch.Tensor
    """`[S + 1]` int32: running sum of `padded_lengths`, from 0: where each sequence starts in the row."""

    @classmethod
    def of_rows(
        cls,
        length_s: Sequence[int] | torch.Tensor,
        rows: Sequence[int] | None = None,
        *,
        cp_size: int = 1,
        tp_size: int = 1,
        device: torch.device | str = "cpu",
    ) -> PackedLayout:
        """The layout of the batch's `rows` (None: all), in that order; of a filler when there are none.

        `length_s` are the whole batch's lengths, on the host. `tp_size` is that of sequence parallelism, 1
        without it. `ValueError` for a row without tokens, a row outside the batch, or one given twice.
        """
        lengths = _host_lengths(length_s)
        rows = tuple(range(len(lengths)) if rows is None else rows)
        if len(set(rows)) != len(rows) or any(not 0 <= row < len(lengths) for row in rows):
            raise ValueError(
                f"rows {list(rows)} of a batch of {len(lengths)} sequences: expected different numbers from "
                f"0 to {len(lengths) - 1}."
            )
        if not rows:
            return cls._place((FILLER_ROW,), (FILLER_LENGTH,), None, (cp_size, tp_size), device)
        chosen = tuple(lengths[row] for row in rows)
        return cls._place(rows, chosen, None, (cp_size, tp_size), device)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Sequence[int] | torch.Tensor,
        cu_seqlens_padded: Sequence[int] | torch.Tensor | None = None,
        *,
        cp_size: int = 1,
        tp_size: int = 1,
        device: torch.device | str = "cpu",
    ) -> PackedLayout:
        """The layout that another system's boundaries describe; sequence i is row i of the batch.

        `cu_seqlens_padded` says where the sequences start in the row; without it they are padded as
        `of_rows` pads. `ValueError` when boundaries do not start at 0 and rise, or do not fit CP and TP.
        """
        lengths = _boundaries_to_lengths(cu_seqlens, "cu_seqlens")
        padded = None
        if cu_seqlens_padded is not None:
            padded = _boundaries_to_lengths(cu_seqlens_padded, "cu_seqlens_padded")
        return cls._place(tuple(range(len(lengths))), lengths, padded, (cp_size, tp_size), device)

    @classmethod
    def _place(
        cls,
        rows: tuple[int, ...],
        lengths: tuple[int, ...],
        padded: tuple[int, ...] | None,
        sizes: tuple[int, int],
        device: torch.device | str,
    ) -> PackedLayout:
        cp_size, tp_size = sizes
        multiple, total_multiple = length_multiples(cp_size, tp_size)
        for row, length in zip(rows, lengths, strict=True):
            if length < 1:
                raise ValueError(f"sequence {row} has {length} tokens: expected at least 1. Leave it out.")
        if padded is None:
            starts_at = [_round_up(length, multiple) for length in lengths]
            # The row's own padding goes to its last sequence: no sequence of padding alone, and it stays
            # divisible by 2 x CP, because the row's multiple is.
            starts_at[-1] += -sum(starts_at) % total_multiple
            padded = tuple(starts_at)
        _check_padded(lengths, padded, sizes)
        real = [torch.arange(n) < length for n, length in zip(padded, lengths, strict=True)]
        position_t = torch.cat([torch.arange(n) for n in padded])
        index_t = torch.arange(len(rows)).repeat_interleave(torch.tensor(padded))
        real_t = torch.cat(real) & (torch.tensor(rows)[index_t] != FILLER_ROW)
        return cls(
            rows=rows,
            lengths=lengths,
            padded_lengths=padded,
            cp_size=cp_size,
            row_t=torch.where(real_t, torch.tensor(rows)[index_t], -1).to(device),
            column_t=torch.where(real_t, position_t, -1).to(device),
            position_t=position_t.to(device),
            segment_t=torch.where(real_t, index_t, -1).to(device),
            cu_seqlens=_boundaries(lengths).to(device),
            cu_seqlens_padded=_boundaries(padded).to(device),
        )

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return sum(self.padded_lengths)

    @property
    def num_segments(self) -> int:
        """Packed sequences, filler included."""
        return len(self.rows)

    @property
    def max_seqlen(self) -> int:
        """Longest padded sequence: Megatron's rotary embedding needs frequencies for so many positions."""
        return max(self.padded_lengths)

    @property
    def real_t(self) -> torch.Tensor:
        """`[T]` bool: a token of the batch, neither padding nor filler."""
        return self.row_t >= 0

    def pack(self, value_sl: torch.Tensor, fill: float | bool) -> torch.Tensor:
        """`[T, ...]` from the batch's `[S, L, ...]`; `fill` in padding and filler. Differentiable.

        `ValueError` when the value has no such rows or columns.
        """
        self._check_holds(tuple(value_sl.shape[:2]))
        if 0 in value_sl.shape[:2]:
            return value_sl.new_full((self.num_tokens, *value_sl.shape[2:]), fill)
        value_t = value_sl[self.row_t.clamp(min=0), self.column_t.clamp(min=0)]
        return torch.where(_like(self.real_t, value_t), value_t, _scalar(fill, value_t))

    def unpack(self, value_t: torch.Tensor, fill: float | bool, shape: tuple[int, int]) -> torch.Tensor:
        """`[S, L, ...]` of the batch's `shape` from `[T, ...]`; `fill` wherever this row holds nothing.

        Differentiable. `ValueError` when the value is not `[T, ...]` or the shape lacks such rows or columns.
        """
        self._check_holds(shape)
        if value_t.shape[0] != self.num_tokens:
            raise ValueError(
                f"a packed value of shape {tuple(value_t.shape)}: this layout holds {self.num_tokens} "
                "tokens. Gather it over CP ranks first."
            )
        # One row more than the batch takes what padding holds, so that no position is counted on the host.
        row_t = torch.where(self.real_t, self.row_t, shape[0])
        out = value_t.new_full((shape[0] + 1, shape[1], *value_t.shape[1:]), fill)
        return out.index_put((row_t, self.column_t.clamp(min=0)), value_t)[: shape[0]]

    def _check_holds(self, shape: tuple[int, ...]) -> None:
        real = [(row, n) for row, n in zip(self.rows, self.lengths, strict=True) if row != FILLER_ROW]
        if any(row >= shape[0] or length > shape[1] for row, length in real):
            raise ValueError(
                f"a batch of shape {shape}: this layout holds rows up to {max(self.rows)} and "
                f"{max(self.lengths)} tokens of a row. Hand in the batch that it was built from."
            )


def unpack_all(
    layouts: Sequence[PackedLayout],
    values_t: Sequence[torch.Tensor],
    fill: float | bool,
    shape: tuple[int, int],
) -> torch.Tensor:
    """`[S, L, ...]` in the batch's order from the `[T, ...]` of every microbatch; fillers leave no trace.

    Differentiable. `ValueError` when a row is missing, occurs twice, or numbers of microbatches differ.
    """
    rows = sorted(row for layout in layouts for row in layout.rows if row != FILLER_ROW)
    if rows != list(range(shape[0])) or len(layouts) != len(values_t):
        raise ValueError(
            f"{len(layouts)} layouts with rows {rows} and {len(values_t)} values: expected one value a "
            f"layout and every row from 0 to {shape[0] - 1} once."
        )
    out_sl = None
    for layout, value_t in zip(layouts, values_t, strict=True):
        if out_sl is None:
            out_sl = value_t.new_full((*shape, *value_t.shape[1:]), fill)
        part_sl = layout.unpack(value_t, fill, shape)
        held_s = torch.zeros(shape[0], dtype=torch.bool, device=value_t.device)
        held_s[[row for row in layout.rows if row != FILLER_ROW]] = True
        out_sl = torch.where(_like(held_s, out_sl), part_sl, out_sl)
    if out_sl is None:
        raise ValueError("no microbatch to unpack: expected at least one, a filler where a rank has no data.")
    return out_sl


def shift_to_predictor(value_sl: torch.Tensor, length_s: torch.Tensor, fill: float | bool) -> torch.Tensor:
    """Entry j becomes that of token j + 1, which position j predicts; the last token of a sequence predicts
    nothing and gets `fill`, like padding.

    `value_sl [S, L, ...]`, `length_s [S]` on its device. Comes before packing: there the next position may
    belong to another sequence.
    """
    shifted_sl = torch.cat([value_sl[:, 1:], torch.full_like(value_sl[:, :1], fill)], dim=1)
    position_l = torch.arange(value_sl.shape[1], device=value_sl.device)
    inside_sl = position_l < length_s[:, None] - 1
    return torch.where(_like(inside_sl, value_sl), shifted_sl, _scalar(fill, value_sl))


def shift_to_token(value_sl: torch.Tensor, length_s: torch.Tensor, fill: float | bool) -> torch.Tensor:
    """The way back: entry j becomes that of position j - 1, which predicted token j; `fill` at the first
    token, which nothing predicts, and in padding.
    """
    shifted_sl = torch.cat([torch.full_like(value_sl[:, :1], fill), value_sl[:, :-1]], dim=1)
    position_l = torch.arange(value_sl.shape[1], device=value_sl.device)
    inside_sl = (position_l > 0) & (position_l < length_s[:, None])
    return torch.where(_like(inside_sl, value_sl), shifted_sl, _scalar(fill, value_sl))


def length_multiples(cp_size: int, tp_size: int = 1) -> tuple[int, int]:
    """What a sequence's padded length, and the row's T, must be multiples of.

    Zig-zag cuts each sequence into 2 x CP equal chunks; sequence parallelism cuts each CP rank's T / CP
    tokens over TP. `ValueError` for sizes below 1.
    """
    if cp_size < 1 or tp_size < 1:
        raise ValueError(f"cp_size={cp_size}, tp_size={tp_size}: expected numbers of ranks, at least 1.")
    multiple = 2 * cp_size if cp_size > 1 else 1
    total_multiple = cp_size * tp_size
    return multiple, total_multiple if total_multiple % multiple == 0 else 2 * total_multiple


def _check_padded(lengths: tuple[int, ...], padded: tuple[int, ...], sizes: tuple[int, int]) -> None:
    """`ValueError` unless every sequence fits its padded length and CP and TP divide what they cut."""
    cp_size, tp_size = sizes
    multiple, _ = length_multiples(cp_size, tp_size)
    if len(lengths) != len(padded):
        raise ValueError(
            f"cu_seqlens has {len(lengths)} sequences, cu_seqlens_padded {len(padded)}: expected equally "
            "many."
        )
    for index, (length, room) in enumerate(zip(lengths, padded, strict=True)):
        if room < length or room % multiple:
            raise ValueError(
                f"sequence {index} has {length} tokens in {room} positions: expected at least as many and, "
                f"for cp_size={cp_size}, a multiple of {multiple}. Pad it to {_round_up(length, multiple)}."
            )
    if sum(padded) % (cp_size * tp_size):
        raise ValueError(
            f"{sum(padded)} positions do not divide over cp_size={cp_size} x tp_size={tp_size} ranks. Pad "
            f"the last sequence by {-sum(padded) % (cp_size * tp_size)}."
        )


def _host_lengths(length_s: Sequence[int] | torch.Tensor) -> list[int]:
    return [int(length) for length in length_s]


def _boundaries(lengths: Sequence[int]) -> torch.Tensor:
    total = torch.cumsum(torch.tensor(lengths), 0)
    return torch.cat([torch.zeros(1, dtype=total.dtype), total]).to(torch.int32)


def _boundaries_to_lengths(cu_seqlens: Sequence[int] | torch.Tensor, name: str) -> tuple[int, ...]:
    boundaries = _host_lengths(cu_seqlens)
    if len(boundaries) < 2 or boundaries[0] != 0:
        raise ValueError(f"{name}={boundaries}: expected 0, then the end of each sequence.")
    lengths = tuple(stop - start for start, stop in pairwise(boundaries))
    for index, length in enumerate(lengths):
        if length < 1:
            raise ValueError(
                f"{name} goes from {boundaries[index]} to {boundaries[index + 1]} at sequence {index}: "
                "expected it to rise. Leave out empty sequences."
            )
    return lengths


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _like(mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The mask with trailing axes of one, so that it selects whole entries of the value."""
    return mask.reshape(*mask.shape, *([1] * (value.dim() - mask.dim())))


def _scalar(fill: float | bool, value: torch.Tensor) -> torch.Tensor:
    """The fill in the value's dtype: a bare 0.0 would turn ids into floats."""
    return value.new_full((), fill)
