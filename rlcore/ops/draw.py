"""Drawing the next token from the truncated distribution, vocabulary sharded over TP: the sampler's side of
the op.

The support comes from the same search that scores tokens, so sampler and trainer agree by construction.
"""

from __future__ import annotations

import math

import torch

from rlcore.collectives import Group, all_gather
from rlcore.ops.filter import find_support
from rlcore.ops.logprob import VocabShard, real_columns
from rlcore.ops.passes import EAGER, compute_dtype, temper
from rlcore.ops.penalties import PenaltyTokens, penalised_logits
from rlcore.ops.rows import RowParams
from rlcore.sampling import RowSampling, SamplingSpec


def draw_tokens(
    logits_tv: torch.Tensor,
    spec: SamplingSpec | RowSampling,
    tp_group: Group,
    vocab: VocabShard,
    generator: torch.Generator,
    penalties: PenaltyTokens | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One id per row and its logprob under the truncated distribution, the same on all TP ranks.

    Maths: argmax over the support of z + log(share) - log E with E ~ Exp(1), which draws from the
        distribution.
    Shapes: `logits_tv [t, v]` -> ids `[t]` int64, logprobs `[t]`. Dtypes: as `vocab_parallel_logprob`.
    `penalties`: the tokens before each row, where the spec has a penalty.
    Layout: `generator` must differ between TP ranks (each draws the noise of its own columns).
    Collectives: those of `find_support`, and one all-gather of 3 float64 a row. Backward: none. Mutates: the
        generator. Rows with NaN, +inf or nothing finite give NaN as logprob: the caller refuses them.
    """
    if spec.penalises and penalties is not None:
        logits_tv = penalised_logits(logits_tv, penalties, spec, vocab.start)
        spec = spec.without_penalties()
    real_tv = real_columns(logits_tv, vocab)
    dtype = compute_dtype(logits_tv)
    params = RowParams.of(spec, logits_tv, vocab.vocab_size, dtype)
    if real_tv.shape[1] == 0:
        real_tv = torch.full((logits_tv.shape[0], 1), -math.inf, dtype=dtype, device=logits_tv.device)
    nothing_t = torch.full((logits_tv.shape[0],), -math.inf, device=logits_tv.device, dtype=dtype)
    _, stats, support = find_support(EAGER, real_tv, nothing_t, params, tp_group, entropy=False)
    z_tv = temper(real_tv, params.temperature_t)
    weight_tv = support_weight(z_tv, support.threshold_t, support.share_t)
    noise_tv = torch.empty_like(z_tv).exponential_(generator=generator)
    score_tv = (z_tv - stats.max_t[:, None]) + weight_tv.log() - noise_tv.log()
    score_t, column_t = torch.where(weight_tv > 0, score_tv, -math.inf).max(dim=1)
    picked_t = z_tv.gather(1, column_t[:, None])[:, 0]
    best_t3 = torch.stack([score_t.double(), (column_t + vocab.start).double(), picked_t.double()], dim=1)
    gathered_rt3 = all_gather(best_t3, tp_group)
    winner_t = gathered_rt3[:, :, 0].argmax(dim=0)
    chosen_t3 = gathered_rt3.gather(0, winner_t[None, :, None].expand(1, -1, 3))[0]
    logprob_t = chosen_t3[:, 2].to(stats.max_t.dtype) - stats.max_t - support.log_sum_t
    # log_sum is NaN for a broken row whatever its own entries say.
    return chosen_t3[:, 1].long(), logprob_t + 0.0 * stats.log_sum_t


def support_weight(z_tv: torch.Tensor, threshold_t: torch.Tensor, share_t: torch.Tensor) -> torch.Tensor:
    """`[t, v]`: 1 above the row's threshold, the share at it, 0 below."""
    at_tv = torch.where(z_tv == threshold_t[:, None], share_t[:, None], 0.0)
    return torch.where(z_tv > threshold_t[:, None], 1.0, at_tv)
