"""The per-token losses, against the bare product they cannot do without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlcore.collectives import Group
from rlcore.ops.kl import k3
from rlcore.ops.loss import clipped_policy_terms, token_sum_over
from tools.bench.measure import Method, time_alternately
from tools.bench.options import BenchOptions
from tools.bench.ranks import CheckFailed, run_ranks

Row = dict[str, Any]
CLIP = 0.2
# Relative difference to float64 of the loss, and of the gradient to its largest entry.
TOLERANCE = 1e-5


def run_loss(options: BenchOptions) -> list[Row]:
    """One process: the losses communicate nothing."""
    return run_ranks(loss_rank, 1, options.device, options)[0]


def loss_rank(group: Group, options: BenchOptions) -> list[Row]:
    """The rows of one process."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> torch.Tensor:
        return torch.randn(options.tokens, generator=generator)

    old_t = draw() - 3.0
    logprob_t = (old_t + 0.2 * draw()).to(options.device).requires_grad_()
    mask_t = (draw() > -1.0).to(options.device)
    old_t, advantage_t = old_t.to(options.device), draw().to(options.device)
    count = mask_t.sum().float()

    def clip() -> torch.Tensor:
        terms = clipped_policy_terms(logprob_t, old_t, advantage_t, mask_t, CLIP, CLIP)
        return token_sum_over(terms.loss_t, count)

    def clip_float64(x_t: torch.Tensor) -> torch.Tensor:
        ratio_t = (x_t - old_t.double()).exp()
        product_t = advantage_t.double() * ratio_t
        bounded_t = advantage_t.double() * ratio_t.clamp(1 - CLIP, 1 + CLIP)
        return -torch.minimum(product_t, bounded_t)[mask_t].sum() / count

    def kl() -> torch.Tensor:
        return token_sum_over(k3(logprob_t, old_t, mask_t).kl_t, count)

    def kl_float64(x_t: torch.Tensor) -> torch.Tensor:
        difference_t = old_t.double() - x_t
        value_t = difference_t.exp() - 1 - difference_t
        # The gradient of k3 and of the score function together is minus the difference.
        score_t = value_t.detach() * (x_t - x_t.detach())
        return (value_t + score_t)[mask_t].sum() / count

    def bare() -> torch.Tensor:
        return -(torch.where(mask_t, (logprob_t - old_t).exp(), 0.0) * advantage_t).sum() / count

    def method(loss: Callable[[], torch.Tensor]) -> Method:
        return Method(forward=loss, backward=lambda value: torch.autograd.grad(value, logprob_t))

    methods = {"clip_token_mean": method(clip), "kl_k3": method(kl), "floor": method(bare)}
    for name, exact in (("clip_token_mean", clip_float64), ("kl_k3", kl_float64)):
        _check(name, methods[name], exact, logprob_t)
    methods["floor"].backward(bare())
    times = time_alternately(methods, {}, options.repeats, group, options.device)
    return [
        {
            "name": name,
            "fwd_bwd_s": times[name].median,
            "ours_quartiles_s": times[name].spread,
            "ns_per_token": times[name].median / options.tokens * 1e9,
            "vs_floor": times[name].median / times["floor"].median,
        }
        for name in ("clip_token_mean", "kl_k3")
    ]


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
