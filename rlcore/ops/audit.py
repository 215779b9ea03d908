"""Audit: how the support that the trainer searches differs from the one that the sampler used.

A diagnostic without gradient; the op's own result is not touched. Differences near the cut are the usual
noise between two engines; a low Jaccard index, or targets outside the trainer's support, mean that the two
sides do not sample from the same distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Unpack

import torch

from rlcore.collectives import Group, all_gather, all_reduce_, group_size
from rlcore.metrics import Metric, mean_over
from rlcore.ops.linear_head import HeadOptions, LinearHead
from rlcore.ops.logprob import ScoredRows, VocabShard, real_columns, score_rows
from rlcore.ops.passes import Passes, select_passes
from rlcore.ops.penalties import PenaltyTokens, penalised_logits
from rlcore.ops.replay import LocalTargets, Replayed, replayed_entries
from rlcore.sampling_mask import SamplingMask


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """How two supports of each row differ. `[t]`, the same on every TP rank; compute dtype unless stated."""

    jaccard_t: torch.Tensor
    """Common ids over all ids of the two supports. Of a group tied at the cut any ids serve as kept.
    """
    num_replayed_t: torch.Tensor
    """int64: ids that the sampler kept, the target among them."""
    num_recomputed_t: torch.Tensor
    """int64: ids that the trainer keeps."""
    log_mass_difference_t: torch.Tensor
    """Log mass of the replayed support less that of the recomputed one."""
    out_of_support_t: torch.Tensor
    """bool: the trainer's support lacks the target."""

    def metrics(self, valid_t: torch.Tensor) -> dict[str, Metric]:
        """Means over the rows where `valid_t [t]` bool is True, to be reduced with the step's metrics."""
        return {
            "audit/jaccard": mean_over(self.jaccard_t, valid_t),
            "audit/num_replayed": mean_over(self.num_replayed_t, valid_t),
            "audit/num_recomputed": mean_over(self.num_recomputed_t, valid_t),
            "audit/log_mass_difference": mean_over(self.log_mass_difference_t, valid_t),
            "audit/out_of_support": mean_over(self.out_of_support_t.double(), valid_t),
        }


@torch.no_grad()
def audit_supports(
    logits_tv: torch.Tensor,
    target_t: torch.Tensor,
    distribution: Replayed,
    tp_group: Group,
    vocab: VocabShard,
    *,
    penalties: PenaltyTokens | None = None,
    backend: str = "auto",
) -> AuditReport:
    """Compares the replayed support of each row with the one that a search finds.

    Maths: Jaccard = c / (r + s - c), with r replayed and s recomputed ids, c of them common.
    Shapes: `logits_tv [t, v]`, `target_t [t]`, a mask of t rows. Dtypes, Layout: as `vocab_parallel_logprob`.
    Collectives: over `tp_group`, those of a search, those of a replay, and one all-gather of 3 float64 a
        token.
    Backward: none. Mutates: nothing. Costs about two forward passes of the op.

    Values are not checked: `SamplingMask.check` does, at the border. A broken row gives NaN.
    """
    spec, mask = distribution.spec, distribution.mask
    if spec.penalises and penalties is not None:
        logits_tv = penalised_logits(logits_tv, penalties, spec, vocab.start)
        spec = spec.without_penalties()
    passes = select_passes(backend, logits_tv)
    searched, saved = score_rows(passes, logits_tv, target_t, spec, tp_group, vocab, False)
    replayed, _ = score_rows(passes, logits_tv, target_t, Replayed(spec, mask), tp_group, vocab, False)
    common_t = _num_common(passes, real_columns(logits_tv, vocab), saved, mask, vocab.start, tp_group)
    union_t = replayed.num_kept_t + searched.num_kept_t - common_t
    broken_t = replayed.unfiltered_logprob_t.isnan()
    return AuditReport(
        jaccard_t=torch.where(broken_t, math.nan, common_t / union_t).to(replayed.logprob_t.dtype),
        num_replayed_t=replayed.num_kept_t,
        num_recomputed_t=searched.num_kept_t,
        log_mass_difference_t=replayed.log_mass_t - searched.log_mass_t,
        out_of_support_t=~searched.keep_t,
    )


@torch.no_grad()
def linear_audit_supports(
    hidden_td: torch.Tensor,
    weight_vd: torch.Tensor,
    target_t: torch.Tensor,
    distribution: Replayed,
    tp_group: Group,
    vocab: VocabShard,
    **options: Unpack[HeadOptions],
) -> AuditReport:
    """`audit_supports(hidden_td @ weight_vd.T, ...)` with the logits of one chunk of tokens at a time.

    Shapes, Dtypes, Layout: as `linear_vocab_parallel_logprob`; the report is that of all T tokens on every
    rank. Collectives: over `tp_group`, for each chunk those of `audit_supports`; with `sequence_parallel` one
    all-gather of hidden before. Backward: none. Mutates: nothing.

    Raises `ValueError` as `linear_vocab_parallel_logprob`.
    """
    given: HeadOptions = {**options, "replay": distribution.mask}
    head = LinearHead.of(hidden_td, weight_vd, target_t, distribution.spec, tp_group, vocab, given)
    whole_td = head.gather(hidden_td)
    reports = [
        audit_supports(
            head.logits(whole_td, weight_vd, chunk),
            target_t[chunk],
            distribution.rows(chunk),
            tp_group,
            vocab,
            backend=head.backend,
        )
        for chunk in head.chunks()
    ]
    names = [field.name for field in fields(AuditReport)]
    return AuditReport(**{name: torch.cat([getattr(report, name) for report in reports]) for name in names})


def _num_common(
    passes: Passes,
    real_tv: torch.Tensor,
    saved: ScoredRows,
    mask: SamplingMask,
    start: int,
    tp_group: Group,
) -> torch.Tensor:
    """`[t]` float64: replayed ids above the searched threshold, and those at it as far as their group is
    kept.
    """
    threshold_t, temperature_t = saved.support.threshold_t, saved.params.temperature_t
    targets = LocalTargets(start=start, here_t=saved.here_t, column_t=saved.column_t)
    entries, first_n = replayed_entries(mask, targets, real_tv.shape[1]).once(real_tv.shape[1])
    z_n = entries.gather(real_tv) / temperature_t[entries.row_n]
    counts_n = first_n & (z_n > -math.inf)
    nothing_t = torch.zeros(threshold_t.shape, dtype=torch.float64, device=threshold_t.device)

    def number(condition_n: torch.Tensor) -> torch.Tensor:
        return nothing_t.index_add(0, entries.row_n, (condition_n & counts_n).double())

    tied_t = nothing_t
    if real_tv.shape[1]:
        max_t = saved.stats.max_t
        tied_t = passes.sums_above(real_tv, None, temperature_t, max_t, threshold_t, False)[:, 2]
    row_threshold_n = threshold_t[entries.row_n]
    local_t3 = torch.stack([number(z_n > row_threshold_n), number(z_n == row_threshold_n), tied_t], dim=1)
    above_t, at_t, tied_t = all_gather(local_t3, tp_group).sum(dim=0).unbind(dim=1)
    num_group_t = (saved.support.share_t.double() * tied_t).round()
    return above_t + torch.minimum(at_t, num_group_t)


def gathered_quantiles(
    value_t: torch.Tensor, valid_t: torch.Tensor, quantiles: Sequence[float], group: Group = None
) -> torch.Tensor:
    """`[q]` float64: quantiles of the valid values of all ranks of `group`, by nearest rank. NaN without any.

    For the end of a step: reads one count back. Collectives: one all-reduce of 1 number, one all-gather of
    the values, padded to the largest count.
    """
    picked_n = value_t.detach()[valid_t].double()
    longest = torch.tensor([picked_n.shape[0]], device=value_t.device)
    if group_size(group) > 1:
        longest = all_reduce_(longest, "max", group)
    padded_n = picked_n.new_full((int(longest[0]),), math.nan)
    padded_n[: picked_n.shape[0]] = picked_n
    sorted_n = all_gather(padded_n, group).flatten().sort().values
    num_values = (~sorted_n.isnan()).sum()
    at_q = torch.tensor(list(quantiles), dtype=torch.float64, device=value_t.device)
    if sorted_n.shape[0] == 0:
        return torch.full_like(at_q, math.nan)
    return sorted_n[(at_q * (num_values - 1)).round().long().clamp(min=0)]
