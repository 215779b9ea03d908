"""THE MASKS: which tokens a term of the loss sees, and the disjoint reasons why the others left.

A token that cannot be scored leaves the mask; nothing is ever replaced by a number. Masks keep their dtype
and are never changed in place, so the next epoch starts from the original.
"""

from __future__ import annotations

import torch

from rlcore.metrics import Metric, Sum


def keep_only(mask_t: torch.Tensor, keep_t: torch.Tensor) -> torch.Tensor:
    """`mask_t` where `keep_t` (bool, same shape), 0/False elsewhere: a new tensor in `mask_t`'s own dtype."""
    return torch.where(keep_t, mask_t, torch.zeros_like(mask_t))


def kl_mask(token_mask_t: torch.Tensor, sample_mask_t: torch.Tensor) -> torch.Tensor:
    """What the reference KL and the mismatch diagnostics see: token & sample. bool, `sample_mask_t` per
    token.
    """
    return token_mask_t & sample_mask_t


def retained_mask(
    token_mask_t: torch.Tensor, sample_mask_t: torch.Tensor, keep_old_t: torch.Tensor | None
) -> torch.Tensor:
    """token & sample & keep_old, known before the first forward of a step. `None` keeps every token."""
    mask_t = kl_mask(token_mask_t, sample_mask_t)
    return mask_t if keep_old_t is None else mask_t & keep_old_t


def actor_mask(
    token_mask_t: torch.Tensor,
    sample_mask_t: torch.Tensor,
    keep_old_t: torch.Tensor | None,
    keep_t: torch.Tensor,
) -> torch.Tensor:
    """What the policy-gradient term sees: token & sample & keep_old & keep. All bool, one shape."""
    return retained_mask(token_mask_t, sample_mask_t, keep_old_t) & keep_t


def why_tokens_left(
    real_t: torch.Tensor,
    token_mask_t: torch.Tensor,
    sample_mask_t: torch.Tensor,
    keep_old_t: torch.Tensor | None,
    keep_t: torch.Tensor,
) -> dict[str, Metric]:
    """Token counts by the first reason that applies, in this order; they add up to the real tokens.

    `real_t`: tokens of a sequence, not padding, whose amount depends on how a batch is cut. `tokens/prompt`,
    `tokens/sample_masked`, `tokens/dropped_keep_old`, `tokens/dropped_keep`, `tokens/trained`; with
    `tokens/valid` (token & sample) and `tokens/retained` (& keep_old) beside them.
    """
    valid_t = kl_mask(token_mask_t, sample_mask_t)
    retained_t = retained_mask(token_mask_t, sample_mask_t, keep_old_t)
    return {
        "tokens/prompt": Sum((real_t & ~token_mask_t).sum()),
        "tokens/sample_masked": Sum((token_mask_t & ~sample_mask_t).sum()),
        "tokens/dropped_keep_old": Sum((valid_t & ~retained_t).sum()),
        "tokens/dropped_keep": Sum((retained_t & ~keep_t).sum()),
        "tokens/trained": Sum((retained_t & keep_t).sum()),
        "tokens/valid": Sum(valid_t.sum()),
        "tokens/retained": Sum(retained_t.sum()),
    }
