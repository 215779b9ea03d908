"""The passes on a GPU, by Triton. Same arguments, meaning and order as the eager ones in `passes.py`.

One program takes TILE_BLOCKS blocks of BLOCK columns of one row, so its share of the work depends on neither
the number of rows nor their width: 8,192 rows fill a GPU many times over, a few rows still spread over it,
and a row's result has the same bits whatever rows it is called with. Sums are float32 inside a block and
float64 across the blocks of a tile; a second small kernel adds the tiles of a row in order.

z must equal the eager z bit for bit, because thresholds are compared with it: the temperature divides with
IEEE rounding (Triton's own `/` is an approximation), and not at all where it is 1.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch

from rlcore.ops import triton_kernels
from rlcore.ops.passes import BLOCK, Passes, Wanted, compute_dtype

# Blocks of a program. 4,096 columns are 32 logits for each of its 128 threads, in bfloat16 four loads of 16
# bytes: enough in flight to fill the memory bus, few enough to stay in registers.
TILE_BLOCKS = 64
NUM_WARPS = 4


@cache
def is_installed() -> bool:
    """Can Triton be imported? Looks without importing it."""
    return importlib.util.find_spec("triton") is not None


def _readable(
    logits_tv: torch.Tensor, row_u: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Logits with neighbouring columns side by side, the pick and the number of picked rows.

    Rows may lie anywhere. Where columns are not neighbours (a transposed or stepped view) the picked rows are
    copied, on each call: hand in rows of contiguous columns.
    """
    num_rows = logits_tv.shape[0] if row_u is None else row_u.shape[0]
    if logits_tv.stride(1) == 1 or logits_tv.shape[1] <= 1:
        return logits_tv, row_u, num_rows
    return (logits_tv if row_u is None else logits_tv[row_u]).contiguous(), None, num_rows


def _num_tiles(width: int) -> int:
    return -(-width // (BLOCK * TILE_BLOCKS))


def _launch(
    kernel: Any,
    logits_tv: torch.Tensor,
    row_u: torch.Tensor | None,
    per_row: list[torch.Tensor],
    out: torch.Tensor,
    **constants: int,
) -> None:
    """One program per row and tile, tiles of a row next to each other: neighbours in memory run together.

    One grid axis, because the others end at 65,535.
    """
    logits_tv, row_u, num_rows = _readable(logits_tv, row_u)
    num_tiles = _num_tiles(logits_tv.shape[1])
    if num_rows * num_tiles == 0:
        return
    assert all(vector.dtype == compute_dtype(logits_tv) for vector in per_row)
    with torch.cuda.device_of(logits_tv):
        kernel[(num_rows * num_tiles,)](
            logits_tv,
            None if row_u is None else row_u.contiguous(),
            *(vector.contiguous() for vector in per_row),
            out,
            logits_tv.stride(0),
            logits_tv.shape[1],
            num_tiles,
            **constants,
            TILE_BLOCKS=TILE_BLOCKS,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )


def _sums(
    kernel: Any,
    num_sums: int,
    logits_tv: torch.Tensor,
    row_u: torch.Tensor | None,
    per_row: list[torch.Tensor],
    **constants: int,
) -> torch.Tensor:
    """`[u, num_sums]` float64: the tiles' sums, added."""
    num_rows = logits_tv.shape[0] if row_u is None else row_u.shape[0]
    num_tiles = _num_tiles(logits_tv.shape[1])
    partial_uis = torch.empty((num_rows, num_tiles, num_sums), dtype=torch.float64, device=logits_tv.device)
    _launch(kernel, logits_tv, row_u, per_row, partial_uis, **constants)
    if num_tiles == 1:
        return partial_uis[:, 0]
    total_us = torch.zeros((num_rows, num_sums), dtype=torch.float64, device=logits_tv.device)
    if num_rows * num_tiles:
        max_tiles = 1 << (num_tiles - 1).bit_length()
        with torch.cuda.device_of(logits_tv):
            triton_kernels.add_tiles[(num_rows,)](
                partial_uis, total_us, num_tiles, NUM_SUMS=num_sums, MAX_TILES=max_tiles, num_warps=1
            )
    return total_us


def _block_maxima(
    logits_tv: torch.Tensor, row_u: torch.Tensor | None, temperature_u: torch.Tensor, below_u: torch.Tensor
) -> torch.Tensor:
    num_rows = logits_tv.shape[0] if row_u is None else row_u.shape[0]
    num_blocks = -(-logits_tv.shape[1] // BLOCK)
    out_ub = torch.empty((num_rows, num_blocks), dtype=compute_dtype(logits_tv), device=logits_tv.device)
    per_row = [temperature_u, below_u]
    _launch(triton_kernels.block_maxima, logits_tv, row_u, per_row, out_ub, num_blocks=num_blocks)
    return out_ub


def _exp_sums(
    logits_tv: torch.Tensor,
    row_u: torch.Tensor | None,
    temperature_u: torch.Tensor,
    max_u: torch.Tensor,
    value_u: torch.Tensor,
    entropy: bool,
) -> torch.Tensor:
    per_row = [temperature_u, max_u, value_u]
    return _sums(triton_kernels.exp_sums, 4, logits_tv, row_u, per_row, ENTROPY=entropy)


def _sums_above(
    logits_tv: torch.Tensor,
    row_u: torch.Tensor | None,
    temperature_u: torch.Tensor,
    max_u: torch.Tensor,
    threshold_u: torch.Tensor,
    entropy: bool,
) -> torch.Tensor:
    per_row = [temperature_u, max_u, threshold_u]
    return _sums(triton_kernels.sums_above, 4, logits_tv, row_u, per_row, ENTROPY=entropy)


def _pivot_sums(
    logits_tv: torch.Tensor,
    row_u: torch.Tensor | None,
    temperature_u: torch.Tensor,
    max_u: torch.Tensor,
    pivot_up: torch.Tensor,
) -> torch.Tensor:
    num_pivots = pivot_up.shape[1]
    per_row = [temperature_u, max_u, pivot_up]
    sums_us = _sums(
        triton_kernels.pivot_sums, 2 * num_pivots, logits_tv, row_u, per_row, NUM_PIVOTS=num_pivots
    )
    return sums_us.unflatten(1, (num_pivots, 2))


def _gradient(
    logits_tv: torch.Tensor,
    row_u: torch.Tensor | None,
    temperature_u: torch.Tensor,
    max_u: torch.Tensor,
    threshold_u: torch.Tensor,
    share_u: torch.Tensor,
    terms_uc: torch.Tensor,
    wanted: Wanted,
) -> torch.Tensor:
    # The kernel itself skips a distribution that no gradient reaches, row by row.
    num_rows = logits_tv.shape[0] if row_u is None else row_u.shape[0]
    out_uv = torch.empty((num_rows, logits_tv.shape[1]), dtype=logits_tv.dtype, device=logits_tv.device)
    per_row = [temperature_u, max_u, threshold_u, share_u, terms_uc]
    _launch(triton_kernels.gradient, logits_tv, row_u, per_row, out_uv, ENTROPY=wanted.entropy)
    return out_uv


PASSES = Passes(
    name="triton",
    block_maxima=_block_maxima,
    exp_sums=_exp_sums,
    sums_above=_sums_above,
    pivot_sums=_pivot_sums,
    gradient=_gradient,
)


def passes_for(logits_tv: torch.Tensor) -> Passes:
    """The kernels, for logits on a GPU.

    Raises `ValueError` where Triton is not installed, and for logits on the CPU unless Triton was imported
    with TRITON_INTERPRET=1 (slow: for checking the kernels without a GPU).
    """
    if not is_installed():
        raise ValueError(
            "backend='triton': Triton is not installed here. Install it, or set backend to one of the "
            "available 'auto', 'torch', 'compile'."
        )
    if not triton_kernels.load_kernels() and not logits_tv.is_cuda:
        raise ValueError(
            f"backend='triton' needs logits on a GPU, these are on {logits_tv.device}. Available for them: "
            "'auto', 'torch', 'compile'."
        )
    return PASSES
