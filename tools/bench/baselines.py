"""What others do: truncated logprobs by bringing whole rows together and sorting them.

Two methods, written for this benchmark as a careful user of plain torch would write them: float32, chunks of
tokens so that memory stays bounded, no avoidable copies. `resharding_sort` moves the vocabulary with an
all-to-all, so that each rank sorts its part of the tokens; it saves only the logits and does all of it again
in backward, gradients travelling back by another all-to-all. `gather_sort` gathers the vocabulary on every
rank, sorts all tokens there, and saves which local ids were kept, so that backward neither sends nor sorts.

Both sort whole rows whenever top-p is on. For top-k alone they take `torch.topk` and a threshold, as public
implementations do. Of a group tied at a sorted cut, some ids are kept and some are not, as the sort left
them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from rlcore.sampling import SamplingSpec
from tools.bench.exchange import Exchange
from tools.bench.problem import Problem

# Tokens of a chunk: whole float32 rows of 64 tokens of a vocabulary of 150,000 ids are 39 MB.
CHUNK_TOKENS = 64


def filter_rows(z_nV: torch.Tensor, spec: SamplingSpec) -> torch.Tensor:
    """Whole tempered rows with -inf at every dropped id. Top-k, then top-p on what it left."""
    top_k, top_p = spec.effective_top_k, spec.effective_top_p
    top_k = None if top_k is None or top_k >= z_nV.shape[1] else top_k
    if top_p is None:
        if top_k is None:
            return z_nV
        smallest_n1 = z_nV.topk(top_k, dim=1).values[:, -1:]
        return z_nV.masked_fill(z_nV < smallest_n1, -math.inf)
    sorted_nV, id_nV = z_nV.sort(dim=1)
    if top_k is not None:
        sorted_nV[:, :-top_k] = -math.inf
    mass_nV = sorted_nV.softmax(dim=1).cumsum(dim=1)
    dropped_nV = mass_nV <= 1.0 - top_p
    dropped_nV[:, -1] = False
    sorted_nV.masked_fill_(dropped_nV, -math.inf)
    return torch.empty_like(sorted_nV).scatter_(1, id_nV, sorted_nV)


def resharding_sort(problem: Problem, exchange: Exchange) -> torch.Tensor:
    """`[t]` truncated logprobs by all-to-all and sort; -inf outside the support."""
    return _ReshardingSort.apply(problem.logits_tv, problem.target_t, problem.spec, exchange)


def gather_sort(problem: Problem, exchange: Exchange) -> torch.Tensor:
    """`[t]` truncated logprobs by all-gather and sort; -inf outside the support."""
    return _GatherSort.apply(problem.logits_tv, problem.target_t, problem.spec, exchange, problem.vocab.start)


def chunks(num_tokens: int) -> list[slice]:
    """The tokens in CHUNK_TOKENS."""
    return [
        slice(start, min(start + CHUNK_TOKENS, num_tokens)) for start in range(0, num_tokens, CHUNK_TOKENS)
    ]


class _ReshardingSort(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_tv: torch.Tensor, target_t: torch.Tensor, spec: SamplingSpec, exchange: Exchange
    ) -> torch.Tensor:
        parts = []
        for chunk in chunks(logits_tv.shape[0]):
            target_n = target_t[chunk]
            own = exchange.own_tokens(len(target_n))
            z_nV = exchange.to_tokens(logits_tv[chunk]).float() / spec.effective_temperature
            logprob_nV = filter_rows(z_nV, spec).log_softmax(dim=1)
            picked_n = logprob_nV.gather(1, target_n[own, None])[:, 0]
            parts.append(exchange.all_tokens(picked_n, len(target_n)))
        ctx.save_for_backward(logits_tv, target_t)
        ctx.spec, ctx.exchange = spec, exchange
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_t: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits_tv, target_t = ctx.saved_tensors
        spec, exchange = ctx.spec, ctx.exchange
        grad_tv = torch.empty_like(logits_tv)
        for chunk in chunks(logits_tv.shape[0]):
            target_n = target_t[chunk]
            own = exchange.own_tokens(len(target_n))
            z_nV = exchange.to_tokens(logits_tv[chunk]).float() / spec.effective_temperature
            grad_nV = filter_rows(z_nV, spec).softmax(dim=1)
            kept_n = grad_nV.gather(1, target_n[own, None])[:, 0] > 0
            scale_n = torch.where(kept_n, upstream_t[chunk][own], 0.0) / spec.effective_temperature
            grad_nV.mul_(-scale_n[:, None]).scatter_add_(1, target_n[own, None], scale_n[:, None])
            grad_tv[chunk] = exchange.to_columns(grad_nV.to(grad_tv.dtype), len(target_n))
        return grad_tv, None, None, None


class _GatherSort(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_tv: torch.Tensor,
        target_t: torch.Tensor,
        spec: SamplingSpec,
        exchange: Exchange,
        start: int,
    ) -> torch.Tensor:
        width = logits_tv.shape[1]
        kept_tv = torch.empty(logits_tv.shape, dtype=torch.bool, device=logits_tv.device)
        logprobs, log_sums = [], []
        for chunk in chunks(logits_tv.shape[0]):
            z_nV = exchange.whole_rows(logits_tv[chunk]).float() / spec.effective_temperature
            filtered_nV = filter_rows(z_nV, spec)
            kept_tv[chunk] = filtered_nV[:, start : start + width] > -math.inf
            log_sum_n = filtered_nV.logsumexp(dim=1)
            logprobs.append(filtered_nV.gather(1, target_t[chunk, None])[:, 0] - log_sum_n)
            log_sums.append(log_sum_n)
        logprob_t = torch.cat(logprobs)
        ctx.save_for_backward(logits_tv, target_t, kept_tv, torch.cat(log_sums), logprob_t > -math.inf)
        ctx.spec, ctx.start = spec, start
        return logprob_t

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_t: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits_tv, target_t, kept_tv, log_sum_t, in_support_t = ctx.saved_tensors
        temperature = ctx.spec.effective_temperature
        scale_t = torch.where(in_support_t, upstream_t, 0.0) / temperature
        column_t = target_t - ctx.start
        here_t = (column_t >= 0) & (column_t < logits_tv.shape[1])
        column_t, own_t = torch.where(here_t, column_t, 0), torch.where(here_t, scale_t, 0.0)
        grad_tv = torch.empty_like(logits_tv)
        for chunk in chunks(logits_tv.shape[0]):
            p_nv = (logits_tv[chunk].float() / temperature).sub_(log_sum_t[chunk, None]).exp_()
            p_nv.masked_fill_(~kept_tv[chunk], 0.0).mul_(-scale_t[chunk, None])
            grad_tv[chunk] = p_nv.scatter_add_(1, column_t[chunk, None], own_t[chunk, None])
        return grad_tv, None, None, None, None
