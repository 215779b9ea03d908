"""Replay: the ids that the sampler itself kept, instead of a search for them.

The support of a row is exactly its listed ids, each with weight 1, and the target, which the sampler drew and
so kept. `vocab_parallel_logprob(..., replay=mask)` scores under it; this file holds what differs from a
searched support: sums over a few listed entries, and their terms in the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from rlcore.collectives import Group, all_gather
from rlcore.ops.entries import ListedEntries
from rlcore.ops.passes import finite
from rlcore.ops.rows import RowStats, Support
from rlcore.sampling import RowSampling, SamplingSpec
from rlcore.sampling_mask import SamplingMask

ReplayMode = Literal["recompute", "replay", "audit"]
REPLAY_MODES: tuple[str, ...] = get_args(ReplayMode)


@dataclass(frozen=True)
class Replayed:
    """A sampling distribution whose support is given: what the op takes in place of a spec."""

    spec: SamplingSpec | RowSampling
    """Its temperature counts; its top-k, top-p and min-p are replaced by the mask."""
    mask: SamplingMask

    def rows(self, chunk: slice) -> Replayed:
        """The same for some consecutive rows."""
        spec = self.spec.rows(chunk) if isinstance(self.spec, RowSampling) else self.spec
        return Replayed(spec, self.mask.rows(chunk))


@dataclass(frozen=True, kw_only=True)
class LocalTargets:
    """The targets as this shard sees them."""

    start: int
    """Id of the shard's first column."""
    here_t: torch.Tensor
    """`[t]` bool: the target is one of its columns."""
    column_t: torch.Tensor
    """`[t]` int64: which."""


@dataclass(frozen=True, kw_only=True)
class ReplayedRows:
    """The replayed support of each row: the mask and O(t) numbers, float64, relative to the row's largest."""

    mask: SamplingMask
    targets: LocalTargets
    log_sum_t: torch.Tensor
    """`[t]` float64: log of the sum of exp(y) over the support; NaN where all of it is banned."""
    entropy_t: torch.Tensor
    """`[t]` float64; meaningless unless it was asked for."""
    num_kept_t: torch.Tensor
    """`[t]` int64: ids of the support that are not banned."""

    def in_gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`log_sum_t` and `entropy_t` with 0 where all of the support is banned. Such a row is masked, and
        then its incoming gradients are 0, which no NaN may meet; or it is refused for its unfiltered logprob.
        """
        banned_t = self.log_sum_t.isnan()
        return torch.where(banned_t, 0.0, self.log_sum_t), torch.where(banned_t, 0.0, self.entropy_t)

    def support(self, dtype: torch.dtype) -> Support:
        """For the passes: nothing lies above the threshold, so they write the whole row's terms alone."""
        log_sum_t, entropy_t = self.in_gradients()
        return Support(
            threshold_t=torch.full(self.log_sum_t.shape, math.inf, dtype=dtype, device=self.log_sum_t.device),
            share_t=torch.zeros(self.log_sum_t.shape, dtype=dtype, device=self.log_sum_t.device),
            log_sum_t=log_sum_t.to(dtype),
            num_kept_t=self.num_kept_t,
            entropy_t=entropy_t.to(dtype),
        )


def replayed_entries(mask: SamplingMask, targets: LocalTargets, width: int) -> ListedEntries:
    """The listed entries and after them the targets, as columns of a shard of `width` real columns."""
    here_t, num_rows = targets.here_t, mask.num_rows
    offsets = mask.offsets.to(here_t.device)
    index_n = torch.arange(mask.token_ids.shape[0], device=here_t.device, dtype=offsets.dtype)
    row_n = torch.searchsorted(offsets[1:].contiguous(), index_n, right=True)
    # An unchecked mask may list ids beyond its last row: those are nobody's.
    id_n = torch.where(row_n < num_rows, mask.token_ids.to(here_t.device).long(), -1)
    listed = ListedEntries.of(row_n.clamp(max=num_rows - 1), id_n, targets.start, width)
    return ListedEntries(
        row_n=torch.cat([listed.row_n, torch.arange(num_rows, device=here_t.device)]),
        column_n=torch.cat([listed.column_n, targets.column_t]),
        here_n=torch.cat([listed.here_n, here_t]),
    )


def replay_rows(
    real_tv: torch.Tensor,
    mask: SamplingMask,
    targets: LocalTargets,
    temperature_t: torch.Tensor,
    stats: RowStats,
    tp_group: Group,
    entropy: bool,
) -> ReplayedRows:
    """The replayed support of each row, the same on every rank.

    Maths: log_sum = log of the sum of exp(z - max) over the listed ids and the target, each id once.
    Shapes: `real_tv [t, v]`, this rank's real columns; a mask of n ids in t rows. O((n + t) log(n + t)) work.
    Dtypes: z in the compute dtype, sums in float64 relative to the largest listed value.
    Layout: every rank holds the whole mask and reads the ids of its own shard.
    Collectives: over `tp_group`, one all-gather of 4 float64 a token. Backward: none; see
        `write_replayed_gradient_`.
    Mutates: nothing.
    """
    entries, first_n = replayed_entries(mask, targets, real_tv.shape[1]).once(real_tv.shape[1])
    z_n = (entries.gather(real_tv) / temperature_t[entries.row_n]).double()
    counts_n = first_n & (z_n > -math.inf)
    nothing_t = torch.zeros(temperature_t.shape, dtype=torch.float64, device=real_tv.device)
    max_t = (nothing_t - math.inf).scatter_reduce(0, entries.row_n, z_n, "amax")
    y_n = z_n - torch.where(torch.isneginf(max_t), 0.0, max_t)[entries.row_n]
    exp_n = torch.where(counts_n, y_n.exp(), 0.0)

    def row_sum(value_n: torch.Tensor) -> torch.Tensor:
        return nothing_t.index_add(0, entries.row_n, value_n)

    weighted_t = row_sum(exp_n * finite(y_n)) if entropy else nothing_t
    local_t4 = torch.stack([max_t, row_sum(exp_n), weighted_t, row_sum(counts_n.double())], dim=1)
    max_rt, sum_rt, weighted_rt, count_rt = all_gather(local_t4, tp_group).unbind(dim=2)
    max_t = max_rt.amax(dim=0)
    shift_rt = torch.where(torch.isneginf(max_rt), -math.inf, max_rt - max_t)
    sum_t = (sum_rt * shift_rt.exp()).sum(dim=0)
    log_sum_t = torch.where(sum_t > 0, sum_t.log(), math.nan)
    weighted_t = (shift_rt.exp() * (weighted_rt + sum_rt * finite(shift_rt))).sum(dim=0)
    return ReplayedRows(
        mask=mask,
        targets=targets,
        log_sum_t=max_t - stats.max_t.double() + log_sum_t,
        entropy_t=log_sum_t - weighted_t / sum_t,
        num_kept_t=count_rt.sum(dim=0).long(),
    )


def write_replayed_gradient_(
    grad_tv: torch.Tensor,
    real_tv: torch.Tensor,
    replayed: ReplayedRows,
    stats: RowStats,
    temperature_t: torch.Tensor,
    grads: Sequence[torch.Tensor],
) -> None:
    """Overwrites the support's entries of a gradient that holds the whole row's terms alone.

    `grads`: of logprob, unfiltered logprob, log mass, both entropies. Every entry is written whole, rounded
    to the gradient's dtype once. O(n + t) work, nothing is sent.
    """
    targets = replayed.targets
    entries = replayed_entries(replayed.mask, targets, real_tv.shape[1])
    row_n = entries.row_n
    y_n = (entries.gather(real_tv) / temperature_t[row_n]).double() - stats.max_t.double()[row_n]
    logprob_t, unfiltered_t, mass_t, entropy_t, whole_entropy_t = (grad.double() for grad in grads)
    whole_log_t = stats.sum_t.log()

    def term(
        log_sum_t: torch.Tensor, scale_t: torch.Tensor, slope_t: torch.Tensor, own_entropy_t: torch.Tensor
    ) -> torch.Tensor:
        # dH/dz = -p (z - E[z]), E[z] = log - H.
        p_n = (y_n - log_sum_t[row_n]).exp()
        shifted_n = finite(y_n) - (log_sum_t - own_entropy_t)[row_n]
        return p_n * (scale_t[row_n] - slope_t[row_n] * shifted_n)

    is_target_n = targets.here_t[row_n] & (entries.column_n == targets.column_t[row_n])
    value_n = torch.where(is_target_n, (logprob_t + unfiltered_t)[row_n], 0.0)
    log_sum_t, support_entropy_t = replayed.in_gradients()
    value_n = value_n + term(log_sum_t, mass_t - logprob_t, entropy_t, support_entropy_t)
    value_n = value_n + term(whole_log_t, -mass_t - unfiltered_t, whole_entropy_t, stats.entropy_t.double())
    entries.write_(grad_tv, value_n / temperature_t[row_n])
