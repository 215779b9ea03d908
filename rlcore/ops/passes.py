"""Passes over the logits: everything in the op whose cost grows with the vocabulary, as a few pure functions.

Each reads this rank's real columns once and returns O(1) numbers a row, or writes the gradient. One `Passes` object
holds one implementation of them; the search and the maths above it never touch a logit. z is a tempered logit, y is z
relative to the largest of its whole row; both are computed in float32 (float64 for float64 logits). Sums are
accumulated in float64 over blocks, because a cut of a flat row is decided in the seventh digit.

Rows: `row_u` picks rows by index without copying them; None means all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch

# Columns per block: partial sums stay in float32 inside a block, and block maxima bound where large values are.
BLOCK = 64
# Elements of an eager temporary: rows are visited in chunks that stay in the cache, so memory does not grow with t.
CHUNK_ELEMENTS = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Passes:
    """One implementation of the passes; see the eager functions below for what each returns."""

    name: str
    block_maxima: Callable[..., torch.Tensor]
    exp_sums: Callable[..., torch.Tensor]
    sums_above: Callable[..., torch.Tensor]
    pivot_sums: Callable[..., torch.Tensor]
    count_equal: Callable[..., torch.Tensor]
    gradient: Callable[..., torch.Tensor]


def compute_dtype(logits_tv: torch.Tensor) -> torch.dtype:
    """float64 stays float64 (for gradient checks); everything else is computed in float32."""
    return torch.float64 if logits_tv.dtype == torch.float64 else torch.float32


def finite(y_tv: torch.Tensor) -> torch.Tensor:
    """y with -inf replaced by a number whose exp is 0 too, so that exp(y) * y is 0 there and not NaN."""
    return y_tv.clamp(min=-1e4)


def temper(logits_tv: torch.Tensor, temperature_t: torch.Tensor) -> torch.Tensor:
    """z: divided, not multiplied by an inverse, because the sampler divides."""
    return logits_tv.to(compute_dtype(logits_tv)) / temperature_t[:, None]


# --- the arithmetic of each pass, on rows that are at hand; compiled as they stand for the `compile` backend -----------


def _sum_blocks(value_tv: torch.Tensor) -> torch.Tensor:
    """`[t]` float64 sum over columns: float32 inside blocks of BLOCK columns, float64 across them."""
    whole = value_tv.shape[1] // BLOCK * BLOCK
    blocks_t = value_tv[:, :whole].unflatten(1, (whole // BLOCK, BLOCK)).sum(dim=2).double().sum(dim=1)
    return blocks_t + value_tv[:, whole:].double().sum(dim=1)


def _block_maxima(logits_tv: torch.Tensor, temperature_t: torch.Tensor, below_t: torch.Tensor) -> torch.Tensor:
    """`[t, blocks]`: largest z below the bound in each block of BLOCK columns, the last one shorter."""
    z_tv = temper(logits_tv, temperature_t)
    # NaN fails the comparison and stays, so that it reaches the row's max.
    z_tv = torch.where(z_tv >= below_t[:, None], -math.inf, z_tv)
    whole = z_tv.shape[1] // BLOCK * BLOCK
    blocks_tb = z_tv[:, :whole].unflatten(1, (whole // BLOCK, BLOCK)).amax(dim=2)
    return torch.cat([blocks_tb, z_tv[:, whole:].amax(dim=1, keepdim=True)], dim=1) if whole < z_tv.shape[1] else blocks_tb


def _exp_sums(
    logits_tv: torch.Tensor, temperature_t: torch.Tensor, max_t: torch.Tensor, entropy: bool
) -> torch.Tensor:
    """`[t, 3]` float64: sum of exp(y), sum of exp(y) y (0 without `entropy`), number of finite entries."""
    z_tv = temper(logits_tv, temperature_t)
    y_tv = z_tv - max_t[:, None]
    exp_tv = y_tv.exp()
    sum_t = _sum_blocks(exp_tv)
    weighted_t = _sum_blocks(exp_tv * finite(y_tv)) if entropy else torch.zeros_like(sum_t)
    return torch.stack([sum_t, weighted_t, (z_tv > -math.inf).sum(dim=1).double()], dim=1)


def _sums_above(
    logits_tv: torch.Tensor, temperature_t: torch.Tensor, max_t: torch.Tensor, threshold_t: torch.Tensor, entropy: bool
) -> torch.Tensor:
    """`[t, 4]` float64: sum of exp(y) over z > threshold, their number, the number equal to it, sum of exp(y) y."""
    z_tv = temper(logits_tv, temperature_t)
    y_tv = z_tv - max_t[:, None]
    above_tv = z_tv > threshold_t[:, None]
    exp_tv = torch.where(above_tv, y_tv.exp(), 0.0)
    mass_t = _sum_blocks(exp_tv)
    weighted_t = _sum_blocks(exp_tv * finite(y_tv)) if entropy else torch.zeros_like(mass_t)
    tied_t = (z_tv == threshold_t[:, None]).sum(dim=1)
    return torch.stack([mass_t, above_tv.sum(dim=1).double(), tied_t.double(), weighted_t], dim=1)


def _pivot_sums(
    logits_tv: torch.Tensor, temperature_t: torch.Tensor, max_t: torch.Tensor, pivot_tp: torch.Tensor
) -> torch.Tensor:
    """`[t, P, 2]` float64: sum of exp(y) and number of the entries z >= each pivot."""
    z_tv = temper(logits_tv, temperature_t)
    exp_tv = (z_tv - max_t[:, None]).exp()
    columns = []
    for index in range(pivot_tp.shape[1]):
        above_tv = z_tv >= pivot_tp[:, index : index + 1]
        columns += [_sum_blocks(torch.where(above_tv, exp_tv, 0.0)), above_tv.sum(dim=1).double()]
    return torch.stack(columns, dim=1).unflatten(1, (-1, 2))


def _count_equal(logits_tv: torch.Tensor, temperature_t: torch.Tensor, value_t: torch.Tensor) -> torch.Tensor:
    """`[t]` int64: entries equal to a value."""
    return (temper(logits_tv, temperature_t) == value_t[:, None]).sum(dim=1)


def _gradient(
    logits_tv: torch.Tensor,
    temperature_t: torch.Tensor,
    max_t: torch.Tensor,
    threshold_t: torch.Tensor,
    share_t: torch.Tensor,
    terms_tc: torch.Tensor,
    entropy: bool,
) -> torch.Tensor:
    """`[t, v]` in the logits' dtype, without the target's own term; `terms_tc [t, 8]`: see `logprob._gradient_terms`."""
    z_tv = temper(logits_tv, temperature_t)
    y_tv = z_tv - max_t[:, None]
    kept_log_t, kept_scale_t, whole_log_t, whole_scale_t, kept_slope_t, kept_shift_t, whole_slope_t, whole_shift_t = (
        terms_tc.unbind(dim=1)
    )
    at_tv = torch.where(z_tv == threshold_t[:, None], share_t[:, None], 0.0)
    weight_tv = torch.where(z_tv > threshold_t[:, None], 1.0, at_tv)
    # Below the threshold y may be far above the kept log-sum's range: bounded before exp, weighted by 0 after it.
    kept_p_tv = weight_tv * (y_tv - kept_log_t[:, None]).clamp(max=0.0).exp()
    whole_p_tv = (y_tv - whole_log_t[:, None]).exp()
    if entropy:
        bounded_tv = finite(y_tv)
        kept_tv = kept_p_tv * (kept_scale_t[:, None] + kept_slope_t[:, None] * (bounded_tv - kept_shift_t[:, None]))
        whole_tv = whole_p_tv * (
            whole_scale_t[:, None] + whole_slope_t[:, None] * (bounded_tv - whole_shift_t[:, None])
        )
    else:
        kept_tv, whole_tv = kept_p_tv * kept_scale_t[:, None], whole_p_tv * whole_scale_t[:, None]
    return ((kept_tv + whole_tv) / temperature_t[:, None]).to(logits_tv.dtype)


# --- eager: the same arithmetic, chunk by chunk -------------------------------------------------------------------------


def row_chunks(num_rows: int, width: int) -> Iterator[slice]:
    """Row slices whose elements number at most CHUNK_ELEMENTS (at least one row)."""
    rows = max(1, CHUNK_ELEMENTS // max(1, width))
    for start in range(0, num_rows, rows):
        yield slice(start, min(start + rows, num_rows))


def _by_chunks(pass_rows: Callable[..., torch.Tensor], num_row_arguments: int) -> Callable[..., torch.Tensor]:
    """The pass over all rows: chunks of the logits with the matching parts of its per-row arguments."""

    def run(logits_tv: torch.Tensor, row_u: torch.Tensor | None, *arguments: object) -> torch.Tensor:
        num_rows = logits_tv.shape[0] if row_u is None else row_u.shape[0]
        parts = []
        for chunk in row_chunks(num_rows, logits_tv.shape[1]):
            rows_tv = logits_tv[chunk] if row_u is None else logits_tv[row_u[chunk]]
            per_row = [a[chunk] for a in arguments[:num_row_arguments]]  # type: ignore[index]
            parts.append(pass_rows(rows_tv, *per_row, *arguments[num_row_arguments:]))
        if not parts:
            empty = [a[:0] for a in arguments[:num_row_arguments]]  # type: ignore[index]
            return pass_rows(logits_tv[:0], *empty, *arguments[num_row_arguments:])
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    return run


def _eager_gradient(logits_tv: torch.Tensor, row_u: torch.Tensor | None, *arguments: object) -> torch.Tensor:
    """Written chunk by chunk into one result: nothing else of its size exists."""
    assert row_u is None
    out_tv = torch.empty(logits_tv.shape, dtype=logits_tv.dtype, device=logits_tv.device)
    for chunk in row_chunks(*logits_tv.shape):
        out_tv[chunk] = _gradient(logits_tv[chunk], *(a[chunk] for a in arguments[:5]), arguments[5])  # type: ignore[index]
    return out_tv


EAGER = Passes(
    name="torch",
    block_maxima=_by_chunks(_block_maxima, 2),
    exp_sums=_by_chunks(_exp_sums, 2),
    sums_above=_by_chunks(_sums_above, 3),
    pivot_sums=_by_chunks(_pivot_sums, 3),
    count_equal=_by_chunks(_count_equal, 2),
    gradient=_eager_gradient,
)


@cache
def compiled_passes() -> Passes:
    """The same functions through `torch.compile`: one fused loop each. The first call of each takes seconds."""

    def with_rows(pass_rows: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def all_rows(logits_tv: torch.Tensor, row_u: None, *arguments: object) -> torch.Tensor:
            return pass_rows(logits_tv, *arguments)

        def some_rows(logits_tv: torch.Tensor, row_u: torch.Tensor, *arguments: object) -> torch.Tensor:
            # The pick is fused into the loop: no copy of the rows is made.
            return pass_rows(logits_tv[row_u], *arguments)

        compiled_all = torch.compile(all_rows, dynamic=True)
        compiled_some = torch.compile(some_rows, dynamic=True)

        def run(logits_tv: torch.Tensor, row_u: torch.Tensor | None, *arguments: object) -> torch.Tensor:
            return (compiled_all if row_u is None else compiled_some)(logits_tv, row_u, *arguments)

        return run

    return Passes(
        name="compile",
        block_maxima=with_rows(_block_maxima),
        exp_sums=with_rows(_exp_sums),
        sums_above=with_rows(_sums_above),
        pivot_sums=with_rows(_pivot_sums),
        count_equal=with_rows(_count_equal),
        gradient=with_rows(_gradient),
    )


BACKENDS = ("auto", "torch", "compile")
# `auto` compiles on the CPU from this many logits on: below, the eager passes finish before a compiler would.
COMPILE_FROM_ELEMENTS = 1 << 23


def select_passes(backend: str, logits_tv: torch.Tensor) -> Passes:
    """The implementation by name; `auto` compiles large inputs and runs small ones eagerly.

    Raises `ValueError` naming the backends there are for one that is not.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: expected one of {', '.join(map(repr, BACKENDS))}.")
    if backend == "compile" or (backend == "auto" and logits_tv.numel() >= COMPILE_FROM_ELEMENTS):
        return compiled_passes()
    return EAGER
