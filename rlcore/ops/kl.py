"""KL divergence to the frozen reference policy, per token, from unfiltered logprobs.

Source: Schulman, "Approximating KL divergence" (k3); the score-function gradient makes its expectation the
    gradient of the KL divergence itself, which plain differentiation of k3 does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Clamp of the log ratio before exp, in nats: exp(20) is far from overflowing float32.
MAX_LOG_RATIO = 20.0
# Largest value one token may add to the KL term, in nats.
MAX_KL = 10.0


@dataclass(frozen=True, kw_only=True)
class KLTerms:
    """Per-token KL and which tokens hit a clamp. `[t]`."""

    kl_t: torch.Tensor
    """float32, 0 outside the mask."""
    clamped_t: torch.Tensor
    """bool: the value was clamped, so the token has no gradient."""


def k3(logprob_t: torch.Tensor, reference_logprob_t: torch.Tensor, mask_t: torch.Tensor) -> KLTerms:
    """k3 estimate of KL(policy || reference) with the score-function gradient.

    Maths: d = reference - logprob; k3 = exp(d) - 1 - d; gradient of k3 + stop(k3) * logprob, which is -d per
        token.
    Shapes: all `[t]`. Dtypes: computed in float32, or float64 for float64 input. Layout: any; elementwise.
    Collectives: none. Backward: to `logprob_t`; 0 where clamped or masked. Mutates: nothing.
    Masked slots may hold -inf or NaN: they are selected away before any exp.
    """
    dtype = torch.float64 if logprob_t.dtype == torch.float64 else torch.float32
    logprob_t = torch.where(mask_t, logprob_t.to(dtype), 0.0)
    difference_t = torch.where(mask_t, reference_logprob_t.to(dtype), 0.0) - logprob_t
    bounded_t = difference_t.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1 keeps the quadratic term of small differences, which exp(d) - 1 - d would round away.
    raw_t = torch.expm1(bounded_t) - bounded_t
    value_t = raw_t.clamp(max=MAX_KL)
    clamped_t = mask_t & ((difference_t.abs() > MAX_LOG_RATIO) | (raw_t > MAX_KL))
    score_t = value_t.detach() * (logprob_t - logprob_t.detach())
    return KLTerms(kl_t=value_t + torch.where(clamped_t, 0.0, score_t), clamped_t=clamped_t)
