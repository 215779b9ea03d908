"""KL divergence to the frozen reference policy, per token, from unfiltered logprobs; and KL as a reward
penalty.

d = logprob - reference. Estimators of KL(policy || reference), each with the d / d logprob of its
two modes:

| estimator | value | `plain` gradient | `score` gradient (plain + value) |
|---|---|---|---|
| k1 | d | 1: nothing of the reference | d + 1 |
| k2, mse | d^2 / 2 | d | d + d^2 / 2 |
| k3 | exp(-d) - 1 + d | 1 - exp(-d) | d |
| abs | abs(d) | sign(d) | sign(d) + abs(d) |

`score` adds the score-function term that differentiating a mean over drawn tokens needs: over tokens of the
policy, the expected gradient is that of the expected value. For k1 and k3 that is the KL divergence's own;
for k2, mse and abs that of E[d^2 / 2] and E[abs(d)], which only resemble it. `plain` differentiates the value
alone; for k2 its expectation is again the KL divergence's gradient, for k1 it is 0.

Source: Schulman, "Approximating KL divergence" (2020); the names `abs` and `mse` as verl has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from rlcore.ops.passes import compute_dtype
from rlcore.ops.pointwise import Core, per_token, weighted_total

# Clamp of d before exp, in nats: exp(20) is far from overflowing float32.
MAX_LOG_RATIO = 20.0
# Largest value one token may add to the KL term, in nats.
MAX_KL = 10.0
# exp of more overflows float32, with room for sums.
LARGEST_INPUT_CLAMP = 80.0
# The proportional controller acts on at most this relative error.
MAX_CONTROL_ERROR = 0.2

Gradient = Literal["score", "plain"]


@dataclass(frozen=True, kw_only=True)
class KLTerms:
    """Per-token KL and which tokens hit a clamp. `[t]`."""

    kl_t: torch.Tensor
    """float32, 0 outside the mask. Detached where `total` is given."""
    clamped_t: torch.Tensor
    """bool: the value was clamped, so the token has no gradient."""
    total: torch.Tensor | None = None
    """0-dim: sum of kl_t x multiplier_t, where a multiplier was given; carries the gradient."""


@dataclass(frozen=True, kw_only=True)
class KLRule:
    """Clamps and gradient of an estimator."""

    gradient: Gradient = "score"
    """See the table above."""
    input_clamp: float = MAX_LOG_RATIO
    """d is clamped to +- this, in nats, before anything else."""
    output_clamp: float | None = MAX_KL
    """The value is clamped to +- this, in nats. None: not at all."""

    def __post_init__(self) -> None:
        if self.gradient not in ("score", "plain"):
            raise ValueError(f"KL gradient {self.gradient!r}: expected 'score' or 'plain'.")
        if not 0.0 < self.input_clamp <= LARGEST_INPUT_CLAMP:
            raise ValueError(
                f"KL input clamp {self.input_clamp}: expected more than 0 and at most "
                f"{LARGEST_INPUT_CLAMP:g} nats; exp of more overflows."
            )
        if self.output_clamp is not None and not self.output_clamp > 0.0:
            raise ValueError(f"KL output clamp {self.output_clamp}: expected more than 0, or None.")


DEFAULT_RULE = KLRule()


def k3(
    logprob_t: torch.Tensor,
    reference_logprob_t: torch.Tensor,
    mask_t: torch.Tensor,
    rule: KLRule = DEFAULT_RULE,
    multiplier_t: torch.Tensor | None = None,
) -> KLTerms:
    """exp(-d) - 1 + d: never negative, unbiased. The contract of all estimators:

    Shapes: all `[t]`; `mask_t` bool, the KL mask; `multiplier_t [t]` or 0-dim (`ops/aggregation.py`): the
        weighted sum becomes part of the pass, see `KLTerms.total`.
    Dtypes: computed in float32, or float64 for float64 logprobs. Layout: any; elementwise. Collectives: none.
    Backward: to `logprob_t`, as the table above says; 0 where clamped or masked. Mutates: nothing.
    Masked slots may hold -inf or NaN: they are selected away before any exp.
    """
    return _terms(_k3, logprob_t, reference_logprob_t, mask_t, rule, multiplier_t)


def k1(
    logprob_t: torch.Tensor,
    reference_logprob_t: torch.Tensor,
    mask_t: torch.Tensor,
    rule: KLRule = DEFAULT_RULE,
    multiplier_t: torch.Tensor | None = None,
) -> KLTerms:
    """d: unbiased, of either sign. Contract as `k3`."""
    return _terms(_k1, logprob_t, reference_logprob_t, mask_t, rule, multiplier_t)


def k2(
    logprob_t: torch.Tensor,
    reference_logprob_t: torch.Tensor,
    mask_t: torch.Tensor,
    rule: KLRule = DEFAULT_RULE,
    multiplier_t: torch.Tensor | None = None,
) -> KLTerms:
    """d^2 / 2: biased, of low variance. Contract as `k3`."""
    return _terms(_k2, logprob_t, reference_logprob_t, mask_t, rule, multiplier_t)


def absolute(
    logprob_t: torch.Tensor,
    reference_logprob_t: torch.Tensor,
    mask_t: torch.Tensor,
    rule: KLRule = DEFAULT_RULE,
    multiplier_t: torch.Tensor | None = None,
) -> KLTerms:
    """abs(d). Contract as `k3`."""
    return _terms(_absolute, logprob_t, reference_logprob_t, mask_t, rule, multiplier_t)


KL_ESTIMATORS: dict[str, Callable[..., KLTerms]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
    "mse": k2,
}
"""By the name a config has; `mse` is another name of k2."""


def k3_of_log_ratio(log_ratio_t: torch.Tensor) -> torch.Tensor:
    """exp(r) - 1 - r for r = -d, without mask or clamps: k3 where only its value is wanted, for diagnostics.

    expm1 keeps the quadratic term of small differences, which exp(r) - 1 - r would round away.
    """
    return torch.expm1(log_ratio_t) - log_ratio_t


def kl_reward_penalty(
    logprob_t: torch.Tensor,
    reference_logprob_t: torch.Tensor,
    mask_t: torch.Tensor,
    coefficient: float,
    estimator: str = "k1",
    rule: KLRule = DEFAULT_RULE,
) -> torch.Tensor:
    """`[t]`, detached: coefficient x KL, to subtract from each token's reward; 0 outside the mask.

    A reward has no gradient, so `rule.gradient` does not matter. k1 is the usual choice: summed over a reply,
    its expectation is the KL divergence of whole replies. Contract else as `k3`.
    Source: Ziegler et al. 2019; Ouyang et al. 2022.
    """
    terms = KL_ESTIMATORS[estimator](logprob_t.detach(), reference_logprob_t, mask_t, rule)
    return coefficient * terms.kl_t


def adapted_coefficient(
    coefficient: float, observed_kl: float, target_kl: float, num_steps: int, horizon: int
) -> float:
    """The next KL coefficient: grows where the observed KL is above its target, shrinks where below.

    coefficient x (1 + clip(observed / target - 1, +-0.2) x num_steps / horizon); `num_steps` (or samples)
    since the last change, in the unit of `horizon`. A KL that is not a number leaves the coefficient as it
    is. `ValueError` unless target and horizon are positive.
    Source: Ziegler et al. 2019, section 2.2.
    """
    if not (target_kl > 0 and horizon > 0):
        raise ValueError(
            f"adaptive KL: target {target_kl} and horizon {horizon} must be positive; keep the "
            "coefficient constant to have no controller."
        )
    if observed_kl != observed_kl:
        return coefficient
    error = min(max(observed_kl / target_kl - 1.0, -MAX_CONTROL_ERROR), MAX_CONTROL_ERROR)
    return coefficient * max(0.0, 1.0 + error * num_steps / horizon)


def _terms(
    core: Core,
    logprob_t: torch.Tensor,
    reference_logprob_t: torch.Tensor,
    mask_t: torch.Tensor,
    rule: KLRule,
    multiplier_t: torch.Tensor | None,
) -> KLTerms:
    ceiling = math.inf if rule.output_clamp is None else rule.output_clamp
    numbers = (rule.input_clamp, ceiling, 1.0 if rule.gradient == "score" else 0.0)
    # Tensors, because compiled code is made again for every new number.
    dtype = compute_dtype(logprob_t)
    given = (reference_logprob_t, mask_t, *(logprob_t.new_full((), n, dtype=dtype) for n in numbers))
    if multiplier_t is None:
        kl_t, clamped_t = per_token(core, logprob_t, *given)
        return KLTerms(kl_t=kl_t, clamped_t=clamped_t)
    total, kl_t, clamped_t = weighted_total(core, logprob_t, multiplier_t, *given)
    return KLTerms(kl_t=kl_t, clamped_t=clamped_t, total=total)


# --- the arithmetic of each estimator: `(kl_t, slope_t, clamped_t)`


def _difference(
    logprob_t: torch.Tensor, reference_logprob_t: torch.Tensor, mask_t: torch.Tensor
) -> torch.Tensor:
    """d, 0 outside the mask."""
    dtype = compute_dtype(logprob_t)
    return torch.where(mask_t, logprob_t.to(dtype), 0.0) - torch.where(
        mask_t, reference_logprob_t.to(dtype), 0.0
    )


def _clamped(
    difference_t: torch.Tensor,
    raw_t: torch.Tensor,
    plain_t: torch.Tensor,
    input_clamp: torch.Tensor,
    ceiling: torch.Tensor,
    score: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Output clamp, and the slope: plain + score x value, 0 where either clamp acts."""
    value_t = raw_t.clamp(-ceiling, ceiling)
    clamped_t = (difference_t.abs() > input_clamp) | (raw_t.abs() > ceiling)
    return value_t, torch.where(clamped_t, 0.0, plain_t + score * value_t), clamped_t


def _k1(
    logprob_t: torch.Tensor, reference_logprob_t: torch.Tensor, mask_t: torch.Tensor, *rule: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    d_t = _difference(logprob_t, reference_logprob_t, mask_t)
    plain_t = torch.where(mask_t, torch.ones_like(d_t), 0.0)
    return _clamped(d_t, d_t.clamp(-rule[0], rule[0]), plain_t, *rule)


def _k2(
    logprob_t: torch.Tensor, reference_logprob_t: torch.Tensor, mask_t: torch.Tensor, *rule: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    d_t = _difference(logprob_t, reference_logprob_t, mask_t)
    bounded_t = d_t.clamp(-rule[0], rule[0])
    return _clamped(d_t, 0.5 * bounded_t.square(), bounded_t, *rule)


def _k3(
    logprob_t: torch.Tensor, reference_logprob_t: torch.Tensor, mask_t: torch.Tensor, *rule: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    d_t = _difference(logprob_t, reference_logprob_t, mask_t)
    bounded_t = d_t.clamp(-rule[0], rule[0])
    # expm1 keeps the quadratic term of small differences, which exp(-d) - 1 + d would round away.
    grown_t = torch.expm1(-bounded_t)
    return _clamped(d_t, grown_t + bounded_t, -grown_t, *rule)


def _absolute(
    logprob_t: torch.Tensor, reference_logprob_t: torch.Tensor, mask_t: torch.Tensor, *rule: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    d_t = _difference(logprob_t, reference_logprob_t, mask_t)
    return _clamped(d_t, d_t.abs().clamp(max=rule[0]), d_t.sign(), *rule)
