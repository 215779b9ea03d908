"""Passes over the logits: everything in the op whose cost grows with the vocabulary, as a few pure functions.

Each reads this rank's real columns once and returns O(1) numbers a row, or writes the gradient. One `Passes`
object holds one implementation of them; the search and the maths above it never touch a logit. z is a
tempered logit, y is z relative to the largest of its whole row; both are computed in float32 (float64 for
float64 logits). Sums are accumulated in float64 over blocks, because a cut of a flat row is decided in the
seventh digit.

Rows: `row_u` picks rows by index without copying them; None means all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

# Columns per block: partial sums stay in float32 inside a block, and block maxima bound where large values
# are.
BLOCK = 64
# Elements of an eager temporary: rows are visited in chunks that stay in the cache, so memory does not grow
# with t.
CHUNK_ELEMENTS = 1 << 18


# Rows of one compiled call: it writes several numbers per block of columns before it adds them up.
PARTIAL_ROWS = 128


class Wanted(NamedTuple):
    """Which distributions an incoming gradient reaches, and whether an entropy has one."""

    kept: bool
    whole: bool
    entropy: bool


@dataclass(frozen=True, kw_only=True)
class Passes:
    """One implementation of the passes; see the eager functions below for what each returns."""

    name: str
    block_maxima: Callable[..., torch.Tensor]
    exp_sums: Callable[..., torch.Tensor]
    sums_above: Callable[..., torch.Tensor]
    pivot_sums: Callable[..., torch.Tensor]
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


# --- the arithmetic of each pass, on rows that are at hand; compiled


def _by_blocks(
    logits_tv: torch.Tensor,
    temperature_t: torch.Tensor,
    partials: Callable[[torch.Tensor], list[torch.Tensor]],
) -> list[torch.Tensor]:
    """Partial results `[t, blocks]` of z `[t, blocks, BLOCK]`, the shorter last block appended.

    Whole blocks and the rest are cut before anything is computed, every partial reduces the same axis, and
    `partials` writes an exp out again for each use: then the compiler makes one loop of it all. An exp that
    several sums share is written to memory first (measured: 3.5 times slower).
    """
    whole = logits_tv.shape[1] // BLOCK * BLOCK
    temperature_t11 = temperature_t[:, None, None]
    results: list[list[torch.Tensor]] = []
    if whole:
        blocks_tbk = logits_tv[:, :whole].unflatten(1, (whole // BLOCK, BLOCK))
        results.append(partials(blocks_tbk.to(compute_dtype(logits_tv)) / temperature_t11))
    if whole < logits_tv.shape[1]:
        results.append(partials(logits_tv[:, None, whole:].to(compute_dtype(logits_tv)) / temperature_t11))
    if len(results) == 1:
        return results[0]
    return [torch.cat(pair, dim=1) for pair in zip(*results, strict=True)]


def _total(partial_tb: torch.Tensor) -> torch.Tensor:
    """`[t]` float64: float32 inside blocks, float64 across them."""
    return partial_tb.double().sum(dim=1)


def _number(mask_tbk: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`[t, blocks]` how many, as floats: at most BLOCK, so exact."""
    return torch.where(mask_tbk, torch.ones((), dtype=like.dtype, device=like.device), 0.0).sum(dim=2)


def _block_maxima(
    logits_tv: torch.Tensor, temperature_t: torch.Tensor, below_t: torch.Tensor
) -> torch.Tensor:
    """`[t, blocks]`: largest z below the bound in each block of BLOCK columns, the last one shorter."""

    def partials(z_tbk: torch.Tensor) -> list[torch.Tensor]:
        # NaN fails the comparison and stays, so that it reaches the row's max.
        return [torch.where(z_tbk >= below_t[:, None, None], -math.inf, z_tbk).amax(dim=2)]

    return _by_blocks(logits_tv, temperature_t, partials)[0]


def _exp_sums(
    logits_tv: torch.Tensor,
    temperature_t: torch.Tensor,
    max_t: torch.Tensor,
    value_t: torch.Tensor,
    entropy: bool,
) -> torch.Tensor:
    """`[t, 4]` float64: sum of exp(y), sum of exp(y) y (0 without `entropy`), number of finite entries, of
    entries whose z equals the value.
    """

    def partials(z_tbk: torch.Tensor) -> list[torch.Tensor]:
        y_tbk = z_tbk - max_t[:, None, None]
        parts = [
            y_tbk.exp().sum(dim=2),
            _number(z_tbk > -math.inf, z_tbk),
            _number(z_tbk == value_t[:, None, None], z_tbk),
        ]
        return [*parts, (y_tbk.exp() * finite(y_tbk)).sum(dim=2)] if entropy else parts

    sums = [_total(part) for part in _by_blocks(logits_tv, temperature_t, partials)]
    return torch.stack([sums[0], sums[3] if entropy else torch.zeros_like(sums[0]), *sums[1:3]], dim=1)


def _sums_above(
    logits_tv: torch.Tensor,
    temperature_t: torch.Tensor,
    max_t: torch.Tensor,
    threshold_t: torch.Tensor,
    entropy: bool,
) -> torch.Tensor:
    """`[t, 4]` float64: sum of exp(y) over z > threshold, their number, the number equal to it, sum of exp(y)
    y.
    """

    def partials(z_tbk: torch.Tensor) -> list[torch.Tensor]:
        y_tbk = z_tbk - max_t[:, None, None]
        above_tbk = z_tbk > threshold_t[:, None, None]
        mass_tb = torch.where(above_tbk, y_tbk.exp(), 0.0).sum(dim=2)
        parts = [mass_tb, _number(above_tbk, z_tbk), _number(z_tbk == threshold_t[:, None, None], z_tbk)]
        if entropy:
            parts.append(torch.where(above_tbk, y_tbk.exp() * finite(y_tbk), 0.0).sum(dim=2))
        return parts

    totals = [_total(part) for part in _by_blocks(logits_tv, temperature_t, partials)]
    return torch.stack(totals if entropy else [*totals, torch.zeros_like(totals[0])], dim=1)


def _pivot_sums(
    logits_tv: torch.Tensor, temperature_t: torch.Tensor, max_t: torch.Tensor, pivot_tp: torch.Tensor
) -> torch.Tensor:
    """`[t, P, 2]` float64: sum of exp(y) and number of the entries z >= each pivot."""

    def partials(z_tbk: torch.Tensor) -> list[torch.Tensor]:
        parts = []
        for pivot_t in pivot_tp.unbind(1):
            above_tbk = z_tbk >= pivot_t[:, None, None]
            mass_tb = torch.where(above_tbk, (z_tbk - max_t[:, None, None]).exp(), 0.0).sum(dim=2)
            parts += [mass_tb, _number(above_tbk, z_tbk)]
        return parts

    totals = [_total(part) for part in _by_blocks(logits_tv, temperature_t, partials)]
    return torch.stack(totals, dim=1).unflatten(1, (pivot_tp.shape[1], 2))


def _gradient(
    logits_tv: torch.Tensor,
    temperature_t: torch.Tensor,
    max_t: torch.Tensor,
    threshold_t: torch.Tensor,
    share_t: torch.Tensor,
    terms_tc: torch.Tensor,
    wanted: Wanted,
) -> torch.Tensor:
    """`[t, v]` in the logits' dtype, without the target's own term; `terms_tc [t, 8]`: see
    `logprob._gradient_terms`.
    """
    z_tv = temper(logits_tv, temperature_t)
    y_tv = z_tv - max_t[:, None]
    (
        kept_log_t,
        kept_scale_t,
        whole_log_t,
        whole_scale_t,
        kept_slope_t,
        kept_shift_t,
        whole_slope_t,
        whole_shift_t,
    ) = terms_tc.unbind(dim=1)
    if not wanted.kept:
        whole_p_tv = (y_tv - whole_log_t[:, None]).exp()
        factor_tv = whole_scale_t[:, None]
        if wanted.entropy:
            factor_tv = _slope(y_tv, whole_scale_t, whole_slope_t, whole_shift_t)
        return (whole_p_tv * factor_tv / temperature_t[:, None]).to(logits_tv.dtype)
    at_tv = torch.where(z_tv == threshold_t[:, None], share_t[:, None], 0.0)
    weight_tv = torch.where(z_tv > threshold_t[:, None], 1.0, at_tv)
    # Below the threshold y may be far above the kept log-sum's range: bounded before exp, weighted by 0 after
    # it.
    kept_p_tv = weight_tv * (y_tv - kept_log_t[:, None]).clamp(max=0.0).exp()
    grad_tv = kept_p_tv * (
        _slope(y_tv, kept_scale_t, kept_slope_t, kept_shift_t) if wanted.entropy else kept_scale_t[:, None]
    )
    if wanted.whole:
        whole_p_tv = (y_tv - whole_log_t[:, None]).exp()
        grad_tv = grad_tv + whole_p_tv * (
            _slope(y_tv, whole_scale_t, whole_slope_t, whole_shift_t)
            if wanted.entropy
            else whole_scale_t[:, None]
        )
    return (grad_tv / temperature_t[:, None]).to(logits_tv.dtype)


def _slope(
    y_tv: torch.Tensor, scale_t: torch.Tensor, slope_t: torch.Tensor, shift_t: torch.Tensor
) -> torch.Tensor:
    """`[t, v]`: what multiplies p when an entropy has a gradient too."""
    return scale_t[:, None] + slope_t[:, None] * (finite(y_tv) - shift_t[:, None])


# --- eager: the same arithmetic, chunk by chunk ---------------------------------------------------


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
        out_tv[chunk] = _gradient(logits_tv[chunk], *(a[chunk] for a in arguments[:5]), *arguments[5:])  # type: ignore[index]
    return out_tv


EAGER = Passes(
    name="torch",
    block_maxima=_by_chunks(_block_maxima, 2),
    exp_sums=_by_chunks(_exp_sums, 3),
    sums_above=_by_chunks(_sums_above, 3),
    pivot_sums=_by_chunks(_pivot_sums, 3),
    gradient=_eager_gradient,
)


@cache
def _compile_pass(
    pass_rows: Callable[..., torch.Tensor], picks_rows: bool, dtype: torch.dtype, flags: tuple
) -> Callable[..., torch.Tensor]:
    """One compiled function for each kind of call, with a code object of its own.

    The compiler counts versions per code object and, past eight, runs eagerly without a word (measured: 377
    ms instead of 38). What is left to vary in one of these is the shape.
    """

    def all_rows(logits_tv: torch.Tensor, row_u: None, *arguments: object) -> torch.Tensor:
        return pass_rows(logits_tv, *arguments)

    def some_rows(logits_tv: torch.Tensor, row_u: torch.Tensor, *arguments: object) -> torch.Tensor:
        # The pick is fused into the loop: no copy of the rows is made.
        return pass_rows(logits_tv[row_u], *arguments)

    rows = some_rows if picks_rows else all_rows
    name = "_".join([rows.__name__, pass_rows.__name__, str(dtype), *map(str, flags)])
    rows.__code__ = rows.__code__.replace(co_name=name)
    return torch.compile(rows, dynamic=True)


@cache
def compiled_passes() -> Passes:
    """The same functions through `torch.compile`: one loop each. First calls take seconds."""

    def with_rows(pass_rows: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(logits_tv: torch.Tensor, row_u: torch.Tensor | None, *arguments: object) -> torch.Tensor:
            flags = tuple(a for a in arguments if not isinstance(a, torch.Tensor))
            compiled = _compile_pass(pass_rows, row_u is not None, logits_tv.dtype, flags)
            # A mode of the caller (Megatron's CPU backend is one) would cut the graph at every operation.
            with torch._C.DisableTorchFunction():
                return compiled(logits_tv, row_u, *arguments)

        return run

    def in_parts(pass_rows: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        whole = with_rows(pass_rows)

        def run(logits_tv: torch.Tensor, row_u: torch.Tensor | None, *arguments: object) -> torch.Tensor:
            num_rows = logits_tv.shape[0] if row_u is None else row_u.shape[0]
            if num_rows <= PARTIAL_ROWS:
                return whole(logits_tv, row_u, *arguments)
            parts = []
            for start in range(0, num_rows, PARTIAL_ROWS):
                part = slice(start, start + PARTIAL_ROWS)
                given = [a[part] if isinstance(a, torch.Tensor) else a for a in arguments]
                rows_tv, picks = (logits_tv[part], None) if row_u is None else (logits_tv, row_u[part])
                parts.append(whole(rows_tv, picks, *given))
            return torch.cat(parts)

        return run

    return Passes(
        name="compile",
        block_maxima=in_parts(_block_maxima),
        exp_sums=in_parts(_exp_sums),
        sums_above=in_parts(_sums_above),
        pivot_sums=in_parts(_pivot_sums),
        gradient=with_rows(_gradient),
    )


BACKENDS = ("auto", "torch", "compile", "triton")
# `auto` compiles on the CPU from this many logits on: below, the eager passes finish before a compiler would.
COMPILE_FROM_ELEMENTS = 1 << 22


def select_passes(backend: str, logits_tv: torch.Tensor) -> Passes:
    """The implementation by name. `auto`: Triton on a GPU where it is installed; else large inputs compiled,
    small ones eager.

    Raises `ValueError` naming the backends there are for one that is not, or cannot run here.
    """
    # Only now: it imports this file.
    from rlcore.ops import triton_passes

    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: expected one of {', '.join(map(repr, BACKENDS))}.")
    if backend == "triton" or (backend == "auto" and logits_tv.is_cuda and triton_passes.is_installed()):
        return triton_passes.passes_for(logits_tv)
    if backend == "compile" or (backend == "auto" and logits_tv.numel() >= COMPILE_FROM_ELEMENTS):
        return compiled_passes()
    return EAGER
