"""The LM head as the fused op sees it: how it is cut, logits of one chunk of tokens, gradients that grow by
chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import torch

from rlcore.collectives import Group, all_gather, all_reduce_, group_rank, group_size, reduce_scatter
from rlcore.ops.inputs import check_coverage, check_ids
from rlcore.ops.logprob import (
    ScoredRows,
    TokenLogprobs,
    VocabShard,
    rows_gradient,
    score_rows,
)
from rlcore.ops.passes import Passes, select_passes
from rlcore.ops.replay import Replayed
from rlcore.sampling import RowSampling, SamplingSpec
from rlcore.sampling_mask import SamplingMask

# Tokens whose logits exist at once. Fewer make the head's weight gradient bound by memory traffic on a GPU:
# each chunk reads and writes all of it.
CHUNK_TOKENS = 1024


class HeadOptions(TypedDict, total=False):
    """Keyword arguments of both forms."""

    replay: SamplingMask | None
    """The ids that the sampler kept, a row each of the T tokens, in place of a search: as for
    `vocab_parallel_logprob`. Default None.
    """
    entropy: bool
    """Also compute both entropies. Default False."""
    backend: str
    """As for `vocab_parallel_logprob`; default `"auto"`."""
    chunk_tokens: int
    """Tokens whose logits exist at once; default CHUNK_TOKENS. The same on all ranks of the group."""
    validate: bool | None
    """Check ids and rows and raise; it reads values back, so None (the default) checks CPU tensors only."""
    sequence_parallel: bool
    """Is `hidden_td` this rank's share of the tokens? Default False: every rank holds all of them."""
    reduce_hidden_grad: bool
    """Add the gradients of `hidden_td` up over the group, as the backward of Megatron's ColumnParallelLinear
    does? Default True. False where the caller's own graph does it: `hidden_td` went through Megatron's
    `copy_to_tensor_model_parallel_region` or `gather_from_sequence_parallel_region`.
    """


@dataclass(frozen=True, kw_only=True)
class LinearHead:
    """What both forms share besides hidden and weight; the defaults of `HeadOptions`."""

    target_t: torch.Tensor
    spec: SamplingSpec | RowSampling
    tp_group: Group
    vocab: VocabShard
    replay: SamplingMask | None = None
    entropy: bool = False
    backend: str = "auto"
    chunk_tokens: int = CHUNK_TOKENS
    validate: bool | None = None
    sequence_parallel: bool = False
    reduce_hidden_grad: bool = True

    @staticmethod
    def of(
        hidden_td: torch.Tensor,
        weight_vd: torch.Tensor,
        target_t: torch.Tensor,
        spec: SamplingSpec | RowSampling,
        tp_group: Group,
        vocab: VocabShard | None,
        options: HeadOptions,
    ) -> LinearHead:
        """The checked arguments, with defaults for what is left out."""
        width = weight_vd.shape[0]
        vocab = vocab or VocabShard(
            start=group_rank(tp_group) * width, vocab_size=width * group_size(tp_group)
        )
        head = LinearHead(target_t=target_t, spec=spec, tp_group=tp_group, vocab=vocab, **options)
        _check(hidden_td, weight_vd, head)
        validate = hidden_td.device.type == "cpu" if head.validate is None else head.validate
        if validate:
            check_coverage(weight_vd.t(), vocab.start, vocab.vocab_size, tp_group)
            check_ids(target_t, vocab.vocab_size, head.replay, None)
        return replace(head, validate=validate)

    def chunks(self) -> Iterator[slice]:
        """Token slices of `chunk_tokens`, the last one shorter; one empty slice for no tokens."""
        num_tokens = self.target_t.shape[0]
        for start in range(0, max(num_tokens, 1), self.chunk_tokens):
            yield slice(start, min(start + self.chunk_tokens, num_tokens))

    def gather(self, hidden_td: torch.Tensor) -> torch.Tensor:
        """`[T, D]`: the hidden states of all tokens."""
        return all_gather(hidden_td, self.tp_group).flatten(0, 1) if self.sequence_parallel else hidden_td

    def reduce_(self, grad_td: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of this rank's `hidden_td`, from its shard's part of that of all tokens."""
        if grad_td is None:
            return None
        if self.sequence_parallel:
            return reduce_scatter(grad_td, self.tp_group)
        return all_reduce_(grad_td, "sum", self.tp_group) if self.reduce_hidden_grad else grad_td

    def real_rows(self, weight_vd: torch.Tensor) -> torch.Tensor:
        """A view without this shard's padding rows: nobody multiplies by what they hold."""
        return weight_vd[: max(0, min(weight_vd.shape[0], self.vocab.vocab_size - self.vocab.start))]

    def logits(self, hidden_td: torch.Tensor, weight_vd: torch.Tensor, chunk: slice) -> torch.Tensor:
        """`[c, v]` of the chunk's tokens and this shard's real rows."""
        return hidden_td[chunk] @ self.real_rows(weight_vd).t()

    def passes(self, logits_cv: torch.Tensor) -> Passes:
        """What suits a whole chunk: the last, shorter one takes the same. The stand-in holds one number."""
        rows = min(self.chunk_tokens, self.target_t.shape[0])
        return select_passes(self.backend, logits_cv.new_empty(()).expand(rows, logits_cv.shape[1]))

    def score(self, logits_cv: torch.Tensor, chunk: slice) -> tuple[TokenLogprobs, ScoredRows]:
        """The op on one chunk."""
        spec: SamplingSpec | RowSampling | Replayed = self.spec
        if self.replay is not None:
            spec = Replayed(spec, self.replay).rows(chunk)
        elif isinstance(spec, RowSampling):
            spec = spec.rows(chunk)
        passes, target_c = self.passes(logits_cv), self.target_t[chunk]
        return score_rows(passes, logits_cv, target_c, spec, self.tp_group, self.vocab, self.entropy)

    def logits_gradient(
        self, logits_cv: torch.Tensor, saved: ScoredRows, upstream: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        """`[c, v]` from the incoming gradients of the chunk's outputs."""
        return rows_gradient(self.passes(logits_cv), logits_cv, self.vocab, saved, upstream, self.entropy)


@dataclass(frozen=True, kw_only=True)
class HeadGradients:
    """Gradients of hidden and weight while they grow chunk by chunk; None where nobody asks."""

    hidden_td: torch.Tensor | None
    """`[T, D]`, this shard's part."""
    weight_vd: torch.Tensor | None
    """`[v, D]`, at least float32: many chunks are added up."""

    @staticmethod
    def zeros(hidden_td: torch.Tensor, weight_vd: torch.Tensor, wants: Sequence[bool]) -> HeadGradients:
        """Of no chunk yet. `wants`: is each of the two asked for?"""
        dtype = torch.promote_types(weight_vd.dtype, torch.float32)
        return HeadGradients(
            hidden_td=torch.zeros_like(hidden_td, memory_format=torch.contiguous_format)
            if wants[0]
            else None,
            weight_vd=weight_vd.new_zeros(weight_vd.shape, dtype=dtype) if wants[1] else None,
        )

    def add_(self, chunk: slice, grad_cv: torch.Tensor, hidden_td: torch.Tensor, weight_vd: torch.Tensor):
        """Adds one chunk's part. `weight_vd`: the real rows only; those of padding keep their zeros."""
        if self.hidden_td is not None:
            torch.mm(grad_cv, weight_vd, out=self.hidden_td[chunk])
        if self.weight_vd is None:
            return
        total_vd, hidden_cd = self.weight_vd[: weight_vd.shape[0]], hidden_td[chunk]
        if total_vd.dtype == grad_cv.dtype:
            total_vd.addmm_(grad_cv.t(), hidden_cd)
        elif grad_cv.is_cuda:
            # Tensor cores multiply half precision and sum in float32: no operand is copied.
            total_vd += torch.mm(grad_cv.t(), hidden_cd, out_dtype=total_vd.dtype)
        else:
            total_vd.addmm_(grad_cv.t().to(total_vd.dtype), hidden_cd.to(total_vd.dtype))


def _check(hidden_td: torch.Tensor, weight_vd: torch.Tensor, head: LinearHead) -> None:
    """`ValueError` unless shapes, dtypes and options fit together."""
    target_t = head.target_t
    if hidden_td.dim() != 2 or weight_vd.dim() != 2 or hidden_td.shape[1] != weight_vd.shape[1]:
        raise ValueError(
            f"hidden states of shape {tuple(hidden_td.shape)}, head weight of shape "
            f"{tuple(weight_vd.shape)}: expected [t, D] and [v, D]. Flatten batch and sequence into one axis."
        )
    if hidden_td.dtype != weight_vd.dtype or not hidden_td.is_floating_point():
        raise ValueError(
            f"hidden states are {hidden_td.dtype} and the head weight {weight_vd.dtype}: expected one float "
            "dtype. Cast one of them."
        )
    num_tokens = hidden_td.shape[0] * (group_size(head.tp_group) if head.sequence_parallel else 1)
    if target_t.shape != (num_tokens,) or target_t.is_floating_point() or target_t.dtype == torch.bool:
        raise ValueError(
            f"targets of shape {tuple(target_t.shape)}, {target_t.dtype}: expected integer ids of shape "
            f"({num_tokens},), one for each token"
            + (" of all ranks of the group (sequence_parallel=True)." if head.sequence_parallel else ".")
        )
    if isinstance(head.spec, RowSampling) and head.spec.num_rows != num_tokens:
        raise ValueError(
            f"sampling parameters of {head.spec.num_rows} rows for {num_tokens} tokens: expected one each."
        )
    if head.replay is not None and head.replay.num_rows != num_tokens:
        raise ValueError(
            f"replay offsets describe {head.replay.num_rows} rows for {num_tokens} tokens: expected one each."
        )
    if head.chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={head.chunk_tokens}: expected at least 1.")
    if head.sequence_parallel and not head.reduce_hidden_grad:
        raise ValueError(
            "sequence_parallel=True with reduce_hidden_grad=False: the gradient of a rank's tokens needs all "
            "shards. Set reduce_hidden_grad=True, or gather hidden yourself and set sequence_parallel=False."
        )
