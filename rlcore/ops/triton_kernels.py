"""The passes over the logits as Triton kernels; `triton_passes.py` launches them and says what each returns.

Importing this does not import Triton. The kernels are plain functions until `load_kernels` gives them their
language and compiles them, in place: take them from this module after that (`triton_kernels.exp_sums`).

Each program works on one tile, TILE_BLOCKS blocks of BLOCK columns of one row. Suffixes: u, a position among
the picked rows; b, a block of the tile; k, a column of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import triton.language as tl

_KERNELS: list[Callable[..., Any]] = []


def _kernel(function: Callable[..., Any]) -> Any:
    """Marks a function for Triton: `load_kernels` replaces it."""
    _KERNELS.append(function)
    return function


@cache
def load_kernels() -> bool:
    """Makes the kernels callable (each is compiled on its first call). Does Triton's interpreter run them?

    That is Triton's own switch: TRITON_INTERPRET=1 when Triton is first imported.
    """
    import triton
    import triton.language
    from triton import knobs

    globals()["tl"] = triton.language
    globals().update({function.__name__: triton.jit(function) for function in _KERNELS})
    return bool(knobs.runtime.interpret)


# --- shared by the kernels; u: position among the picked rows, b: blocks of the tile, k: columns of a block


@_kernel
def _place(row_ptr, num_tiles):
    """Which picked row this program works on, which tile of it, and which row of the logits that is."""
    program = tl.program_id(0)
    u = (program // num_tiles).to(tl.int64)
    row = u
    if row_ptr is not None:
        row = tl.load(row_ptr + u)
    return u, program % num_tiles, row


@_kernel
def _columns(tile, TILE_BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """`[b, k]`: the tile's columns."""
    block_b = tile * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
    return block_b[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@_kernel
def _tempered(logits_ptr, row, row_stride, column_bk, width, temperature):
    """z of the tile in the dtype of the temperature; -inf beyond the end of the row."""
    x_bk = tl.load(logits_ptr + row * row_stride + column_bk, mask=column_bk < width, other=float("-inf")).to(
        temperature.dtype
    )
    z_bk = x_bk
    if temperature != 1.0:
        z_bk = tl.div_rn(x_bk, temperature) if temperature.dtype == tl.float32 else x_bk / temperature
    return z_bk


@_kernel
def _mass(value_bk):
    """Sum over the tile: in the compute dtype inside blocks, float64 across them."""
    return tl.sum(tl.sum(value_bk, axis=1).to(tl.float64), axis=0)


@_kernel
def _number(mask_bk):
    """How many, as float64."""
    return tl.sum(mask_bk.to(tl.int32)).to(tl.float64)


@_kernel
def _finite(y_bk):
    """y with -inf replaced by a number whose exp is 0 too; NaN stays."""
    return tl.where(y_bk < -1e4, -1e4, y_bk)


# --- one kernel per pass ---------------------------------------------------------------------------


@_kernel
def block_maxima(
    logits_ptr,
    row_ptr,
    temperature_ptr,
    below_ptr,
    out_ptr,
    row_stride,
    width,
    num_tiles,
    num_blocks,
    TILE_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    u, tile, row = _place(row_ptr, num_tiles)
    column_bk = _columns(tile, TILE_BLOCKS, BLOCK)
    z_bk = _tempered(logits_ptr, row, row_stride, column_bk, width, tl.load(temperature_ptr + u))
    # NaN fails the comparison and stays; the maximum itself would lose it.
    z_bk = tl.where(z_bk >= tl.load(below_ptr + u), float("-inf"), z_bk)
    has_nan_b = tl.max((z_bk != z_bk).to(tl.int32), axis=1) > 0
    max_b = tl.max(tl.where(z_bk != z_bk, float("-inf"), z_bk), axis=1)
    block_b = tile * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
    value_b = tl.where(has_nan_b, float("nan"), max_b)
    tl.store(out_ptr + u * num_blocks + block_b, value_b, mask=block_b < num_blocks)


@_kernel
def exp_sums(
    logits_ptr,
    row_ptr,
    temperature_ptr,
    max_ptr,
    value_ptr,
    out_ptr,
    row_stride,
    width,
    num_tiles,
    ENTROPY: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    u, tile, row = _place(row_ptr, num_tiles)
    column_bk = _columns(tile, TILE_BLOCKS, BLOCK)
    z_bk = _tempered(logits_ptr, row, row_stride, column_bk, width, tl.load(temperature_ptr + u))
    y_bk = z_bk - tl.load(max_ptr + u)
    exp_bk = tl.where(column_bk < width, tl.exp(y_bk), 0.0)
    out_ptr += (u * num_tiles + tile) * 4
    tl.store(out_ptr, _mass(exp_bk))
    if ENTROPY:
        tl.store(out_ptr + 1, _mass(exp_bk * _finite(y_bk)))
    else:
        tl.store(out_ptr + 1, 0.0)
    tl.store(out_ptr + 2, _number(z_bk > float("-inf")))
    # A value of -inf equals what stands in beyond the end of the row.
    tl.store(out_ptr + 3, _number((z_bk == tl.load(value_ptr + u)) & (column_bk < width)))


@_kernel
def sums_above(
    logits_ptr,
    row_ptr,
    temperature_ptr,
    max_ptr,
    threshold_ptr,
    out_ptr,
    row_stride,
    width,
    num_tiles,
    ENTROPY: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    u, tile, row = _place(row_ptr, num_tiles)
    column_bk = _columns(tile, TILE_BLOCKS, BLOCK)
    z_bk = _tempered(logits_ptr, row, row_stride, column_bk, width, tl.load(temperature_ptr + u))
    y_bk = z_bk - tl.load(max_ptr + u)
    threshold = tl.load(threshold_ptr + u)
    above_bk = z_bk > threshold
    exp_bk = tl.where(above_bk, tl.exp(y_bk), 0.0)
    out_ptr += (u * num_tiles + tile) * 4
    tl.store(out_ptr, _mass(exp_bk))
    tl.store(out_ptr + 1, _number(above_bk))
    # A threshold of -inf equals what stands in beyond the end of the row.
    tl.store(out_ptr + 2, _number((z_bk == threshold) & (column_bk < width)))
    if ENTROPY:
        tl.store(out_ptr + 3, _mass(tl.where(above_bk, exp_bk * _finite(y_bk), 0.0)))
    else:
        tl.store(out_ptr + 3, 0.0)


@_kernel
def pivot_sums(
    logits_ptr,
    row_ptr,
    temperature_ptr,
    max_ptr,
    pivot_ptr,
    out_ptr,
    row_stride,
    width,
    num_tiles,
    NUM_PIVOTS: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    u, tile, row = _place(row_ptr, num_tiles)
    column_bk = _columns(tile, TILE_BLOCKS, BLOCK)
    z_bk = _tempered(logits_ptr, row, row_stride, column_bk, width, tl.load(temperature_ptr + u))
    exp_bk = tl.exp(z_bk - tl.load(max_ptr + u))
    out_ptr += (u * num_tiles + tile) * (2 * NUM_PIVOTS)
    for index in tl.static_range(NUM_PIVOTS):  # pyright: ignore[reportGeneralTypeIssues]
        above_bk = (z_bk >= tl.load(pivot_ptr + u * NUM_PIVOTS + index)) & (column_bk < width)
        tl.store(out_ptr + 2 * index, _mass(tl.where(above_bk, exp_bk, 0.0)))
        tl.store(out_ptr + 2 * index + 1, _number(above_bk))


@_kernel
def add_tiles(partial_ptr, out_ptr, num_tiles, NUM_SUMS: tl.constexpr, MAX_TILES: tl.constexpr):
    """`[u, tiles, NUM_SUMS]` -> `[u, NUM_SUMS]`, one row a program, always in the same order."""
    u = tl.program_id(0).to(tl.int64)
    tile_i = tl.arange(0, MAX_TILES)
    for index in tl.static_range(NUM_SUMS):  # pyright: ignore[reportGeneralTypeIssues]
        partial_i = tl.load(
            partial_ptr + (u * num_tiles + tile_i) * NUM_SUMS + index, mask=tile_i < num_tiles, other=0.0
        )
        tl.store(out_ptr + u * NUM_SUMS + index, tl.sum(partial_i, axis=0))


@_kernel
def gradient(
    logits_ptr,
    row_ptr,
    temperature_ptr,
    max_ptr,
    threshold_ptr,
    share_ptr,
    terms_ptr,
    out_ptr,
    row_stride,
    width,
    num_tiles,
    ENTROPY: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    u, tile, row = _place(row_ptr, num_tiles)
    column_bk = _columns(tile, TILE_BLOCKS, BLOCK)
    temperature = tl.load(temperature_ptr + u)
    z_bk = _tempered(logits_ptr, row, row_stride, column_bk, width, temperature)
    y_bk = z_bk - tl.load(max_ptr + u)
    terms_ptr += u * 8
    kept_log, kept_scale = tl.load(terms_ptr), tl.load(terms_ptr + 1)
    whole_log, whole_scale = tl.load(terms_ptr + 2), tl.load(terms_ptr + 3)
    kept_slope, whole_slope = 0.0 * kept_scale, 0.0 * whole_scale
    if ENTROPY:
        kept_slope, whole_slope = tl.load(terms_ptr + 4), tl.load(terms_ptr + 6)
    # A distribution that no upstream gradient reaches costs no exp. The NaN log of a broken row has to show.
    grad_bk = tl.zeros_like(z_bk)
    if (kept_scale != 0.0) | (kept_slope != 0.0) | (kept_log != kept_log):
        threshold = tl.load(threshold_ptr + u)
        at_bk = tl.where(z_bk == threshold, tl.load(share_ptr + u), 0.0)
        weight_bk = tl.where(z_bk > threshold, 1.0, at_bk)
        log_p_bk = y_bk - kept_log
        # Below the threshold y may be far above the kept log-sum's range: bounded before exp, weighted after.
        kept_bk = weight_bk * tl.exp(tl.where(log_p_bk > 0.0, 0.0, log_p_bk))
        factor_bk = tl.zeros_like(z_bk) + kept_scale
        if ENTROPY:
            factor_bk += kept_slope * (_finite(y_bk) - tl.load(terms_ptr + 5))
        grad_bk = kept_bk * factor_bk
    if (whole_scale != 0.0) | (whole_slope != 0.0) | (whole_log != whole_log):
        factor_bk = tl.zeros_like(z_bk) + whole_scale
        if ENTROPY:
            factor_bk += whole_slope * (_finite(y_bk) - tl.load(terms_ptr + 7))
        grad_bk += tl.exp(y_bk - whole_log) * factor_bk
    # Nothing is compared with a gradient: one division a row, not one an entry.
    grad_bk *= 1.0 / temperature
    out_ptr += u * width
    tl.store(out_ptr + column_bk, grad_bk.to(out_ptr.dtype.element_ty), mask=column_bk < width)
