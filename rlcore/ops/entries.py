"""A few entries of each row of sharded logits, by row and id: what replay and penalties read and write.

Shapes never depend on values, so nothing is read back from the device: entries of other shards stay in the
list, masked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rlcore.ops.passes import compute_dtype


@dataclass(frozen=True, kw_only=True)
class ListedEntries:
    """Entries of this rank's columns. An entry may be listed more than once."""

    row_n: torch.Tensor
    """`[n]` int64."""
    column_n: torch.Tensor
    """`[n]` int64; 0 where the entry is not here."""
    here_n: torch.Tensor
    """`[n]` bool: the id is one of this shard's columns."""

    @staticmethod
    def of(row_n: torch.Tensor, id_n: torch.Tensor, start: int, width: int) -> ListedEntries:
        """From ids of the whole vocabulary, for a shard of `width` real columns whose first is id `start`."""
        column_n = id_n.long() - start
        here_n = (column_n >= 0) & (column_n < width)
        return ListedEntries(row_n=row_n, column_n=torch.where(here_n, column_n, 0), here_n=here_n)

    def gather(self, logits_tv: torch.Tensor) -> torch.Tensor:
        """`[n]` in the compute dtype; -inf where the entry is not here."""
        if logits_tv.shape[1] == 0:
            return torch.full(
                self.row_n.shape, -math.inf, dtype=compute_dtype(logits_tv), device=logits_tv.device
            )
        value_n = logits_tv[self.row_n, self.column_n].to(compute_dtype(logits_tv))
        return torch.where(self.here_n, value_n, -math.inf)

    def write_(self, out_tv: torch.Tensor, value_n: torch.Tensor) -> None:
        """Overwrites the entries that are here; one listed twice must have the same value both times.

        The others repeat the first entry that is here, so that every index is written with one value only;
        when there is none, they write back what they read.
        """
        if self.row_n.shape[0] == 0 or out_tv.shape[1] == 0:
            return
        first = self.here_n.to(torch.int8).argmax()
        index_n = torch.where(
            self.here_n, torch.arange(self.here_n.shape[0], device=self.here_n.device), first
        )
        row_n, column_n = self.row_n[index_n], self.column_n[index_n]
        value_n = torch.where(
            self.here_n[index_n], value_n[index_n].to(out_tv.dtype), out_tv[row_n, column_n]
        )
        out_tv.index_put_((row_n, column_n), value_n)

    def once(self, width: int) -> tuple[ListedEntries, torch.Tensor]:
        """The entries in row order, and `[n]` bool: here, and the first of its kind."""
        width = max(width, 1)
        elsewhere = torch.iinfo(torch.int64).max
        key_n = torch.where(self.here_n, self.row_n * width + self.column_n, elsewhere).sort().values
        here_n = key_n != elsewhere
        first_n = here_n.clone()
        first_n[1:] &= key_n[1:] != key_n[:-1]
        key_n = torch.where(here_n, key_n, 0)
        return ListedEntries(row_n=key_n // width, column_n=key_n % width, here_n=here_n), first_n
