"""Moving logits between "all tokens, some columns" and "some tokens, all columns", for the baselines.

Our own ops never send anything of this size, so `rlcore.collectives` has no all-to-all: it is called here,
and its bytes are counted here.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from rlcore.collectives import Group, all_gather, group_rank, group_size
from tools.bench.problem import shard_bounds, shard_sizes


class Exchange:
    """The all-to-all of one vocabulary, with the bytes this rank handed in."""

    def __init__(self, vocab_size: int, tp_group: Group) -> None:
        self.group = tp_group
        self.size, self.rank = group_size(tp_group), group_rank(tp_group)
        self.widths = shard_sizes(vocab_size, self.size)
        self.sent_bytes = 0

    def token_counts(self, num_tokens: int) -> list[int]:
        """Tokens of a chunk that each rank takes."""
        return shard_sizes(num_tokens, self.size)

    def own_tokens(self, num_tokens: int) -> slice:
        """Which tokens of a chunk this rank takes."""
        bounds = shard_bounds(num_tokens, self.size)
        return slice(bounds[self.rank], bounds[self.rank + 1])

    def to_tokens(self, chunk_nv: torch.Tensor) -> torch.Tensor:
        """`[n, v]` on each rank -> whole rows `[own n, V]`. One all-to-all."""
        counts = self.token_counts(chunk_nv.shape[0])
        if self.size == 1:
            return chunk_nv
        own = counts[self.rank]
        received = self._all_to_all(
            chunk_nv.reshape(-1),
            [count * chunk_nv.shape[1] for count in counts],
            [own * width for width in self.widths],
        )
        parts = received.split([own * width for width in self.widths])
        return torch.cat(
            [part.view(own, width) for part, width in zip(parts, self.widths, strict=True)], dim=1
        )

    def to_columns(self, rows_nV: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Whole rows `[own n, V]` on each rank -> `[n, v]`, all tokens of the chunk. One all-to-all."""
        if self.size == 1:
            return rows_nV
        counts, own = self.token_counts(num_tokens), rows_nV.shape[0]
        received = self._all_to_all(
            torch.cat([part.reshape(-1) for part in rows_nV.split(self.widths, dim=1)]),
            [own * width for width in self.widths],
            [count * self.widths[self.rank] for count in counts],
        )
        return received.view(num_tokens, self.widths[self.rank])

    def all_tokens(self, value_n: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """One number of each own token -> of every token of the chunk. One padded all-gather."""
        counts = self.token_counts(num_tokens)
        if self.size == 1:
            return value_n
        padded = torch.nn.functional.pad(value_n, (0, max(counts) - value_n.shape[0]))
        self.sent_bytes += padded.numel() * padded.element_size()
        gathered_rn = all_gather(padded, self.group)
        return torch.cat([row[:count] for row, count in zip(gathered_rn, counts, strict=True)])

    def whole_rows(self, chunk_nv: torch.Tensor) -> torch.Tensor:
        """`[n, v]` on each rank -> whole rows `[n, V]` on every rank. One all-gather, padded to one width."""
        if self.size == 1:
            return chunk_nv
        padded = torch.nn.functional.pad(chunk_nv, (0, max(self.widths) - chunk_nv.shape[1]))
        self.sent_bytes += padded.numel() * padded.element_size()
        gathered_rnv = all_gather(padded, self.group)
        return torch.cat(
            [part[:, :width] for part, width in zip(gathered_rnv, self.widths, strict=True)], dim=1
        )

    def _all_to_all(self, flat: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        out = torch.empty(sum(receive), dtype=flat.dtype, device=flat.device)
        self.sent_bytes += flat.numel() * flat.element_size()
        # Every rank waits for a part from every other; all of them walk the same chunks.
        dist.all_to_all_single(out, flat, receive, send, group=self.group)
        return out
