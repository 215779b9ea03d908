"""A per-token function and its derivative in one pass: eager for few tokens, compiled for many, one
arithmetic.

A core is a pure function `core(x_t, *arguments) -> (loss_t, slope_t, *rest)`: the slope is written by hand, d
loss_t / d x_t of the same token, so that nothing but it is saved and backward is one product. Arguments are
tensors, numbers or None and get no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from rlcore.ops import triton_passes

Core = Callable[..., tuple[torch.Tensor, ...]]

# Compiled from this many tokens on: below, an eager core ends before the call of a compiled one would pay.
COMPILE_FROM_TOKENS = 1 << 16


def per_token(core: Core, x_t: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """`(loss_t, *rest)` of a core; the gradient flows to `x_t` through `loss_t` only.

    Shapes: as the core's. Dtypes: the gradient has `x_t`'s. Layout: any; elementwise. Collectives: none.
    Backward: upstream x slope, once. Mutates: nothing.
    """
    return differentiable(x_t, lambda x_t: evaluate(core, x_t, *arguments))


def weighted_total(
    core: Core, x_t: torch.Tensor, multiplier_t: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, ...]:
    """`(sum of loss_t x multiplier_t, loss_t, *rest)`; the gradient flows through the sum only.

    The product and the sum belong to the core's own pass: tokens are read once, and one `[t]` tensor is
    saved.
    Shapes: `multiplier_t [t]` or 0-dim. Else as `per_token`.
    """
    return differentiable(x_t, lambda x_t: evaluate(_summed(core), x_t, multiplier_t, *arguments))


def differentiable(
    x_t: torch.Tensor, compute: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
) -> tuple[torch.Tensor, ...]:
    """`(value, *rest)` of `compute(x_t detached) -> (value, slope_t, *rest)`, with that slope as gradient.

    For a function of several passes; `value` is `[t]` or 0-dim. Backward: upstream x slope, once.
    """
    return _Differentiable.apply(x_t, compute)  # type: ignore[return-value]


def evaluate(core: Callable[..., tuple[torch.Tensor, ...]], *arguments: Any) -> tuple[torch.Tensor, ...]:
    """`core(*arguments)`, compiled when the first argument is large. No gradient flows.

    Never reads a value back: whether to compile depends on sizes and devices alone.
    """
    first_t = arguments[0]
    if first_t.numel() < COMPILE_FROM_TOKENS or not _can_compile(first_t.device.type):
        with torch.no_grad():
            return core(*arguments)
    inputs, kinds = [], []
    for argument in arguments:
        is_tensor = isinstance(argument, torch.Tensor)
        kinds.append(_kind(argument) if is_tensor else type(argument))
        if is_tensor and argument.requires_grad:
            argument = argument.detach()
        # Bytes go in and out of compiled code: loops that load or store bools are not vectorised on the CPU
        # (measured: ten times slower).
        inputs.append(argument.view(torch.uint8) if kinds[-1] == "bool" else argument)
    # As in `passes`: outside the caller's modes, which would cut the graph.
    with torch._C.DisableTorchFunction():
        outputs = _compiled(core, tuple(kinds))(*inputs)
    return tuple(output.view(torch.bool) if output.dtype == torch.uint8 else output for output in outputs)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_t: torch.Tensor, compute: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    ) -> tuple[torch.Tensor, ...]:
        value, slope_t, *rest = compute(x_t.detach())
        ctx.save_for_backward(slope_t)
        ctx.dtype = x_t.dtype
        ctx.mark_non_differentiable(*rest)
        ctx.set_materialize_grads(False)
        return value, *rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        (slope_t,) = ctx.saved_tensors
        return None if upstream[0] is None else (slope_t * upstream[0]).to(ctx.dtype), None


@cache
def _summed(core: Core) -> Core:
    """The core whose first two results are the weighted sum and the weighted slope; cached, so that one core
    is compiled once.
    """

    def summed(x_t: torch.Tensor, multiplier_t: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
        loss_t, slope_t, *rest = core(x_t, *arguments)
        multiplier_t = multiplier_t.to(loss_t.dtype)
        return (loss_t * multiplier_t).sum(), slope_t * multiplier_t, loss_t, *rest

    summed.__name__ = f"summed{core.__name__}"
    return summed


@cache
def _can_compile(device_type: str) -> bool:
    """On the CPU always; on a GPU with Triton; not where tensors hold no data."""
    return device_type == "cpu" or (device_type == "cuda" and triton_passes.is_installed())


def _kind(argument: torch.Tensor) -> str | int:
    """What the compiled code is special for, apart from dtypes: bools, and the number of dimensions."""
    return "bool" if argument.dtype == torch.bool else argument.dim()


@cache
def _compiled(core: Callable[..., tuple[torch.Tensor, ...]], kinds: tuple[Any, ...]) -> Core:
    """The core behind bytes, compiled. The first call takes seconds."""

    def run(*arguments: Any) -> tuple[torch.Tensor, ...]:
        # By way of float: a comparison of bytes is not vectorised either.
        unpacked = [a.float() > 0 if kind == "bool" else a for a, kind in zip(arguments, kinds, strict=True)]
        return tuple(
            torch.where(output, 1.0, 0.0).to(torch.uint8) if output.dtype == torch.bool else output
            for output in core(*unpacked)
        )

    # The compiler counts versions per code object and, past eight, runs eagerly without a word: each has its
    # own.
    run.__code__ = run.__code__.replace(co_name=f"run_{core.__name__}_{kinds}")
    return torch.compile(run, dynamic=True)
