"""Compares the op with the float64 reference: every output, and the gradient of every differentiable one."""

from __future__ import annotations

import math
from typing import Any

import torch

from rlcore.ops.logprob import TokenLogprobs, VocabShard, vocab_parallel_logprob
from rlcore.ops.reference import reference_logprob
from rlcore.sampling import SamplingSpec

DIFFERENTIABLE = ("logprob_t", "unfiltered_logprob_t", "log_mass_t", "entropy_t", "unfiltered_entropy_t")
TOLERANCE = 1e-5

# Why each kind of row is in the grid: the searches branch on spread, ties, what is banned, and who holds the
# mass.
ROW_KINDS = ("random", "peaked", "flat", "tied", "banned", "huge", "bfloat16")


def make_logits(kind: str, num_rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    """`[T, V]` float32 rows of one kind."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    if kind == "peaked":
        logits[torch.arange(num_rows), torch.randint(0, vocab_size, (num_rows,), generator=generator)] += 20
    elif kind == "flat":
        logits *= 1e-3
    elif kind == "tied":
        logits = logits.round()
    elif kind == "banned":
        banned = torch.rand(num_rows, vocab_size, generator=generator) < 0.6
        banned[:, vocab_size // 2] = False
        logits[banned] = -math.inf
    elif kind == "huge":
        logits = logits * 5 + 60
    elif kind == "bfloat16":
        logits = logits.bfloat16().float()
    return logits


def gradients(
    result: TokenLogprobs, logits: torch.Tensor, weights: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Gradient in `logits` of each output's weighted sum over its finite entries, one output at a time."""
    grads = {}
    for name in DIFFERENTIABLE:
        value = getattr(result, name)
        total = torch.where(torch.isfinite(value), value, 0.0).mul(weights[name].to(value.dtype)).sum()
        (grads[name],) = torch.autograd.grad(total, logits, retain_graph=True)
    return grads


def make_weights(num_rows: int, seed: int) -> dict[str, torch.Tensor]:
    """One upstream gradient per output, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(num_rows, generator=generator) for name in DIFFERENTIABLE}


def assert_same_values(
    ours: TokenLogprobs, reference: TokenLogprobs, tolerance: float = TOLERANCE, hint: Any = ""
) -> None:
    """Masks and counts equal, values within `tolerance`, infinities in the same places."""
    assert torch.equal(ours.keep_t, reference.keep_t), hint
    assert torch.equal(ours.num_kept_t, reference.num_kept_t), (hint, ours.num_kept_t, reference.num_kept_t)
    for name in DIFFERENTIABLE:
        assert_close(getattr(ours, name).double(), getattr(reference, name), tolerance, (hint, name))


def assert_close(ours: torch.Tensor, reference: torch.Tensor, tolerance: float, hint: Any) -> None:
    """Absolute or, above 1, relative difference; equal infinities; no NaN."""
    infinite = torch.isinf(reference)
    assert torch.equal(torch.where(infinite, ours, 0.0), torch.where(infinite, reference, 0.0)), hint
    difference = (torch.where(infinite, 0.0, ours) - torch.where(infinite, 0.0, reference)).abs()
    bound = tolerance * torch.where(infinite, 0.0, reference).abs().clamp(min=1.0)
    assert bool((difference <= bound).all()), (hint, difference.max().item())


def check_shard(
    logits: torch.Tensor,
    target_t: torch.Tensor,
    spec: SamplingSpec,
    shard: slice,
    group: Any,
    padding: int = 0,
    backend: str = "auto",
) -> None:
    """The op on a shard of the columns, plus padding columns, equals the reference on the whole."""
    start, width = shard.start, shard.stop - shard.start
    whole = logits.double().clone().requires_grad_()
    reference = reference_logprob(whole, target_t, spec)
    weights = make_weights(len(target_t), seed=7)
    expected = gradients(reference, whole, weights)

    # Padding columns hold what an untrained pad row would: large values, and NaN to prove that nobody reads
    # them.
    columns = torch.full((logits.shape[0], width + padding), 1e4)
    columns[:, width:][:, ::2] = math.nan
    columns[:, :width] = logits[:, shard]
    columns.requires_grad_()
    before = columns.detach().clone()
    vocab_size = logits.shape[1]
    ours = vocab_parallel_logprob(
        columns,
        target_t,
        spec,
        group,
        VocabShard(start=start, vocab_size=vocab_size),
        entropy=True,
        backend=backend,
    )
    assert_same_values(ours, reference, hint=(spec, shard))
    assert torch.equal(torch.nan_to_num(columns.detach(), 5.0), torch.nan_to_num(before, 5.0)), (
        "the input was modified"
    )
    for name, grad in gradients(ours, columns, weights).items():
        assert_close(
            grad[:, :width].double(),
            expected[name][:, shard],
            TOLERANCE,
            (spec, name, shard),
        )
        assert not grad[:, width:].any(), (spec, name, "padding has a gradient")
