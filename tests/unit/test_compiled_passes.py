"""Compiled passes stay compiled, however many shapes and dtypes come by."""

from __future__ import annotations

import itertools

import torch

from rlcore.ops.passes import EAGER, Passes, Wanted, compiled_passes

# More than the eight versions after which the compiler would run a shared code object eagerly.
NUM_SHAPES = 3


def _arguments(passes: Passes, num_rows: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Every pass once over rows of one shape."""
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
        passes.gradient(logits_tv, None, one_t, max_t, threshold_t, one_t, terms_t8, Wanted(*wanted))
        for wanted in itertools.product((True, False), repeat=3)
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


def test_many_shapes_and_dtypes_stay_compiled_and_agree_with_the_eager_passes():
    """The compiler counts versions per code object and past eight falls back to eager, silent in numbers but
    not in time: here such a fallback raises.
    """
    passes = compiled_passes()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for index in range(NUM_SHAPES):
            for dtype in (torch.float32, torch.bfloat16):
                shape = (4 + 2 * index, 64 * 3 + 10 * index, dtype)
                for got, expected in zip(_arguments(passes, *shape), _arguments(EAGER, *shape), strict=True):
                    torch.testing.assert_close(
                        got, expected, rtol=2e-5 if dtype == torch.float32 else 2e-2, atol=1e-5
                    )
