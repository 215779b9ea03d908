"""The ids that a sampler kept at each position, row after row: what a rollout engine hands to replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SamplingMask:
    """The ids each row's sampler kept, row after row (CSR), as rollout engines return them.

    An id listed twice in a row counts once. Keep `offsets` on the host: then `rows` reads nothing back from a
    device.
    """

    token_ids: torch.Tensor
    """`[n]` int32 or int64: ids of the whole vocabulary, in any order within a row."""
    offsets: torch.Tensor
    """`[t + 1]` int32 or int64: row i lists `token_ids[offsets[i] : offsets[i + 1]]`."""

    @staticmethod
    def from_lists(rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> SamplingMask:
        """One list of ids per row; the ids go to `device`, the offsets stay on the host."""
        counts = torch.tensor([0, *(len(row) for row in rows)], dtype=torch.int64)
        flat = [token_id for row in rows for token_id in row]
        return SamplingMask(torch.tensor(flat, dtype=torch.int32, device=device), counts.cumsum(dim=0))

    @property
    def num_rows(self) -> int:
        """t."""
        return self.offsets.shape[0] - 1

    def rows(self, chunk: slice) -> SamplingMask:
        """The mask of some consecutive rows. Reads two offsets. `ValueError` for a slice with a step."""
        start, stop, step = chunk.indices(self.num_rows)
        if step != 1:
            raise ValueError(f"rows {chunk} of a SamplingMask: expected consecutive rows (a step of 1).")
        offsets = self.offsets[start : max(start, stop) + 1]
        return SamplingMask(self.token_ids[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])

    def select(self, row_t: torch.Tensor) -> SamplingMask:
        """The mask whose row i is row `row_t[i]` of this one, in any order and as often as asked; -1 is a row
        without ids.

        `row_t [m]` int64, on the host as `offsets`. The ids stay on their device.
        """
        counts = torch.cat([self.offsets[1:] - self.offsets[:-1], self.offsets.new_zeros(1)])
        # An index of -1 is the row of no ids appended above.
        count_t = counts[row_t]
        offsets = torch.cat([count_t.new_zeros(1), count_t.cumsum(dim=0)])
        start_t = self.offsets[:-1].new_zeros(counts.shape[0])
        start_t[:-1] = self.offsets[:-1]
        shift_t = start_t[row_t] - offsets[:-1]
        index_n = torch.arange(int(offsets[-1])) + shift_t.repeat_interleave(count_t)
        return SamplingMask(self.token_ids[index_n.to(self.token_ids.device)], offsets)

    def check(self, num_rows: int, vocab_size: int, needed_t: torch.Tensor | None = None) -> None:
        """Raises `ValueError` with row and value for a mask that does not fit. Reads values back: for the
        border.

        `needed_t [t]` bool: rows that must list something; None means all. Prompt and padding rows of a batch
        have no sampler and may be empty, provided that the loss masks them: their support is the target.
        """
        _check_tensors(self)
        if self.num_rows != num_rows:
            raise ValueError(
                f"replay offsets describe {self.num_rows} rows, the logits have {num_rows}: expected "
                f"{num_rows + 1} offsets, got {self.num_rows + 1}."
            )
        count_t = self.offsets[1:] - self.offsets[:-1]
        if (count_t < 0).any():
            row = int((count_t < 0).nonzero()[0])
            raise ValueError(
                f"replay offsets fall from {int(self.offsets[row])} to {int(self.offsets[row + 1])} in row "
                f"{row}: expected offsets that never fall."
            )
        first, last, num_ids = int(self.offsets[0]), int(self.offsets[-1]), self.token_ids.shape[0]
        if first != 0 or last != num_ids:
            raise ValueError(
                f"replay offsets run from {first} to {last} for {num_ids} ids: expected 0 to {num_ids}."
            )
        empty_t = count_t == 0 if needed_t is None else (count_t == 0) & needed_t.to(count_t.device)
        if empty_t.any():
            row = int(empty_t.nonzero()[0])
            raise ValueError(
                f"replay row {row} lists no id ({int(empty_t.sum())} of {num_rows} rows do not): the sampler "
                "keeps at least one. Pass the row's kept ids, or say with `needed_t` that the loss masks it."
            )
        bad_n = (self.token_ids < 0) | (self.token_ids >= vocab_size)
        if bad_n.any():
            index = int(bad_n.nonzero()[0])
            row = int(torch.searchsorted(self.offsets[1:].contiguous(), index, right=True))
            raise ValueError(
                f"replay id {int(self.token_ids[index])} in row {row} is outside the vocabulary [0, "
                f"{vocab_size}). Pass ids of the whole vocabulary, not a shard's columns."
            )


def _check_tensors(mask: SamplingMask) -> None:
    for name in ("token_ids", "offsets"):
        value = getattr(mask, name)
        if value.dim() != 1 or value.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"SamplingMask.{name} is {value.dtype} of shape {tuple(value.shape)}: expected a flat "
                "int32 or int64 tensor."
            )
    if mask.offsets.shape[0] == 0:
        raise ValueError("SamplingMask.offsets is empty: expected one offset more than there are rows.")
