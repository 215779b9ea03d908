"""Compares one implementation of the passes over the logits with the eager one, on any device."""

from __future__ import annotations

import math
from typing import Any

import torch

from rlcore.ops.passes import EAGER, Passes, Wanted, compute_dtype
from tests.oracle import make_logits

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Of one unit in the last place, relative: what a gradient loses when it is rounded to the logits' dtype.
ROUNDING = {torch.float32: 0.0, torch.float64: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
SUM_TOLERANCE = 1e-6


def hard_logits(num_columns: int, dtype: torch.dtype) -> torch.Tensor:
    """`[8, num_columns]`, each row with its own difficulty; the last three are what a broken model writes."""
    kinds = ("random", "flat", "tied", "banned", "huge", "tied", "random", "random")
    logits = torch.cat([make_logits(kind, 1, num_columns, seed=i) for i, kind in enumerate(kinds)])
    logits[5, num_columns // 2] = math.nan
    logits[6, -1] = math.inf
    logits[7] = -math.inf
    return logits.to(dtype)


def temperatures(num_rows: int, logits: torch.Tensor) -> torch.Tensor:
    """1, where nothing is divided, and values whose quotients are rounded."""
    values = torch.tensor([1.0, 0.7, 1.3, 1.0, 0.01, 3.0, 0.9, 1.0])
    return values[torch.arange(num_rows) % 8].to(logits.device, compute_dtype(logits))


def check_passes(passes: Passes, logits_tv: torch.Tensor, row_u: torch.Tensor | None) -> None:
    """Every pass but the gradient: maxima, counts and comparisons exactly, sums to 1e-6 of themselves."""
    num_rows = logits_tv.shape[0] if row_u is None else row_u.shape[0]
    temperature_u = temperatures(num_rows, logits_tv)
    nothing_u = torch.full_like(temperature_u, math.inf)
    both = (passes, EAGER)

    ours, eager = (p.block_maxima(logits_tv, row_u, temperature_u, nothing_u) for p in both)
    assert_identical(ours, eager, "block maxima")
    max_u = eager.amax(dim=1)
    # Values that occur, so that equality and the bound decide something, and bounds that nothing exceeds.
    occurring_u = eager[:, 0].nan_to_num(0.5, posinf=0.5)
    below_u = torch.where(torch.arange(num_rows, device=max_u.device) % 2 == 0, max_u, occurring_u)
    ours, eager = (p.block_maxima(logits_tv, row_u, temperature_u, below_u) for p in both)
    assert_identical(ours, eager, "block maxima below a bound")

    shift_u = torch.where(torch.isneginf(max_u), 0.0, max_u)
    for entropy, thresholds in ((True, (occurring_u, -nothing_u)), (False, (max_u, occurring_u - 0.3))):
        for value_u in (occurring_u, -nothing_u, nothing_u):
            ours, eager = (
                p.exp_sums(logits_tv, row_u, temperature_u, shift_u, value_u, entropy) for p in both
            )
            assert_sums(ours, eager, [0, 1], f"exp sums, entropy={entropy}")
        for threshold_u in thresholds:
            ours, eager = (
                p.sums_above(logits_tv, row_u, temperature_u, shift_u, threshold_u, entropy) for p in both
            )
            assert_sums(ours, eager, [0, 3], f"sums above, entropy={entropy}")
    pivot_up = torch.stack([occurring_u, -nothing_u, occurring_u - 1.0, nothing_u], dim=1)
    ours, eager = (p.pivot_sums(logits_tv, row_u, temperature_u, shift_u, pivot_up) for p in both)
    assert_sums(ours.flatten(1), eager.flatten(1), [0, 2, 4, 6], "pivot sums")


def check_gradient(passes: Passes, logits_tv: torch.Tensor) -> None:
    """To 1e-6 and one rounding to the logits' dtype, with every combination of distributions that are
    wanted.
    """
    num_rows = logits_tv.shape[0]
    temperature_t = temperatures(num_rows, logits_tv)
    nothing_t = torch.full_like(temperature_t, math.inf)
    maxima_tb = EAGER.block_maxima(logits_tv, None, temperature_t, nothing_t)
    max_t = maxima_tb.amax(dim=1)
    threshold_t = maxima_tb[:, 0]
    share_t = torch.linspace(0.0, 1.0, num_rows, device=max_t.device, dtype=max_t.dtype)
    sums_t4 = EAGER.sums_above(logits_tv, None, temperature_t, max_t, -nothing_t, False)
    # A broken row comes with NaN here, as from `filter._combine`.
    log_t = sums_t4[:, 0].log().to(max_t.dtype)
    log_t = torch.where(log_t.isfinite(), log_t, math.nan)
    generator = torch.Generator().manual_seed(5)
    random_tc = torch.randn(num_rows, 8, generator=generator).to(max_t.device, max_t.dtype)
    # Columns: kept log, kept scale, whole log, whole scale, then slopes and shifts.
    for kept, whole, entropy in ((1, 1, True), (1, 1, False), (1, 0, False), (0, 1, True), (0, 0, True)):
        terms_tc = random_tc.clone()
        terms_tc[:, 0] = log_t - 0.1
        terms_tc[:, 2] = log_t
        terms_tc[:, [1, 4]] *= kept
        terms_tc[:, [3, 6]] *= whole
        arguments = (temperature_t, max_t, threshold_t, share_t, terms_tc, Wanted(True, True, entropy))
        ours, eager = (p.gradient(logits_tv, None, *arguments) for p in (passes, EAGER))
        assert ours.dtype == eager.dtype and ours.is_contiguous()
        hint = (kept, whole, entropy)
        assert torch.equal(ours.isnan(), eager.isnan()), hint
        difference = (ours.double() - eager.double()).abs().nan_to_num(0.0)
        bound = (
            SUM_TOLERANCE * eager.double().abs().clamp(min=1.0) + ROUNDING[ours.dtype] * eager.double().abs()
        )
        assert bool((difference <= bound.nan_to_num(1.0)).all()), (hint, difference.max().item())


def assert_identical(ours: torch.Tensor, eager: torch.Tensor, hint: Any) -> None:
    """Same shape, dtype and values, NaN where the other has NaN."""
    assert ours.shape == eager.shape and ours.dtype == eager.dtype, hint
    same = (ours == eager) | (ours.isnan() & eager.isnan())
    assert bool(same.all()), (hint, (~same).nonzero()[:3].tolist(), ours[~same][:3], eager[~same][:3])


def assert_sums(ours: torch.Tensor, eager: torch.Tensor, sum_columns: list[int], hint: Any) -> None:
    """Counts identical; sums within SUM_TOLERANCE, NaN and infinities in the same rows."""
    for column in range(eager.shape[1]):
        if column not in sum_columns:
            assert_identical(ours[:, column], eager[:, column], (hint, column))
            continue
        a, b = ours[:, column], eager[:, column]
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf()), (hint, column)
        finite = torch.isfinite(b)
        difference, size = (a - b)[finite].abs(), b[finite].abs()
        assert bool((difference <= SUM_TOLERANCE * size).all()), (hint, column, a, b)
