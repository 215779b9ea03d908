"""What both support searches share: statistics of a row, its support, and visiting rows without large
temporaries.

y is a tempered logit relative to the largest of its whole row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rlcore.sampling import SamplingSpec

# Elements of a temporary: rows are visited in chunks so that memory does not grow with the number of tokens.
CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class RowStats:
    """Of each whole row (all shards), y = z - max."""

    max_t: torch.Tensor
    """`[t]`: largest tempered logit."""
    log_sum_t: torch.Tensor
    """`[t]`: log of the sum of exp(y); NaN where the row has a NaN, a +inf, or nothing finite."""
    entropy_t: torch.Tensor | None
    """`[t]`: entropy of the whole distribution, when asked for."""


@dataclass(frozen=True, kw_only=True)
class Support:
    """The kept set of each row."""

    threshold_t: torch.Tensor
    """`[t]`: smallest kept tempered logit."""
    share_t: torch.Tensor
    """`[t]`: weight of each entry equal to the threshold; entries above it weigh 1."""
    log_sum_t: torch.Tensor
    """`[t]`: log of the weighted sum of exp(y) over the support, relative to the row's max."""
    num_kept_t: torch.Tensor
    """`[t]` int64: the support's size, a shared group counting its share."""
    entropy_t: torch.Tensor | None
    """`[t]`: entropy of the truncated distribution, when asked for."""


def row_chunks(logits_tv: torch.Tensor) -> Iterator[slice]:
    """Row slices whose elements number at most CHUNK_ELEMENTS (at least one row)."""
    rows = max(1, CHUNK_ELEMENTS // max(1, logits_tv.shape[1]))
    for start in range(0, logits_tv.shape[0], rows):
        yield slice(start, min(start + rows, logits_tv.shape[0]))


def temper(logits_tv: torch.Tensor, spec: SamplingSpec) -> torch.Tensor:
    """Tempered logits in the compute dtype: float32, or float64 for float64 input. A new tensor unless T is
    1.
    """
    z_tv = logits_tv.to(compute_dtype(logits_tv))
    return z_tv if spec.effective_temperature == 1.0 else z_tv / spec.effective_temperature


def compute_dtype(logits_tv: torch.Tensor) -> torch.dtype:
    """float64 stays float64 (for gradient checks); everything else is computed in float32."""
    return torch.float64 if logits_tv.dtype == torch.float64 else torch.float32


def finite(y_tv: torch.Tensor) -> torch.Tensor:
    """y with -inf replaced by a number whose exp is 0 too, so that exp(y) * y is 0 there and not NaN."""
    return y_tv.clamp(min=-1e4)


def min_p_floor(stats: RowStats, spec: SamplingSpec) -> torch.Tensor:
    """`[t]`: smallest tempered logit that min-p keeps; -inf when it is off."""
    return stats.max_t + spec.min_p_cut


def sums_from(
    logits_tv: torch.Tensor, threshold_t: torch.Tensor, stats: RowStats, spec: SamplingSpec, entropy: bool
) -> torch.Tensor:
    """`[t, 3]` of this shard over z >= threshold: sum of exp(y), count, sum of exp(y) y (0 unless
    `entropy`).
    """
    sums_tc = torch.zeros((logits_tv.shape[0], 3), dtype=stats.max_t.dtype, device=logits_tv.device)
    for rows in row_chunks(logits_tv):
        z_tv = temper(logits_tv[rows], spec)
        kept_tv = z_tv >= threshold_t[rows, None]
        y_tv = z_tv - stats.max_t[rows, None]
        exp_tv = torch.where(kept_tv, y_tv.exp(), 0.0)
        sums_tc[rows, 0] = exp_tv.sum(dim=1)
        sums_tc[rows, 1] = kept_tv.sum(dim=1).to(sums_tc.dtype)
        if entropy:
            sums_tc[rows, 2] = (exp_tv * finite(y_tv)).sum(dim=1)
    return sums_tc
