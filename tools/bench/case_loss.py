"""The losses, value and gradient, against a floor that reads the same inputs and writes the same outputs once.

The floor of a row is one compiled loop with next to no arithmetic: every input is added up, every output is that
sum plus a constant, the value is its total. It has its gradient when the forward ends and knows no autograd; a
second floor runs the same loop as an autograd function, which is what any loss with a gradient needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlcore.collectives import Group
from rlcore.ops.aggregation import LossCounts, count_sequences, count_tokens, seq_mean_token_mean
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
    num_tokens_s = count_tokens(mask_t, segments)
    counts = LossCounts(
        num_tokens=num_tokens_s.sum(), num_sequences=count_sequences(num_tokens_s), num_tokens_s=num_tokens_s
    )
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


def loss_rows(problem: LossProblem) -> dict[str, LossRow]:
    """What is measured."""
    tokens, segments = problem.tokens, problem.segments
    assert tokens.old_logprob_t is not None and tokens.multiplier_t is not None
    old_t, advantage_t, mask_t, mean = (
        tokens.old_logprob_t,
        tokens.advantage_t,
        tokens.mask_t,
        tokens.multiplier_t,
    )
    four = (tokens.logprob_t, old_t, advantage_t, mask_t)
    weighted = replace(tokens, weight_t=problem.weight_t, multiplier_t=problem.per_token_t)
    factor_t = problem.weight_t.double() * problem.per_token_t.double()

    def ratio(x_t: torch.Tensor) -> torch.Tensor:
        return (x_t - old_t.double()).exp()

    def sequence_ratio(x_t: torch.Tensor) -> torch.Tensor:
        log_ratio_t = torch.where(mask_t, x_t - old_t.double(), 0.0)
        sums_s = log_ratio_t.new_zeros(segments.num_segments).index_add(0, segments.segment_t, log_ratio_t)
        counts_s = torch.zeros_like(sums_s).index_add(0, segments.segment_t, mask_t.double())
        mean_t = (sums_s / counts_s.clamp(min=1))[segments.segment_t].detach()
        # Each token's own credit, as the loss has it.
        return (mean_t + log_ratio_t - log_ratio_t.detach()).exp()

    def clipped(ratio_t: torch.Tensor) -> torch.Tensor:
        bounded_t = ratio_t.clamp(1.0 - BOUNDS.low, 1.0 + BOUNDS.high)
        return -torch.minimum(ratio_t * advantage_t.double(), bounded_t * advantage_t.double())

    def total(loss_t: torch.Tensor) -> torch.Tensor:
        return loss_t[mask_t].sum() * mean.double()

    def cispo_exact(x_t: torch.Tensor) -> torch.Tensor:
        weight_t = ratio(x_t).clamp(1.0 - BOUNDS.low, 1.0 + BOUNDS.high).detach()
        return total(-weight_t * advantage_t.double() * x_t)

    def k3_exact(x_t: torch.Tensor) -> torch.Tensor:
        d_t = x_t - old_t.double()
        value_t = (-d_t).exp() - 1 + d_t
        return total(value_t + value_t.detach() * (x_t - x_t.detach()))

    def row(run: Callable[[], Any], exact: Callable[..., torch.Tensor], *reads: torch.Tensor) -> LossRow:
        # Gradient, loss, ratio, log ratio; two decisions.
        return LossRow(run=lambda: run().total, exact=exact, reads=reads, num_floats=4, num_bools=2)

    kl = row(lambda: k3(*four[:2], mask_t, multiplier_t=mean), k3_exact, *four[:2], mask_t)
    return {
        "clip_token_mean": row(
            lambda: clip_terms(tokens, BOUNDS), lambda x_t: total(clipped(ratio(x_t))), *four
        ),
        "clip_weighted_seq_mean": row(
            lambda: clip_terms(weighted, BOUNDS),
            lambda x_t: (clipped(ratio(x_t)) * factor_t)[mask_t].sum(),
            *four,
            problem.weight_t,
            problem.per_token_t,
        ),
        "gspo": row(
            lambda: gspo_terms(tokens, BOUNDS, segments),
            lambda x_t: total(clipped(sequence_ratio(x_t))),
            *four,
            segments.segment_t,
        ),
        "cispo": row(lambda: cispo_terms(tokens, BOUNDS), cispo_exact, *four),
        "reinforce": row(
            lambda: reinforce_terms(tokens),
            lambda x_t: total(-advantage_t.double() * x_t),
            tokens.logprob_t,
            advantage_t,
            mask_t,
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
