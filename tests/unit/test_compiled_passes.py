"""Compiled passes stay compiled, however many shapes and dtypes come by."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch.overrides import TorchFunctionMode

from rlcore.ops.passes import EAGER, Passes, Wanted, compiled_passes
from rlcore.ops.pointwise import COMPILE_FROM_TOKENS, evaluate

# More than the eight versions after which the compiler would run a shared code object eagerly.
NUM_SHAPES = 3


FEW = [(True, False, False), (False, True, False), (True, True, True)]
ALL = list(itertools.product((True, False), repeat=3))


def _arguments(
    passes: Passes, num_rows: int, width: int, dtype: torch.dtype, wanted: Sequence[tuple[bool, bool, bool]]
) -> list[torch.Tensor]:
    """Every pass once over rows of one shape; the gradient once for each of `wanted`."""
    generator = torch.Generator().manual_seed(width)
    logits_tv = torch.randn(num_rows, width, generator=generator).to(dtype)
    one_t = torch.ones(num_rows)
    max_t = logits_tv.float().amax(dim=1)
    threshold_t = max_t - 1.0
    pivot_tp = torch.stack([max_t - gap for gap in (0.5, 1.0, 2.0)], dim=1)
    terms_t8 = torch.rand(num_rows, 8, generator=generator)
    some_u = torch.arange(0, num_rows, 2)
    of_some = [one_t[some_u], max_t[some_u], threshold_t[some_u]]
    gradients = [
        passes.gradient(logits_tv, None, one_t, max_t, threshold_t, one_t, terms_t8, Wanted(*flags))
        for flags in wanted
    ]
    return [
        *gradients,
        passes.block_maxima(logits_tv, None, one_t, max_t + 1.0),
        passes.exp_sums(logits_tv, None, one_t, max_t, max_t, False),
        passes.exp_sums(logits_tv, None, one_t, max_t, max_t, True),
        passes.sums_above(logits_tv, None, one_t, max_t, threshold_t, False),
        passes.sums_above(logits_tv, some_u, *of_some, False),
        passes.pivot_sums(logits_tv, some_u, of_some[0], of_some[1], pivot_tp[some_u]),
    ]


@pytest.mark.parametrize("wanted", [FEW, pytest.param(ALL, marks=pytest.mark.slow)], ids=["few", "all"])
def test_many_shapes_and_dtypes_stay_compiled_and_agree_with_the_eager_passes(wanted):
    """The compiler counts versions per code object and past eight falls back to eager, silent in numbers but
    not in time: here such a fallback raises.
    """
    passes = compiled_passes()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for index in range(NUM_SHAPES):
            for dtype in (torch.float32, torch.bfloat16):
                given = (4 + 2 * index, 64 * 3 + 10 * index, dtype, wanted)
                for got, expected in zip(_arguments(passes, *given), _arguments(EAGER, *given), strict=True):
                    torch.testing.assert_close(
                        got, expected, rtol=2e-5 if dtype == torch.float32 else 2e-2, atol=1e-5
                    )


class _Spy(TorchFunctionMode):
    """Sees every torch function that is called under it, as a mode that redirects devices does."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_caller_does_not_cut_the_graph():
    """The mode would split the compiled loop at each operation, until the compiler gives up and runs all of
    it eagerly (seen: five times slower in a Megatron worker on the CPU). It sees reads of dtype
    and device only.
    """
    passes = compiled_passes()
    logits_tv, one_t = torch.randn(4, 200), torch.ones(4)
    max_t = logits_tv.amax(dim=1)
    expected = EAGER.exp_sums(logits_tv, None, one_t, max_t, max_t, False)
    with _Spy() as spy:
        got = passes.exp_sums(logits_tv, None, one_t, max_t, max_t, False)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=1e-5)
    assert {func.__name__ for func in spy.seen} <= {"__get__", "device"}


def test_a_mode_of_the_caller_does_not_cut_a_loss():
    value_t = torch.randn(COMPILE_FROM_TOKENS)
    with _Spy() as spy:
        (got_t,) = evaluate(_doubled, value_t)
    assert torch.equal(got_t, value_t * 2.0)
    assert "mul" not in " ".join(func.__name__ for func in spy.seen)


def _doubled(value_t):
    return (value_t * 2.0,)
