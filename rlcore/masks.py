"""THE MASKS: which tokens a term of the loss sees, and the disjoint reasons why the others left.

A token that cannot be scored leaves the mask; nothing is ever replaced by a number. Masks keep their dtype
and are never changed in place, so the next epoch starts from the original. All flags are bool and of one
shape; a flag that is None drops nothing.
"""

from __future__ import annotations

import torch

from rlcore.metrics import Metric, Sum

# Clamp of a log ratio before exp, in nats: exp(20) is above any threshold of a sequence check.
MAX_LOG_RATIO = 20.0


def keep_only(mask_t: torch.Tensor, keep_t: torch.Tensor) -> torch.Tensor:
    """`mask_t` where `keep_t` (bool, same shape), 0/False elsewhere: a new tensor in `mask_t`'s own dtype."""
    return torch.where(keep_t, mask_t, torch.zeros_like(mask_t))


def kl_mask(
    token_mask_t: torch.Tensor, sample_mask_t: torch.Tensor, sequence_keep_t: torch.Tensor | None = None
) -> torch.Tensor:
    """What the reference KL and the mismatch diagnostics see: token & sample, the valid tokens.

    `sample_mask_t` per token; `sequence_keep_t`: the sequence passed the sequence check.
    """
    return _all(token_mask_t & sample_mask_t, sequence_keep_t)


def retained_mask(
    token_mask_t: torch.Tensor,
    sample_mask_t: torch.Tensor,
    keep_old_t: torch.Tensor | None,
    sequence_keep_t: torch.Tensor | None = None,
) -> torch.Tensor:
    """token & sample & keep_old, known before the first forward of a step."""
    return _all(kl_mask(token_mask_t, sample_mask_t, sequence_keep_t), keep_old_t)


def actor_mask(
    token_mask_t: torch.Tensor,
    sample_mask_t: torch.Tensor,
    keep_old_t: torch.Tensor | None,
    keep_t: torch.Tensor,
    importance_keep_t: torch.Tensor | None = None,
    sequence_keep_t: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the policy-gradient term sees: token & sample & keep_old & keep, less what an importance filter
    dropped.
    """
    mask_t = retained_mask(token_mask_t, sample_mask_t, keep_old_t, sequence_keep_t)
    return _all(mask_t & keep_t, importance_keep_t)


def why_tokens_left(
    real_t: torch.Tensor,
    token_mask_t: torch.Tensor,
    sample_mask_t: torch.Tensor,
    keep_old_t: torch.Tensor | None,
    keep_t: torch.Tensor,
    importance_keep_t: torch.Tensor | None = None,
    sequence_keep_t: torch.Tensor | None = None,
) -> dict[str, Metric]:
    """Token counts by the first reason that applies, in this order; they add up to the real tokens.

    `real_t`: tokens of a sequence, not padding, whose amount depends on how a batch is cut. `tokens/prompt`,
    `tokens/sample_masked`, `tokens/dropped_keep_old`, `tokens/dropped_keep`, `tokens/dropped_importance`,
    `tokens/dropped_sequence`, `tokens/trained`; beside them `tokens/valid` and `tokens/retained`, the two
    denominators.
    """
    sampled_t = token_mask_t & sample_mask_t
    by_old_t = _all(sampled_t, keep_old_t)
    by_current_t = by_old_t & keep_t
    by_filter_t = _all(by_current_t, importance_keep_t)
    trained_t = _all(by_filter_t, sequence_keep_t)
    return {
        "tokens/prompt": Sum((real_t & ~token_mask_t).sum()),
        "tokens/sample_masked": Sum((token_mask_t & ~sample_mask_t).sum()),
        "tokens/dropped_keep_old": Sum((sampled_t & ~by_old_t).sum()),
        "tokens/dropped_keep": Sum((by_old_t & ~by_current_t).sum()),
        "tokens/dropped_importance": Sum((by_current_t & ~by_filter_t).sum()),
        "tokens/dropped_sequence": Sum((by_filter_t & ~trained_t).sum()),
        "tokens/trained": Sum(trained_t.sum()),
        "tokens/valid": Sum(kl_mask(token_mask_t, sample_mask_t, sequence_keep_t).sum()),
        "tokens/retained": Sum(retained_mask(token_mask_t, sample_mask_t, keep_old_t, sequence_keep_t).sum()),
    }


WHY_LEFT = (
    "tokens/trained",
    "tokens/dropped_keep",
    "tokens/dropped_keep_old",
    "tokens/dropped_importance",
    "tokens/dropped_sequence",
    "tokens/sample_masked",
    "tokens/prompt",
)
"""The disjoint counts of `why_tokens_left`, as a stacked plot draws them."""


def sequence_check(
    sampler_logprob_sl: torch.Tensor,
    old_logprob_sl: torch.Tensor,
    mask_sl: torch.Tensor,
    max_error: float,
    truncates: bool,
) -> torch.Tensor:
    """`[S]` bool: does the trainer agree with the sampler about the sequence?

    The mean of exp|sampler - old| over the tokens of `mask_sl [S, L]` is at most `max_error` (1 is perfect
    agreement). Where the distribution is truncated (`truncates`), tokens outside either support say nothing
    about the engines and are skipped; where it is not, -inf rejects the sequence. NaN always rejects. A
    sequence without a token to judge passes.
    """
    difference_sl = torch.where(mask_sl, sampler_logprob_sl, 0.0) - torch.where(mask_sl, old_logprob_sl, 0.0)
    outside_sl = mask_sl & (torch.isneginf(sampler_logprob_sl) | torch.isneginf(old_logprob_sl))
    nan_sl = mask_sl & (torch.isnan(sampler_logprob_sl) | torch.isnan(old_logprob_sl))
    counts_sl = mask_sl & ~outside_sl & ~nan_sl
    error_sl = torch.where(counts_sl, difference_sl, 0.0).double().abs().clamp(max=MAX_LOG_RATIO).exp()
    num_s = counts_sl.sum(dim=1)
    mean_s = torch.where(counts_sl, error_sl, 0.0).sum(dim=1) / num_s.clamp(min=1)
    rejected_s = nan_sl.any(dim=1) | ((num_s > 0) & (mean_s > max_error))
    if not truncates:
        rejected_s = rejected_s | outside_sl.any(dim=1)
    return ~rejected_s


def _all(mask_t: torch.Tensor, flag_t: torch.Tensor | None) -> torch.Tensor:
    return mask_t if flag_t is None else mask_t & flag_t
