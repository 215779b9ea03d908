"""The losses, value and gradient, against a floor that reads the same inputs, writes the same outputs once.

The floor of a row is one compiled loop with next to no arithmetic: every input is added up, every output is
that sum plus a constant, the value is its total. It has its gradient when the forward ends and knows no
autograd; a second floor runs the same loop as an autograd function, which any loss with a gradient needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlcore.collectives import Group
from rlcore.ops.aggregation import count_step, count_tokens, seq_mean_token_mean
from rlcore.ops.kl import k3
from rlcore.ops.loss import ClipBounds, PolicyTokens, cispo_terms, clip_terms, reinforce_terms
from rlcore.ops.pointwise import differentiable, evaluate
from rlcore.ops.segments import Segments
from rlcore.ops.sequence_loss import gspo_terms
from tools.bench.measure import Method, time_alternately
from tools.bench.options import BenchOptions
from tools.bench.ranks import CheckFailed, run_ranks

Row = dict[str, Any]
BOUNDS = ClipBounds(low=0.2, high=0.28)
# Tokens of a sequence.
LENGTH = 512
# Relative difference to float64 of the loss, and of the gradient to its largest entry.
TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class LossProblem:
    """Packed tokens; the logprobs are a leaf."""

    tokens: PolicyTokens
    """With the token mean's multiplier, 0-dim."""
    segments: Segments
    per_token_t: torch.Tensor
    """`[t]`: the multiplier of the sequence mean of token means."""
    weight_t: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class LossRow:
    """One row of the case."""

    run: Callable[[], torch.Tensor]
    """The value, with a graph."""
    exact: Callable[[torch.Tensor], torch.Tensor]
    """The same from float64 logprobs, by autograd."""
    reads: tuple[torch.Tensor, ...]
    num_floats: int
    """float32 outputs per token, the gradient among them."""
    num_bools: int


def run_loss(options: BenchOptions) -> list[Row]:
    """One process: the losses communicate nothing without context parallelism."""
    return run_ranks(loss_rank, 1, options.device, options)[0]


def loss_rank(group: Group, options: BenchOptions) -> list[Row]:
    """The rows of one process."""
    problem = make_problem(options.tokens, options.device)
    x_t = problem.tokens.logprob_t
    results = []
    for name, row in loss_rows(problem).items():
        ours = Method(forward=row.run, backward=lambda value: torch.autograd.grad(value, x_t))
        methods = {"ours": ours, "floor": bare_floor(row, name), "autograd_floor": autograd_floor(row, x_t)}
        _check(name, ours, row.exact, x_t)
        for method in methods.values():
            method.backward(method.forward())
        times = time_alternately(methods, {}, options.repeats, group, options.device)
        results.append(
            {
                "name": name,
                "fwd_bwd_s": times["ours"].median,
                "ours_quartiles_s": times["ours"].spread,
                "ns_per_token": times["ours"].median / options.tokens * 1e9,
                "floor_s": times["floor"].median,
                "vs_floor": times["ours"].median / times["floor"].median,
                "vs_autograd_floor": times["ours"].median / times["autograd_floor"].median,
            }
        )
    return results


def make_problem(num_tokens: int, device: str) -> LossProblem:
    """Sequences of LENGTH tokens one after the other; a sixth of the tokens masked."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> torch.Tensor:
        return torch.randn(num_tokens, generator=generator)

    old_t = draw() - 3.0
    logprob_t = (old_t + 0.2 * draw()).to(device).requires_grad_()
    mask_t = (draw() > -1.0).to(device)
    segment_t = torch.arange(num_tokens, device=device) // LENGTH
    segments = Segments(segment_t=segment_t, num_segments=(num_tokens - 1) // LENGTH + 1)
    counts = count_step([count_tokens(mask_t, segments)])[0]
    tokens = PolicyTokens(
        logprob_t=logprob_t,
        old_logprob_t=old_t.to(device),
        advantage_t=draw().to(device),
        mask_t=mask_t,
        multiplier_t=1.0 / mask_t.sum().float(),
    )
    return LossProblem(
        tokens=tokens,
        segments=segments,
        per_token_t=seq_mean_token_mean(mask_t, segments, counts),
        weight_t=(0.3 * draw()).exp().clamp(max=2.0).to(device),
    )


@dataclass(frozen=True, kw_only=True)
class Formulas:
    """The losses by autograd, from float64 logprobs `x_t [t]`. Results `[t]`, unmasked, or 0-dim."""

    problem: LossProblem

    def log_ratio(self, x_t: torch.Tensor) -> torch.Tensor:
        """logprob - old logprob."""
        assert self.problem.tokens.old_logprob_t is not None
        return x_t - self.problem.tokens.old_logprob_t.double()

    def sequence_ratio(self, x_t: torch.Tensor) -> torch.Tensor:
        """exp of the sequence's mean log ratio; each token has its own credit, as the loss has it."""
        mask_t, segments = self.problem.tokens.mask_t, self.problem.segments
        log_ratio_t = torch.where(mask_t, self.log_ratio(x_t), 0.0)
        sums_s = log_ratio_t.new_zeros(segments.num_segments).index_add(0, segments.segment_t, log_ratio_t)
        counts_s = torch.zeros_like(sums_s).index_add(0, segments.segment_t, mask_t.double())
        mean_t = (sums_s / counts_s.clamp(min=1))[segments.segment_t].detach()
        return (mean_t + log_ratio_t - log_ratio_t.detach()).exp()

    def clip(self, ratio_t: torch.Tensor) -> torch.Tensor:
        """The clipped surrogate."""
        advantage_t = self.problem.tokens.advantage_t.double()
        bounded_t = ratio_t.clamp(1.0 - BOUNDS.low, 1.0 + BOUNDS.high)
        return -torch.minimum(ratio_t * advantage_t, bounded_t * advantage_t)

    def cispo(self, x_t: torch.Tensor) -> torch.Tensor:
        """A stopped, clipped weight."""
        weight_t = self.log_ratio(x_t).exp().clamp(1.0 - BOUNDS.low, 1.0 + BOUNDS.high).detach()
        return -weight_t * self.problem.tokens.advantage_t.double() * x_t

    def k3(self, x_t: torch.Tensor) -> torch.Tensor:
        """With the score-function term."""
        d_t = self.log_ratio(x_t)
        value_t = (-d_t).exp() - 1 + d_t
        return value_t + value_t.detach() * (x_t - x_t.detach())

    def mean(self, loss_t: torch.Tensor) -> torch.Tensor:
        """Over the mask."""
        return loss_t[self.problem.tokens.mask_t].mean()

    def weighted_mean(self, loss_t: torch.Tensor) -> torch.Tensor:
        """Times importance weight and multiplier."""
        factor_t = self.problem.weight_t.double() * self.problem.per_token_t.double()
        return (loss_t * factor_t)[self.problem.tokens.mask_t].sum()


def loss_rows(problem: LossProblem) -> dict[str, LossRow]:
    """What is measured."""
    tokens, segments, exact = problem.tokens, problem.segments, Formulas(problem=problem)
    assert tokens.old_logprob_t is not None
    x_t, old_t, advantage_t, mask_t = (
        tokens.logprob_t,
        tokens.old_logprob_t,
        tokens.advantage_t,
        tokens.mask_t,
    )
    four = (x_t, old_t, advantage_t, mask_t)
    weighted = replace(tokens, weight_t=problem.weight_t, multiplier_t=problem.per_token_t)

    def row(run: Callable[[], Any], formula: Callable[..., torch.Tensor], *reads: torch.Tensor) -> LossRow:
        # Gradient, loss, ratio, log ratio; two decisions.
        return LossRow(run=lambda: run().total, exact=formula, reads=reads, num_floats=4, num_bools=2)

    kl = row(
        lambda: k3(x_t, old_t, mask_t, multiplier_t=tokens.multiplier_t),
        lambda x_t: exact.mean(exact.k3(x_t)),
        *(x_t, old_t, mask_t),
    )
    return {
        "clip_token_mean": row(
            lambda: clip_terms(tokens, BOUNDS),
            lambda x_t: exact.mean(exact.clip(exact.log_ratio(x_t).exp())),
            *four,
        ),
        "clip_weighted_seq_mean": row(
            lambda: clip_terms(weighted, BOUNDS),
            lambda x_t: exact.weighted_mean(exact.clip(exact.log_ratio(x_t).exp())),
            *(*four, problem.weight_t, problem.per_token_t),
        ),
        "gspo": row(
            lambda: gspo_terms(tokens, BOUNDS, segments),
            lambda x_t: exact.mean(exact.clip(exact.sequence_ratio(x_t))),
            *(*four, segments.segment_t),
        ),
        "cispo": row(lambda: cispo_terms(tokens, BOUNDS), lambda x_t: exact.mean(exact.cispo(x_t)), *four),
        "reinforce": row(
            lambda: reinforce_terms(tokens),
            lambda x_t: exact.mean(-advantage_t.double() * x_t),
            *(x_t, advantage_t, mask_t),
        ),
        # Gradient and KL; one decision.
        "kl_k3": replace(kl, num_floats=2, num_bools=1),
    }


def bare_floor(row: LossRow, name: str) -> Method:
    """The compiled loop called directly, and a gradient that is there already."""
    kinds = [read_t.dtype == torch.bool for read_t in row.reads]
    # Bools as bytes, which the compiler vectorises; views are made once.
    reads = [
        read_t.detach().view(torch.uint8) if is_bool else read_t.detach()
        for read_t, is_bool in zip(row.reads, kinds, strict=True)
    ]

    def touch_bytes(*reads_t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        unpacked = [
            read_t.float() > 0 if is_bool else read_t for read_t, is_bool in zip(reads_t, kinds, strict=True)
        ]
        value, *outputs = _touch(unpacked[0], row.num_floats, row.num_bools, *unpacked[1:])
        as_bytes = [torch.where(flag_t, 1.0, 0.0).to(torch.uint8) for flag_t in outputs[row.num_floats :]]
        return value, *outputs[: row.num_floats], *as_bytes

    # A code object of its own: the compiler counts versions per code object.
    touch_bytes.__code__ = touch_bytes.__code__.replace(co_name=f"touch_{name}")
    compiled = torch.compile(touch_bytes, dynamic=True)
    kept: list[torch.Tensor] = []

    def forward() -> torch.Tensor:
        value, *kept[:] = compiled(*reads)
        return value

    return Method(forward=forward, backward=lambda value: (kept[0],))


def autograd_floor(row: LossRow, x_t: torch.Tensor) -> Method:
    """The same loop as an autograd function, by the way our losses take."""
    arguments = (row.num_floats, row.num_bools, *row.reads[1:])
    kept: list[torch.Tensor] = []

    def forward() -> torch.Tensor:
        value, *kept[:] = differentiable(x_t, lambda x_t: evaluate(_touch, x_t, *arguments))
        return value

    return Method(forward=forward, backward=lambda value: torch.autograd.grad(value, x_t))


def _touch(
    first_t: torch.Tensor, num_floats: int, num_bools: int, *rest_t: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Value, `num_floats` and `num_bools` outputs; each input is read once."""
    sum_t = first_t
    for read_t in rest_t:
        sum_t = sum_t + (torch.where(read_t, 1.0, 0.0) if read_t.dtype == torch.bool else read_t.float())
    floats = [sum_t + float(index) for index in range(num_floats)]
    return sum_t.sum(), *floats, *(sum_t > float(index) for index in range(num_bools))


def _check(
    name: str, method: Method, exact: Callable[[torch.Tensor], torch.Tensor], logprob_t: torch.Tensor
) -> None:
    whole_t = logprob_t.detach().double().requires_grad_()
    expected = exact(whole_t)
    (expected_grad_t,) = torch.autograd.grad(expected, whole_t)
    value = method.forward()
    (grad_t,) = method.backward(value)
    gap = abs(value.item() - expected.item())
    grad_gap = float((grad_t.double() - expected_grad_t).abs().max())
    if gap > TOLERANCE * max(1.0, abs(expected.item())):
        raise CheckFailed(f"{name}: the loss differs from float64 by {gap:.3g}")
    if grad_gap > TOLERANCE * float(expected_grad_t.abs().max()):
        raise CheckFailed(f"{name}: the gradient differs from float64 by {grad_gap:.3g}")
