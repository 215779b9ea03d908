"""The floor: what a vocab-parallel log-softmax costs that truncates nothing.

One pass for the row's max and sum of exp, the target's logit, one all-gather of three numbers a token, one
pass that writes the gradient. Compiled where ours is compiled, eager and chunked where ours is. Temperature
1, every logit finite: it does none of the work that a truncated op, banned ids or validation need.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from rlcore.collectives import Group, all_gather
from rlcore.ops.logprob import VocabShard
from rlcore.ops.passes import EAGER, row_chunks, select_passes
from tools.bench.problem import Problem

Pass = Callable[..., torch.Tensor]


def plain_logprob(problem: Problem) -> torch.Tensor:
    """`[t]` logprobs of the whole distribution."""
    eager = select_passes(problem.backend, problem.logits_tv) is EAGER
    passes = (_eager_statistics, _eager_gradient) if eager else _compiled()
    return _PlainLogprob.apply(problem.logits_tv, problem.target_t, problem.vocab, problem.tp_group, passes)


def _statistics(logits_tv: torch.Tensor) -> torch.Tensor:
    """`[t, 2]`: max, and sum of exp relative to it."""
    # Converted at each use: one name for the float32 logits would be a tensor that the compiler writes out.
    max_t = logits_tv.amax(dim=1).float()
    return torch.stack([max_t, (logits_tv.float() - max_t[:, None]).exp().sum(dim=1)], dim=1)


def _gradient(logits_tv: torch.Tensor, log_sum_t: torch.Tensor, upstream_t: torch.Tensor) -> torch.Tensor:
    """`[t, v]` without the target's own term."""
    p_tv = (logits_tv.float() - log_sum_t[:, None]).exp()
    return (-upstream_t[:, None] * p_tv).to(logits_tv.dtype)


def _eager_statistics(logits_tv: torch.Tensor) -> torch.Tensor:
    return torch.cat([_statistics(logits_tv[chunk]) for chunk in row_chunks(*logits_tv.shape)])


def _eager_gradient(
    logits_tv: torch.Tensor, log_sum_t: torch.Tensor, upstream_t: torch.Tensor
) -> torch.Tensor:
    out_tv = torch.empty_like(logits_tv)
    for chunk in row_chunks(*logits_tv.shape):
        out_tv[chunk] = _gradient(logits_tv[chunk], log_sum_t[chunk], upstream_t[chunk])
    return out_tv


@cache
def _compiled() -> tuple[Pass, Pass]:
    return torch.compile(_statistics, dynamic=True), torch.compile(_gradient, dynamic=True)


class _PlainLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_tv: torch.Tensor,
        target_t: torch.Tensor,
        vocab: VocabShard,
        tp_group: Group,
        passes: tuple[Pass, Pass],
    ) -> torch.Tensor:
        column_t = target_t - vocab.start
        here_t = (column_t >= 0) & (column_t < logits_tv.shape[1])
        column_t = torch.where(here_t, column_t, 0)
        picked_t = logits_tv.gather(1, column_t[:, None])[:, 0].float()
        own_t3 = torch.cat([passes[0](logits_tv), torch.where(here_t, picked_t, -torch.inf)[:, None]], dim=1)
        max_rt, sum_rt, target_rt = all_gather(own_t3, tp_group).unbind(dim=2)
        max_t = max_rt.amax(dim=0)
        log_sum_t = max_t + ((max_rt - max_t).exp() * sum_rt).sum(dim=0).log()
        ctx.save_for_backward(logits_tv, log_sum_t, here_t, column_t)
        ctx.write_gradient = passes[1]
        return target_rt.amax(dim=0) - log_sum_t

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_t: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits_tv, log_sum_t, here_t, column_t = ctx.saved_tensors
        grad_tv = ctx.write_gradient(logits_tv, log_sum_t, upstream_t)
        own_t = torch.where(here_t, upstream_t, 0.0).to(grad_tv.dtype)
        row_t = torch.arange(grad_tv.shape[0], device=grad_tv.device)
        grad_tv[row_t, column_t] = grad_tv[row_t, column_t] + own_t
        return grad_tv, None, None, None, None
