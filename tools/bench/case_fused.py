"""The head fused into the op, against a matmul and the op: time, and peak memory at two token counts."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlcore.collectives import Group, all_reduce_
from rlcore.ops.logprob import TokenLogprobs, vocab_parallel_logprob
from rlcore.sampling import SamplingSpec
from tools.bench.measure import Counted, Method, count_traffic, time_alternately, warm_and_count
from tools.bench.options import BenchOptions
from tools.bench.problem import Problem, draw_targets, shard_bounds, take_shard, with_spec
from tools.bench.ranks import CheckFailed, run_ranks

Row = dict[str, Any]
# Hidden width D, as in SmolLM2-135M, and the spread of the logits that a random head gives.
HIDDEN = 576
LOGITS_STD = 3.0
SPEC = SamplingSpec(top_k=50, top_p=0.95)
# The fused forms hold logits of this part of the tokens at once; the second count doubles the tokens only.
CHUNKS = 4
# Logprobs absolute, gradients relative to their largest entry: matmuls of other shapes round otherwise.
TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class HeadProblem:
    """Hidden states and this rank's rows of the head, both leaves; `problem` holds the rest."""

    hidden_td: torch.Tensor
    weight_vd: torch.Tensor
    problem: Problem
    chunk_tokens: int

    @property
    def leaves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What gradients are asked for."""
        return self.hidden_td, self.weight_vd

    def first(self, num_tokens: int) -> HeadProblem:
        """The first tokens alone, with the same chunk."""
        hidden_td = self.hidden_td.detach()[:num_tokens].clone().requires_grad_()
        return replace(self, hidden_td=hidden_td, problem=self.problem.first(num_tokens))


def run_fused(options: BenchOptions) -> list[Row]:
    """Both forms of the fused head. `ValueError` where this checkout has none."""
    fused_functions()
    return run_ranks(_fused_rank, options.tp, options.device, options)[0]


def fused_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`linear_vocab_parallel_logprob`, `linear_logprob_loss`."""
    try:
        module = importlib.import_module("rlcore.ops.linear_logprob")
    except ModuleNotFoundError as error:
        raise ValueError(
            "--case fused needs rlcore/ops/linear_logprob.py, which this checkout does not have."
        ) from error
    return module.linear_vocab_parallel_logprob, module.linear_logprob_loss


def _fused_rank(group: Group, options: BenchOptions) -> list[Row]:
    # Both memory counts take their tokens from one problem of twice the size.
    large = _make(group, options)
    small = large.first(options.tokens)
    methods = _methods(small)
    counted = {name: warm_and_count(method, options.device) for name, method in methods.items()}
    for name in ("linear_logprob", "linear_logprob_loss"):
        _check(name, counted[name], counted["matmul_op"], small)
    grown = {
        name: warm_and_count(method, options.device).extra_peak_bytes
        for name, method in _methods(large).items()
    }
    times = time_alternately(methods, {}, options.repeats, group, options.device)
    rows = []
    for name, method in methods.items():
        traffic = count_traffic(method)
        growth = grown[name] - counted[name].extra_peak_bytes
        rows.append(
            {
                "name": name,
                "fwd_bwd_s": times[name].median,
                "ours_quartiles_s": times[name].spread,
                "vs_matmul_op": times[name].median / times["matmul_op"].median,
                "peak_bytes": counted[name].extra_peak_bytes,
                "peak_bytes_twice_the_tokens": grown[name],
                "peak_growth": grown[name] / counted[name].extra_peak_bytes,
                "peak_growth_bytes_per_token": growth / options.tokens,
                "logits_bytes_per_token": small.problem.shard_bytes / options.tokens,
                "comm_bytes_per_token": traffic.sent_bytes / options.tokens,
                "comm_calls_forward": traffic.forward_calls,
                "comm_calls_backward": traffic.backward_calls,
            }
        )
    return rows


def _make(group: Group, options: BenchOptions) -> HeadProblem:
    generator = torch.Generator().manual_seed(0)
    num_tokens = 2 * options.tokens
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator)
    weight = torch.randn(options.vocab, HIDDEN, generator=generator) * (LOGITS_STD / HIDDEN**0.5)
    logits = hidden @ weight.t()
    problem = take_shard(logits, draw_targets(logits), group, options.dtype, options.device)
    bounds = shard_bounds(options.vocab, options.tp)
    rank = 0 if group is None else group.rank()
    own = weight[bounds[rank] : bounds[rank + 1]]
    return HeadProblem(
        hidden_td=hidden.to(options.device, options.dtype).requires_grad_(),
        weight_vd=own.to(options.device, options.dtype, copy=True).requires_grad_(),
        problem=with_spec(problem, SPEC, options.backend),
        chunk_tokens=max(1, options.tokens // CHUNKS),
    )


def _methods(head: HeadProblem) -> dict[str, Method]:
    problem = head.problem
    fused, fused_loss = fused_functions()
    place = (problem.spec, problem.tp_group, problem.vocab)

    def matmul_op() -> torch.Tensor:
        logits_tv = head.hidden_td @ head.weight_vd.t()
        return vocab_parallel_logprob(logits_tv, problem.target_t, *place, backend=problem.backend).logprob_t

    def matmul_op_backward(logprob_t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden_grad, weight_grad = torch.autograd.grad(logprob_t, head.leaves, problem.upstream_t)
        return all_reduce_(hidden_grad, "sum", problem.tp_group), weight_grad

    def linear_logprob() -> torch.Tensor:
        options = {"backend": problem.backend, "chunk_tokens": head.chunk_tokens}
        return fused(head.hidden_td, head.weight_vd, problem.target_t, *place, **options).logprob_t

    def summand(scores: TokenLogprobs, chunk: slice) -> tuple[torch.Tensor, torch.Tensor]:
        kept_t = torch.where(scores.keep_t, scores.logprob_t, 0.0)
        return (kept_t * problem.upstream_t[chunk]).sum(), scores.logprob_t.detach()

    def linear_logprob_loss() -> torch.Tensor:
        return fused_loss(
            head.hidden_td,
            head.weight_vd,
            problem.target_t,
            problem.spec,
            summand,
            problem.tp_group,
            problem.vocab,
            backend=problem.backend,
            chunk_tokens=head.chunk_tokens,
        )[0]

    return {
        "matmul_op": Method(forward=matmul_op, backward=matmul_op_backward),
        "linear_logprob": Method(
            forward=linear_logprob,
            backward=lambda logprob_t: torch.autograd.grad(logprob_t, head.leaves, problem.upstream_t),
        ),
        "linear_logprob_loss": Method(
            forward=linear_logprob_loss, backward=lambda loss: torch.autograd.grad(loss, head.leaves)
        ),
    }


def _check(name: str, ours: Counted, other: Counted, head: HeadProblem) -> None:
    """Values and both gradients equal those of matmul and op."""
    expected = other.result
    if ours.result.dim() == 0:
        kept_t = torch.where(torch.isfinite(expected), expected, 0.0)
        expected = (kept_t * head.problem.upstream_t).sum()
    finite = torch.isfinite(expected)
    if not torch.equal(finite, torch.isfinite(ours.result)):
        raise CheckFailed(f"{name}: other targets are in the support than with matmul and op")
    # bfloat16 logits of differently shaped matmuls differ by a rounding of 2^-8.
    tolerance = TOLERANCE if head.hidden_td.dtype == torch.float32 else 2.0**-4
    pairs = [("values", torch.where(finite, ours.result, 0.0), torch.where(finite, expected, 0.0))]
    pairs += zip(("hidden gradient", "weight gradient"), ours.grads, other.grads, strict=True)
    for what, got, want in pairs:
        gap = float((got.float() - want.float()).abs().max())
        bound = tolerance * max(1.0 if what == "values" else 0.0, float(want.float().abs().max()))
        if not gap <= bound:
            raise CheckFailed(f"{name}: {what} differ by {gap:.3g}, allowed {bound:.3g}")
