"""Repetition, frequency and presence penalties, from the tokens before each position, vocabulary sharded over
TP.

Rows are predictor-aligned: row j holds the logits that predict token j + 1, so its preceding tokens are 0 to
j. What a row has seen is a prefix of its sequence's distinct ids in order of first occurrence; how often is
read from the sorted positions of each id. So the history of a batch takes a few numbers per token, however
long it is, and the entries of a row exist only while its chunk of rows is worked on.

Source of the rules: vLLM's sampler (order, what counts as seen, float32 maths).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from rlcore.ops.entries import ListedEntries
from rlcore.ops.passes import compute_dtype
from rlcore.sampling import RowSampling, SamplingSpec

# Entries (a row and an id it has seen) worked on at once: 64 bytes of temporaries each.
MAX_ENTRIES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PenaltyTokens:
    """The tokens that each row's penalties count. Build it with `of`, at the border; O(tokens) memory."""

    distinct_id_m: torch.Tensor
    """`[m]` int64: the distinct ids of each sequence by first occurrence, sequence after sequence."""
    response_key_n: torch.Tensor
    """`[n]` int64, ascending: index into `distinct_id_m` times `stride`, plus position, of each response
    token.
    """
    response_before_m: torch.Tensor
    """`[m]` int64: how many of those keys belong to earlier distinct ids."""
    stride: int
    """More than any position."""
    first_t: torch.Tensor
    """`[t]` int64 on the host: where the row's sequence starts in `distinct_id_m`."""
    num_seen_t: torch.Tensor
    """`[t]` int64 on the host: distinct ids that the row has seen."""
    position_t: torch.Tensor
    """`[t]` int64 on the host: last position that the row has seen."""

    @staticmethod
    def of(ids_sl: torch.Tensor, prompt_length_s: torch.Tensor, length_s: torch.Tensor) -> PenaltyTokens:
        """For rows `[S * L]`: row (s, j) has seen tokens 0 to j of sequence s, and padding rows nothing.

        `ids_sl [S, L]` right-padded; both lengths `[S]`, prompt and prompt + response. Raises `ValueError`
        naming the sequence for lengths that do not fit. The result stands on the host; see `to`.
        """
        if ids_sl.is_floating_point():
            raise ValueError(f"ids are {ids_sl.dtype}: expected integers.")
        ids_sl, prompt_length_s, length_s = ids_sl.cpu().long(), prompt_length_s.cpu(), length_s.cpu()
        _check_lengths(ids_sl, prompt_length_s, length_s)
        num_sequences, length = ids_sl.shape
        position_l = torch.arange(length)
        real_sl = position_l < length_s[:, None]
        sequence_n, position_n = real_sl.nonzero(as_tuple=True)
        id_n = ids_sl[sequence_n, position_n]
        lowest, span = (id_n.amin(), id_n.amax() - id_n.amin() + 1) if id_n.numel() else (0, 1)
        pair_m, group_n = torch.unique(sequence_n * span + id_n - lowest, return_inverse=True)
        num_pairs, num_tokens = pair_m.shape[0], sequence_n.shape[0]
        # Tokens stand sequence after sequence, so the smallest index of a group is its first occurrence, and
        # the order of these is the order of the distinct ids.
        first_m = torch.full((num_pairs,), num_tokens).scatter_reduce(
            0, group_n, torch.arange(num_tokens), "amin"
        )
        order_m = first_m.argsort()
        rank_m = torch.empty_like(order_m).index_put_((order_m,), torch.arange(num_pairs))
        is_first_sl = torch.zeros_like(real_sl)
        is_first_sl[sequence_n[first_m], position_n[first_m]] = True
        num_seen_sl = is_first_sl.cumsum(dim=1)
        num_distinct_s = is_first_sl.sum(dim=1)
        first_s = num_distinct_s.cumsum(dim=0) - num_distinct_s
        stride = length + 1
        in_response_n = position_n >= prompt_length_s[sequence_n]
        key_n = (rank_m[group_n] * stride + position_n)[in_response_n].sort().values
        return PenaltyTokens(
            distinct_id_m=pair_m[order_m] % span + lowest,
            response_key_n=key_n,
            response_before_m=torch.searchsorted(key_n, torch.arange(num_pairs) * stride),
            stride=stride,
            first_t=first_s[:, None].expand(num_sequences, length).reshape(-1),
            num_seen_t=torch.where(real_sl, num_seen_sl, 0).reshape(-1),
            position_t=position_l.expand(num_sequences, length).reshape(-1),
        )

    @property
    def num_rows(self) -> int:
        """t."""
        return self.first_t.shape[0]

    def rows(self, chunk: slice | torch.Tensor) -> PenaltyTokens:
        """Some rows: a slice, or int64 indices on the host in any order (packing, context parallelism)."""
        names = ("first_t", "num_seen_t", "position_t")
        return replace(self, **{name: getattr(self, name)[chunk] for name in names})

    def to(self, device: torch.device | str) -> PenaltyTokens:
        """The ids on `device`; what describes rows stays on the host, where chunks are cut."""
        names = ("distinct_id_m", "response_key_n", "response_before_m")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def check(self, num_rows: int, vocab_size: int) -> None:
        """Raises `ValueError` for another number of rows, or naming an id outside the vocabulary."""
        self.check_rows(num_rows)
        bad_m = (self.distinct_id_m < 0) | (self.distinct_id_m >= vocab_size)
        if bad_m.any():
            index = int(bad_m.nonzero()[0, 0])
            sees_t = (self.first_t <= index) & (index < self.first_t + self.num_seen_t)
            row = f"row {int(sees_t.nonzero()[0, 0])}" if bool(sees_t.any()) else "no row of these"
            raise ValueError(
                f"penalty token {int(self.distinct_id_m[index])}, first seen by {row}, is outside the "
                f"vocabulary [0, {vocab_size})."
            )

    def check_rows(self, num_rows: int) -> None:
        """The part of `check` that reads no tensor."""
        if self.num_rows != num_rows:
            raise ValueError(
                f"penalty tokens of {self.num_rows} rows for logits of {num_rows} rows: expected one each. "
                "Pick rows with `PenaltyTokens.rows`."
            )

    def entries(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Each row and id that it has seen: row `[e]`, id `[e]`, occurrences in the response `[e]`, int64.

        Their number is read on the host; nothing is read back from the device.
        """
        end_t = self.num_seen_t.cumsum(dim=0)
        num_entries = int(end_t[-1]) if self.num_rows else 0
        per_row_t3 = torch.stack([self.first_t - end_t + self.num_seen_t, self.position_t, end_t], dim=1)
        shift_t, position_t, end_t = per_row_t3.to(device).unbind(dim=1)
        index_e = torch.arange(num_entries, device=device)
        row_e = torch.searchsorted(end_t.contiguous(), index_e, right=True)
        distinct_e = index_e + shift_t[row_e]
        key_e = distinct_e * self.stride + position_t[row_e]
        up_to_e = torch.searchsorted(self.response_key_n.to(device), key_e, right=True)
        count_e = up_to_e - self.response_before_m.to(device)[distinct_e]
        return row_e, self.distinct_id_m.to(device)[distinct_e], count_e


def penalised_logits(
    logits_tv: torch.Tensor,
    tokens: PenaltyTokens,
    spec: SamplingSpec | RowSampling,
    start: int = 0,
) -> torch.Tensor:
    """The logits after repetition, frequency and presence penalties, as the sampler saw them.

    Maths: z = logit / r if logit > 0 else logit * r for ids seen before; then z - frequency * n - presence *
        [n > 0] with n the id's occurrences in the response before the position.
    Shapes: `logits_tv [t, v]`, any strides; `tokens` of t rows. Work beyond the copy: O(ids seen).
    Dtypes: maths and result in float32 (float64 for float64 logits); the gradient in the logits' dtype.
    Layout: this rank's columns, the first of which is id `start`; ids of other shards are left to them.
    Collectives: none.
    Backward: the gradient times r or 1 / r at the ids seen, from the saved input. Once.
    Mutates: nothing: one copy of the logits, one of the gradient.

    `ValueError` for another number of rows. Ids are checked by `PenaltyTokens.check`. Source: vLLM's sampler.
    """
    tokens.check_rows(logits_tv.shape[0])
    return _Penalised.apply(logits_tv, tokens.to(logits_tv.device), spec, start)


class _Penalised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_tv: torch.Tensor,
        tokens: PenaltyTokens,
        spec: SamplingSpec | RowSampling,
        start: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(logits_tv)
        ctx.tokens, ctx.spec, ctx.start = tokens, spec, start
        dtype = compute_dtype(logits_tv)
        out_tv = logits_tv.to(dtype, copy=True, memory_format=torch.contiguous_format)
        for rows in _chunks(tokens):
            entries, count_e = _local_entries(tokens.rows(rows), start, out_tv[rows])
            z_e = entries.gather(out_tv[rows])
            repetition_e = _parameter("repetition_penalty", spec, rows, entries, dtype)
            z_e = torch.where(z_e > 0, z_e / repetition_e, z_e * repetition_e)
            z_e = z_e - _parameter("frequency_penalty", spec, rows, entries, dtype) * count_e
            z_e = z_e - _parameter("presence_penalty", spec, rows, entries, dtype) * (count_e > 0)
            entries.write_(out_tv[rows], z_e)
        return out_tv

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_tv: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (logits_tv,) = ctx.saved_tensors
        out_tv = grad_tv.to(logits_tv.dtype, copy=True)
        for rows in _chunks(ctx.tokens):
            entries, _ = _local_entries(ctx.tokens.rows(rows), ctx.start, logits_tv[rows])
            z_e = entries.gather(logits_tv[rows])
            repetition_e = _parameter("repetition_penalty", ctx.spec, rows, entries, z_e.dtype)
            grad_e = entries.gather(grad_tv[rows])
            grad_e = torch.where(z_e > 0, grad_e / repetition_e, grad_e * repetition_e)
            entries.write_(out_tv[rows], grad_e)
        return out_tv, None, None, None


def _local_entries(
    tokens: PenaltyTokens, start: int, logits_tv: torch.Tensor
) -> tuple[ListedEntries, torch.Tensor]:
    """The seen ids of each row as this shard's columns, each once; their occurrences in the compute dtype."""
    row_e, id_e, count_e = tokens.entries(logits_tv.device)
    entries = ListedEntries.of(row_e, id_e, start, logits_tv.shape[1])
    return entries, count_e.to(compute_dtype(logits_tv))


def _parameter(
    name: str,
    spec: SamplingSpec | RowSampling,
    rows: slice,
    entries: ListedEntries,
    dtype: torch.dtype,
) -> torch.Tensor:
    """One penalty of each entry's row: `[e]`, or 0-dim when all rows share it."""
    device = entries.row_n.device
    if isinstance(spec, SamplingSpec):
        return torch.full((), getattr(spec, name), dtype=dtype, device=device)
    return getattr(spec, f"{name}_t")[rows].to(device, dtype)[entries.row_n]


def _chunks(tokens: PenaltyTokens) -> Iterator[slice]:
    """Row slices of about MAX_ENTRIES entries (at least one row)."""
    most = int(tokens.num_seen_t.max()) if tokens.num_rows else 0
    step = max(1, MAX_ENTRIES // max(1, most))
    for start in range(0, tokens.num_rows, step):
        yield slice(start, min(start + step, tokens.num_rows))


def _check_lengths(ids_sl: torch.Tensor, prompt_length_s: torch.Tensor, length_s: torch.Tensor) -> None:
    num_sequences = ids_sl.shape[0]
    if ids_sl.dim() != 2 or prompt_length_s.shape != (num_sequences,) or length_s.shape != (num_sequences,):
        raise ValueError(
            f"ids of shape {tuple(ids_sl.shape)}, prompt lengths {tuple(prompt_length_s.shape)}, lengths "
            f"{tuple(length_s.shape)}: expected [S, L], [S] and [S]."
        )
    bad_s = (prompt_length_s < 0) | (prompt_length_s > length_s) | (length_s > ids_sl.shape[1])
    if bad_s.any():
        index = int(bad_s.nonzero()[0])
        raise ValueError(
            f"sequence {index} has a prompt of {int(prompt_length_s[index])} and {int(length_s[index])} "
            f"tokens in {ids_sl.shape[1]} columns: expected 0 <= prompt <= length <= {ids_sl.shape[1]}."
        )
