"""The data of a measurement: one rank's shard of rows of a stated kind, the same whole on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from rlcore.collectives import Group, group_rank, group_size
from rlcore.ops.logprob import VocabShard
from rlcore.sampling import SamplingSpec

# Mass that the few large ids of a peaked row hold together, and how many there are at most.
PEAKED_MASS = 0.97
PEAKED_IDS = 8
# Standard deviation of the logits of a flat row: the 0.95 nucleus is then about a third of the vocabulary.
FLAT_STD = 2.0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One call's input on this rank."""

    logits_tv: torch.Tensor
    """`[t, v]`, a leaf that requires a gradient."""
    target_t: torch.Tensor
    """`[t]` int64, the same on all ranks."""
    upstream_t: torch.Tensor
    """`[t]` float32: gradient that arrives at the logprobs."""
    spec: SamplingSpec
    vocab: VocabShard
    tp_group: Group
    backend: str

    @property
    def num_tokens(self) -> int:
        """t."""
        return self.logits_tv.shape[0]

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's logits."""
        return self.logits_tv.numel() * self.logits_tv.element_size()

    def first(self, num_tokens: int) -> Problem:
        """The first rows alone."""
        rows = slice(0, num_tokens)
        return replace(
            self,
            logits_tv=self.logits_tv.detach()[rows].clone().requires_grad_(),
            target_t=self.target_t[rows],
            upstream_t=self.upstream_t[rows],
        )


def make_rows(kind: str, num_tokens: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    """`[T, V]` float32 logits: `flat` (a normal distribution) or `peaked` (2 to 8 ids hold 97%)."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, vocab_size, generator=generator)
    if kind == "flat":
        return logits.mul_(FLAT_STD)
    assert kind == "peaked", kind
    weight_tk = torch.rand(num_tokens, PEAKED_IDS, generator=generator) + 0.05
    num_ids_t = torch.randint(2, PEAKED_IDS + 1, (num_tokens, 1), generator=generator)
    weight_tk = torch.where(torch.arange(PEAKED_IDS) < num_ids_t, weight_tk, 0.0)
    share_tk = weight_tk / weight_tk.sum(dim=1, keepdim=True)
    lift_tk = (share_tk * PEAKED_MASS / (1 - PEAKED_MASS)).log() + logits.logsumexp(dim=1)[:, None]
    # Distinct ids: one from each of PEAKED_IDS equal stretches of the vocabulary.
    stretch = vocab_size // PEAKED_IDS
    id_tk = torch.randint(0, stretch, (num_tokens, PEAKED_IDS), generator=generator)
    id_tk = id_tk + stretch * torch.arange(PEAKED_IDS)
    return logits.scatter_(1, id_tk, torch.where(weight_tk > 0, lift_tk, logits.gather(1, id_tk)))


def draw_targets(logits: torch.Tensor, seed: int = 1) -> torch.Tensor:
    """`[T]` ids: half of the rows take one of their four likeliest, a quarter one drawn from the whole
    distribution, a quarter any. So supports of all sizes have targets inside and outside.
    """
    generator = torch.Generator().manual_seed(seed)
    num_tokens, vocab_size = logits.shape
    likely = logits.topk(4, dim=1).indices
    likely = likely.gather(1, torch.randint(0, 4, (num_tokens, 1), generator=generator))[:, 0]
    anywhere = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    # The Gumbel trick draws from softmax in one pass over a row.
    noise = torch.empty(vocab_size)
    drawn = torch.stack(
        [(row.float() - noise.exponential_(generator=generator).log()).argmax() for row in logits]
    )
    kind = torch.arange(num_tokens) % 4
    return torch.where(kind < 2, likely, torch.where(kind == 2, drawn, anywhere))


def shard_bounds(total: int, num_ranks: int) -> list[int]:
    """First column (or token) of each rank, and the total: shares differ by one at most."""
    return [total * rank // num_ranks for rank in range(num_ranks + 1)]


def shard_sizes(total: int, num_ranks: int) -> list[int]:
    """Columns (or tokens) of each rank."""
    return [stop - start for start, stop in pairwise(shard_bounds(total, num_ranks))]


def take_shard(
    logits: torch.Tensor, target_t: torch.Tensor, tp_group: Group, dtype: torch.dtype, device: str
) -> Problem:
    """This rank's problem from whole rows, nothing truncated yet: see `with_spec`."""
    vocab_size = logits.shape[1]
    bounds, rank = shard_bounds(vocab_size, group_size(tp_group)), group_rank(tp_group)
    start, stop = bounds[rank], bounds[rank + 1]
    generator = torch.Generator().manual_seed(2)
    upstream_t = torch.randn(len(target_t), generator=generator)
    # Away from 0, so that a gradient of 0 says that an id is outside the support.
    upstream_t = upstream_t + torch.copysign(torch.tensor(0.1), upstream_t)
    return Problem(
        logits_tv=logits[:, start:stop].to(device, dtype, copy=True).contiguous().requires_grad_(),
        target_t=target_t.to(device),
        upstream_t=upstream_t.to(device),
        spec=SamplingSpec(),
        vocab=VocabShard(start=start, vocab_size=vocab_size),
        tp_group=tp_group,
        backend="auto",
    )


def with_spec(problem: Problem, spec: SamplingSpec, backend: str) -> Problem:
    """The same rows under a truncation."""
    return replace(problem, spec=spec, backend=backend)


def spec_name(spec: SamplingSpec) -> str:
    """`k50_p95`, `k50`, `p95`, `off`."""
    parts = []
    if spec.effective_top_k:
        parts.append(f"k{spec.effective_top_k}")
    if spec.effective_top_p:
        parts.append(f"p{math.floor(spec.effective_top_p * 100 + 0.5)}")
    return "_".join(parts) or "off"
