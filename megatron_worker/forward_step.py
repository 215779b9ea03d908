"""What Megatron's schedule calls: scoring and loss of one microbatch, and the one place that cancels loss
scaling.

Nothing here raises on account of data: only the last stage would, and the others would wait for it. Broken
    rows are reported in the returned values, and the worker refuses the step on all ranks together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_worker.fused_head import Scoring, loss_of_hidden, score_hidden, without_head
from megatron_worker.hf_bridge import unwrap
from rlcore.batch import Microbatch
from rlcore.config import LossConfig
from rlcore.groups import ParallelGroups
from rlcore.masks import actor_mask, kl_mask, why_tokens_left
from rlcore.metrics import Max, Mean, Metric, Min, Sum, add_metrics, max_over, mean_over, min_over
from rlcore.ops.kl import KLTerms, k3
from rlcore.ops.logprob import TokenLogprobs, VocabShard, vocab_parallel_logprob
from rlcore.ops.loss import PolicyTerms, clipped_policy_terms, token_sum_over
from rlcore.sampling import SamplingSpec


@dataclass(frozen=True, kw_only=True)
class Denominators:
    """Token counts over the whole step and all ranks, known before the first forward. 0-dim float32."""

    actor: torch.Tensor
    """Divides the policy-gradient term."""
    retained: torch.Tensor
    """token & sample & keep_old: what the policy-gradient term can see at most."""
    kl: torch.Tensor
    """token & sample: divides the KL term."""


@dataclass(frozen=True, kw_only=True)
class LossReport:
    """What one microbatch tells the worker."""

    metrics: dict[str, Metric]
    broken_sample: torch.Tensor
    """0-dim int64: row of the batch whose logits or loss were NaN or inf; -1 for none."""


LossOfTokens = Callable[[Microbatch, TokenLogprobs], tuple[torch.Tensor, LossReport]]


def join_reports(reports: Sequence[LossReport]) -> LossReport:
    """The report of all parts of a microbatch. The first broken sample stands for all."""
    broken_p = torch.stack([report.broken_sample for report in reports])
    first = (broken_p >= 0).to(torch.int8).argmax()
    return LossReport(
        metrics=add_metrics([report.metrics for report in reports]), broken_sample=broken_p[first]
    )


def cancel_megatron_scaling(loss: torch.Tensor, num_microbatches: int, dp_size: int) -> torch.Tensor:
    """The loss to return so that the optimizer sees the gradient of the plain sum over microbatches and DP x
    CP ranks.

    For the two-value contract: the schedule multiplies by CP and divides by the number of microbatches, and
    data parallelism divides gradients by DP x CP. What is left to cancel is num_microbatches x DP.
    """
    return loss * (num_microbatches * dp_size)


@dataclass(frozen=True, kw_only=True)
class OutputHead:
    """How the last stage gets from hidden states to `TokenLogprobs`."""

    groups: ParallelGroups
    vocab_size: int
    """Real vocabulary size."""
    fused: bool
    """Score hidden states and the head's weight; the stage then runs without its head."""
    fused_tokens: int = 1024
    """Tokens whose logits exist at once when fused."""

    def run(self, model: Any, microbatch: Microbatch) -> torch.Tensor:
        """Logits `[b, L, v]` on the last stage, hidden states on the others and everywhere when fused.

        Causal attention; right padding needs no mask.
        """
        with without_head(unwrap(model)) if self.fused else nullcontext():
            return model(microbatch.input_ids_bl, microbatch.position_ids_bl, None)

    def score(
        self, model: Any, output: torch.Tensor, microbatch: Microbatch, spec: SamplingSpec, entropy: bool
    ) -> TokenLogprobs:
        """The scored tokens of what `run` returned on the last stage."""
        if self.fused:
            return score_hidden(unwrap(model), output, microbatch, self._scoring(spec, entropy))
        return score_logits(output, microbatch.target_t, spec, self.groups, self.vocab_size, entropy)

    def loss(
        self,
        model: Any,
        output: torch.Tensor,
        microbatch: Microbatch,
        spec: SamplingSpec,
        entropy: bool,
        loss_of: LossOfTokens,
    ) -> tuple[torch.Tensor, LossReport]:
        """The loss, a sum over tokens, of what `run` returned on the last stage, and its report."""
        if not self.fused:
            return loss_of(microbatch, self.score(model, output, microbatch, spec, entropy))
        scoring = self._scoring(spec, entropy)
        value, reports = loss_of_hidden(unwrap(model), output, microbatch, scoring, loss_of)
        return value, join_reports(reports)

    def _scoring(self, spec: SamplingSpec, entropy: bool) -> Scoring:
        return Scoring(
            spec=spec,
            groups=self.groups,
            vocab_size=self.vocab_size,
            entropy=entropy,
            chunk_tokens=self.fused_tokens,
        )


def score_logits(
    logits: torch.Tensor,
    target_t: torch.Tensor,
    spec: SamplingSpec,
    groups: ParallelGroups,
    vocab_size: int,
    entropy: bool,
) -> TokenLogprobs:
    """The op on Megatron's `[b, L, v]` logits, flattened in the microbatch's order. Never raises on data."""
    logits_tv = logits.reshape(-1, logits.shape[-1])
    vocab = VocabShard.even(logits_tv.shape[1] * groups.tp_size, vocab_size, groups.tp)
    return vocab_parallel_logprob(
        logits_tv, target_t, spec, groups.tp, vocab, entropy=entropy, validate=False
    )


def make_scoring_step(spec: SamplingSpec, head: OutputHead) -> Callable:
    """A forward step for `collect_non_loss_data=True`: the schedule collects `TokenLogprobs` on the last
    stage.
    """

    def scoring_step(data: Iterator[Microbatch], model: Any) -> tuple[torch.Tensor, Callable]:
        microbatch = next(data)

        def collect(output: torch.Tensor, non_loss_data: bool = True) -> TokenLogprobs:
            return head.score(model, output, microbatch, spec, entropy=False)

        return head.run(model, microbatch), collect

    return scoring_step


def make_train_step(
    loss: LossConfig,
    spec: SamplingSpec,
    head: OutputHead,
    denominators: Denominators,
    num_microbatches: int,
) -> Callable:
    """A forward step whose loss function returns the scaled loss and a `LossReport`."""

    def train_step(data: Iterator[Microbatch], model: Any) -> tuple[torch.Tensor, Callable]:
        microbatch = next(data)
        return head.run(model, microbatch), partial(loss_of, model, microbatch)

    def loss_of(model: Any, microbatch: Microbatch, output: torch.Tensor) -> tuple[torch.Tensor, LossReport]:
        value, report = head.loss(
            model,
            output,
            microbatch,
            spec,
            loss.entropy_metric,
            lambda part, scores: microbatch_loss(part, scores, loss, denominators),
        )
        return cancel_megatron_scaling(value, num_microbatches, head.groups.dp_size), report

    return train_step


def microbatch_loss(
    microbatch: Microbatch, scores: TokenLogprobs, loss: LossConfig, denominators: Denominators
) -> tuple[torch.Tensor, LossReport]:
    """This microbatch's part of the step's loss, and its report.

    The parts of all microbatches and ranks add up to the loss: the denominators are those of the whole step.
    """
    mask_t = actor_mask(
        microbatch.token_mask_t, microbatch.sample_mask_t, microbatch.keep_old_t, scores.keep_t
    )
    valid_t = kl_mask(microbatch.token_mask_t, microbatch.sample_mask_t)
    # A rollout scored by this very policy: without an old-logprob pass the ratio is 1 by definition.
    old_t = scores.logprob_t.detach() if microbatch.old_logprob_t is None else microbatch.old_logprob_t
    policy = clipped_policy_terms(
        scores.logprob_t, old_t, microbatch.advantage_t, mask_t, loss.ratio_clip_min, loss.ratio_clip_max
    )
    value = token_sum_over(policy.loss_t, denominators.actor)
    metrics = policy_metrics(microbatch, scores, policy, mask_t, value)
    if loss.kl_coef > 0:
        assert microbatch.reference_logprob_t is not None, (
            "the loop scores the reference whenever kl_coef > 0"
        )
        kl = k3(scores.unfiltered_logprob_t, microbatch.reference_logprob_t, valid_t)
        kl_value = token_sum_over(kl.kl_t, denominators.kl)
        metrics |= kl_metrics(kl, kl_value, valid_t)
        value = value + loss.kl_coef * kl_value
    metrics["loss/total"] = Sum(value)
    if loss.entropy_metric:
        assert scores.entropy_t is not None and scores.unfiltered_entropy_t is not None
        metrics["entropy/filtered"] = mean_over(scores.entropy_t, mask_t)
        metrics["entropy/unfiltered"] = mean_over(scores.unfiltered_entropy_t, mask_t)
    broken_t = valid_t & torch.isnan(scores.unfiltered_logprob_t)
    broken_t = broken_t | (valid_t & ~torch.isfinite(policy.loss_t))
    return value, LossReport(metrics=metrics, broken_sample=_first_sample(microbatch, broken_t, value))


def policy_metrics(
    microbatch: Microbatch,
    scores: TokenLogprobs,
    policy: PolicyTerms,
    mask_t: torch.Tensor,
    value: torch.Tensor,
) -> dict[str, Metric]:
    """Diagnostics of the policy-gradient term, each with its own mask."""
    valid_t = kl_mask(microbatch.token_mask_t, microbatch.sample_mask_t)
    return {
        "loss/policy": Sum(value),
        "ratio/mean": mean_over(policy.ratio_t, mask_t),
        "ratio/min": min_over(policy.ratio_t, mask_t),
        "ratio/max": max_over(policy.ratio_t, mask_t),
        "ratio/clipped_low": mean_over(policy.clipped_low_t.double(), mask_t),
        "ratio/clipped_high": mean_over(policy.clipped_high_t.double(), mask_t),
        "ratio/kl_k3": mean_over(policy.ratio_t - 1.0 - policy.log_ratio_t, mask_t),
        "filter/log_mass": mean_over(scores.log_mass_t, valid_t),
        "filter/num_kept": mean_over(scores.num_kept_t, valid_t),
        "filter/out_of_support": mean_over((~scores.keep_t).double(), valid_t),
        **why_tokens_left(
            microbatch.real_t,
            microbatch.token_mask_t,
            microbatch.sample_mask_t,
            microbatch.keep_old_t,
            scores.keep_t,
        ),
    }


def kl_metrics(kl: KLTerms, value: torch.Tensor, valid_t: torch.Tensor) -> dict[str, Metric]:
    """The reference KL as it enters the loss, and how many tokens were clamped."""
    return {
        "loss/kl": Sum(value),
        "kl/reference": mean_over(kl.kl_t, valid_t),
        "kl/clamped": Sum((kl.clamped_t & valid_t).sum()),
    }


_NEUTRAL: dict[type, Callable[[], Metric]] = {
    Mean: lambda: Mean(0.0, 0.0),
    Sum: lambda: Sum(0.0),
    Min: lambda: Min(math.inf),
    Max: lambda: Max(-math.inf),
}


def neutral_metrics(loss: LossConfig, device: torch.device) -> dict[str, Metric]:
    """The metrics of no tokens at all: what ranks without logits hand to the reduction, same names, same
    types.
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
        reference_logprob_t=empty_t,
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
    one = torch.ones((), device=device)
    _, report = microbatch_loss(microbatch, scores, loss, Denominators(actor=one, retained=one, kl=one))
    return {name: _NEUTRAL[type(metric)]() for name, metric in report.metrics.items()}


def _first_sample(microbatch: Microbatch, broken_t: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """0-dim int64: batch row of the first broken token, or of the first row when only the sum broke; -1 for
    none.
    """
    big = torch.iinfo(torch.int64).max
    first = (
        torch.where(broken_t, microbatch.sample_index_t, big).amin()
        if broken_t.numel()
        else torch.tensor(big)
    )
    whole = torch.where(torch.isfinite(value), -1, 0)
    return torch.where(first == big, whole, first)
