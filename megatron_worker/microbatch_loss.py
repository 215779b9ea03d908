"""The loss of one microbatch from its scores, and its report: metrics, broken samples, exact token count.

Nothing here raises on account of data: only the last stage would, and the others would wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rlcore.batch import Microbatch
from rlcore.collectives import Group
from rlcore.config import LossConfig
from rlcore.masks import actor_mask, kl_mask, why_tokens_left
from rlcore.metrics import (
    Mean,
    Metric,
    Sum,
    add_metrics,
    max_over,
    mean_over,
    min_over,
    neutral_like,
    quantiles_over,
)
from rlcore.ops.audit import AuditReport
from rlcore.ops.kl import KL_ESTIMATORS, KLRule, KLTerms, k3_of_log_ratio
from rlcore.ops.logprob import TokenLogprobs
from rlcore.ops.loss import (
    ClipBounds,
    PolicyTerms,
    PolicyTokens,
    cispo_terms,
    clip_terms,
    entropy_terms,
    on_policy_terms,
    positive_nll_terms,
    reinforce_terms,
)
from rlcore.ops.segments import Segments
from rlcore.ops.sequence_loss import gspo_terms


@dataclass(frozen=True, kw_only=True)
class LossReport:
    """What one microbatch tells the worker."""

    metrics: dict[str, Metric]
    broken_s: torch.Tensor
    """`[S]` bool: rows of the step's batch with NaN or inf in logits or loss."""
    is_broken: torch.Tensor
    """0-dim bool: is any of them, or the sum itself?"""
    num_trained: torch.Tensor
    """0-dim int64: tokens in the actor mask."""


def join_reports(reports: Sequence[LossReport]) -> LossReport:
    """The report of all parts of a microbatch."""
    return LossReport(
        metrics=add_metrics([report.metrics for report in reports]),
        broken_s=torch.stack([report.broken_s for report in reports]).any(dim=0),
        is_broken=torch.stack([report.is_broken for report in reports]).any(),
        num_trained=torch.stack([report.num_trained for report in reports]).sum(),
    )


def microbatch_loss(
    microbatch: Microbatch, scores: TokenLogprobs, loss: LossConfig, cp_group: Group = None
) -> tuple[torch.Tensor, LossReport]:
    """This microbatch's part of the step's loss, and its report.

    The parts of all microbatches and ranks add up to the loss: multipliers hold the denominators of the whole
    step. With `retained_exact` they add up to the sum over tokens, and `num_trained` to its denominator.
    Collectives: one over `cp_group` for `gspo`, else none.
    """
    flags = (microbatch.token_mask_t, microbatch.sample_mask_t)
    mask_t = actor_mask(
        *flags,
        microbatch.keep_old_t,
        scores.keep_t,
        microbatch.importance_keep_t,
        microbatch.sequence_keep_t,
    )
    valid_t = kl_mask(*flags, microbatch.sequence_keep_t)
    tokens = PolicyTokens(
        logprob_t=scores.logprob_t,
        advantage_t=microbatch.advantage_t,
        mask_t=mask_t,
        old_logprob_t=microbatch.old_logprob_t,
        weight_t=microbatch.importance_t,
        multiplier_t=microbatch.policy_multiplier_t,
    )
    policy = policy_terms(tokens, microbatch, loss, cp_group)
    assert policy.total is not None
    value = policy.total
    metrics = policy_metrics(microbatch, scores, policy, mask_t, valid_t)
    metrics["loss/policy"] = _term(policy.total, mask_t, loss)
    broken_t = valid_t & (torch.isnan(scores.unfiltered_logprob_t) | ~torch.isfinite(policy.loss_t))
    if loss.kl_coef > 0:
        kl = kl_terms(microbatch, scores, loss, valid_t)
        assert kl.total is not None
        metrics |= kl_metrics(kl, valid_t, loss)
        broken_t = broken_t | (valid_t & ~torch.isfinite(kl.kl_t))
        if loss.kl_in == "loss":
            value = value + loss.kl_coef * kl.total
    for term, coefficient, name in other_terms(tokens, scores, microbatch, loss):
        assert term.total is not None
        value = value + coefficient * term.total
        metrics[f"loss/{name}"] = _term(term.total, mask_t, loss)
    metrics["loss/total"] = _term(value, mask_t, loss)
    if wants_entropy(loss):
        assert scores.entropy_t is not None and scores.unfiltered_entropy_t is not None
        metrics["entropy/filtered"] = mean_over(scores.entropy_t, mask_t)
        metrics["entropy/unfiltered"] = mean_over(scores.unfiltered_entropy_t, mask_t)
    return value, _report(microbatch, metrics, broken_t, mask_t, value)


def policy_terms(
    tokens: PolicyTokens, microbatch: Microbatch, loss: LossConfig, cp_group: Group
) -> PolicyTerms:
    """The policy-gradient term that the config names."""
    if loss.policy == "reinforce":
        return reinforce_terms(tokens)
    if loss.policy == "on_policy":
        return on_policy_terms(tokens)
    bounds = ClipBounds(low=loss.ratio_clip_min, high=loss.ratio_clip_max, dual=loss.ratio_clip_c)
    if loss.policy == "cispo":
        return cispo_terms(tokens, bounds)
    if loss.policy == "clip":
        return clip_terms(tokens, bounds)
    assert microbatch.segment_t is not None, "split_batch numbers the sequences"
    segments = Segments(segment_t=microbatch.segment_t, num_segments=microbatch.num_segments)
    return gspo_terms(tokens, bounds, segments, cp_group)


def is_sum_over_tokens(loss: LossConfig) -> bool:
    """Can the loss be computed from some of a microbatch's tokens at a time?"""
    return loss.policy != "gspo"


def wants_entropy(loss: LossConfig) -> bool:
    """Are the exact entropies computed?"""
    return loss.entropy_metric or loss.entropy_coef > 0


def kl_terms(
    microbatch: Microbatch, scores: TokenLogprobs, loss: LossConfig, valid_t: torch.Tensor
) -> KLTerms:
    """The reference KL on unfiltered logprobs."""
    assert microbatch.reference_logprob_t is not None, "the loop scores the reference whenever kl_coef > 0"
    return KL_ESTIMATORS[loss.kl_type](
        scores.unfiltered_logprob_t,
        microbatch.reference_logprob_t,
        valid_t,
        KLRule(gradient=loss.kl_gradient),
        microbatch.kl_multiplier_t,
    )


def other_terms(
    tokens: PolicyTokens, scores: TokenLogprobs, microbatch: Microbatch, loss: LossConfig
) -> list[tuple[PolicyTerms, float, str]]:
    """Entropy bonus and positive-example term where their coefficient is not 0: term, coefficient, name."""
    terms: list[tuple[PolicyTerms, float, str]] = []
    if loss.entropy_coef > 0:
        assert scores.entropy_t is not None
        bonus = entropy_terms(scores.entropy_t, tokens.mask_t, tokens.multiplier_t)
        terms.append((bonus, loss.entropy_coef, "entropy"))
    if loss.positive_nll_coef > 0:
        unweighted = replace(tokens, multiplier_t=microbatch.nll_multiplier_t, weight_t=None)
        nll = positive_nll_terms(unweighted, tokens.advantage_t > 0)
        terms.append((nll, loss.positive_nll_coef, "positive_nll"))
    return terms


def policy_metrics(
    microbatch: Microbatch,
    scores: TokenLogprobs,
    policy: PolicyTerms,
    mask_t: torch.Tensor,
    valid_t: torch.Tensor,
) -> dict[str, Metric]:
    """Diagnostics of the policy-gradient term, each with its own mask."""
    # Not ratio - 1 - log ratio: in float32 a small log ratio leaves nothing but the ratio's rounding.
    log_ratio_t = policy.log_ratio_t.double()
    return {
        "ratio/mean": mean_over(policy.ratio_t, mask_t),
        "ratio/min": min_over(policy.ratio_t, mask_t),
        "ratio/max": max_over(policy.ratio_t, mask_t),
        "ratio/quantile": quantiles_over(policy.ratio_t, mask_t),
        "ratio/clipped_low": mean_over(policy.clipped_low_t, mask_t),
        "ratio/clipped_high": mean_over(policy.clipped_high_t, mask_t),
        "ratio/kl_k1": mean_over(-policy.log_ratio_t, mask_t),
        "ratio/kl_k3": mean_over(k3_of_log_ratio(log_ratio_t), mask_t),
        "filter/log_mass": mean_over(scores.log_mass_t, valid_t),
        "filter/num_kept": mean_over(scores.num_kept_t, valid_t),
        "filter/out_of_support": mean_over(~scores.keep_t, valid_t),
        **why_tokens_left(
            microbatch.real_t,
            microbatch.token_mask_t,
            microbatch.sample_mask_t,
            microbatch.keep_old_t,
            scores.keep_t,
            microbatch.importance_keep_t,
            microbatch.sequence_keep_t,
        ),
    }


def kl_metrics(kl: KLTerms, valid_t: torch.Tensor, loss: LossConfig) -> dict[str, Metric]:
    """The reference KL, its part of the loss where it is one, and how many tokens were clamped."""
    metrics: dict[str, Metric] = {
        "kl/reference": mean_over(kl.kl_t, valid_t),
        "kl/clamped": Sum((kl.clamped_t & valid_t).sum()),
    }
    if loss.kl_in == "loss":
        assert kl.total is not None
        metrics["loss/kl"] = Sum(kl.total)
    return metrics


def neutral_metrics(loss: LossConfig, device: torch.device, audits: bool = False) -> dict[str, Metric]:
    """The metrics of no tokens at all: what ranks without logits hand to the reduction, same names, same
    types. `audits`: with those of `sampling.support=audit`.
    """
    empty_t = torch.zeros(0, device=device)
    none_t, ids_t = empty_t.bool(), empty_t.long()
    microbatch = Microbatch(
        input_ids_bl=ids_t[None],
        position_ids_bl=ids_t[None],
        target_t=ids_t,
        real_t=none_t,
        token_mask_t=none_t,
        sample_mask_t=none_t,
        sample_index_t=ids_t,
        advantage_t=empty_t,
        sampler_logprob_t=empty_t,
        old_logprob_t=empty_t,
        reference_logprob_t=empty_t,
        segment_t=ids_t,
        policy_multiplier_t=empty_t,
        kl_multiplier_t=empty_t,
        nll_multiplier_t=empty_t,
    )
    scores = TokenLogprobs(
        logprob_t=empty_t,
        unfiltered_logprob_t=empty_t,
        keep_t=none_t,
        log_mass_t=empty_t,
        num_kept_t=ids_t,
        entropy_t=empty_t,
        unfiltered_entropy_t=empty_t,
    )
    _, report = microbatch_loss(microbatch, scores, loss)
    metrics = dict(report.metrics)
    if audits:
        nothing = AuditReport(
            jaccard_t=empty_t,
            num_replayed_t=ids_t,
            num_recomputed_t=ids_t,
            log_mass_difference_t=empty_t,
            out_of_support_t=none_t,
        )
        metrics |= nothing.metrics(none_t)
    return {name: neutral_like(metric) for name, metric in metrics.items()}


def _term(value: torch.Tensor, mask_t: torch.Tensor, loss: LossConfig) -> Metric:
    """A part of the loss as it is reported: divided by the exact count where Megatron will do so."""
    return Mean(value, mask_t.sum()) if loss.actor_denominator == "retained_exact" else Sum(value)


def _report(
    microbatch: Microbatch,
    metrics: dict[str, Metric],
    broken_t: torch.Tensor,
    mask_t: torch.Tensor,
    value: torch.Tensor,
) -> LossReport:
    """The report with the rows of the broken tokens."""
    num_samples = microbatch.num_samples
    row_t = torch.where(microbatch.sample_index_t < 0, num_samples, microbatch.sample_index_t)
    hits_s = torch.zeros(num_samples + 1, dtype=torch.int64, device=mask_t.device)
    broken_s = hits_s.index_add(0, row_t, broken_t.long())[:num_samples] > 0
    return LossReport(
        metrics=metrics,
        broken_s=broken_s,
        is_broken=broken_s.any() | ~torch.isfinite(value.detach()),
        num_trained=mask_t.sum(),
    )
