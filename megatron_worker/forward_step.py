"""What Megatron's schedule calls: scoring and loss of one microbatch, and the one place that cancels loss
scaling.

Nothing here raises on account of data: only the last stage would, and the others would wait for it. Broken
    rows are reported in the returned values, and the worker refuses the step on all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from megatron_worker.attention import packed_seq_params
from megatron_worker.chunks import unwrap
from megatron_worker.fused_head import Scoring, audit_hidden, loss_of_hidden, score_hidden, without_head
from megatron_worker.microbatch_loss import (
    LossReport,
    is_sum_over_tokens,
    join_reports,
    microbatch_loss,
    wants_entropy,
)
from rlcore.batch import Microbatch
from rlcore.config import LossConfig
from rlcore.groups import ParallelGroups
from rlcore.masks import kl_mask
from rlcore.ops.audit import AuditReport, audit_supports
from rlcore.ops.linear_head import CHUNK_TOKENS
from rlcore.ops.logprob import TokenLogprobs, VocabShard, vocab_parallel_logprob
from rlcore.ops.replay import Replayed, ReplayMode
from rlcore.sampling import SamplingSpec


@dataclass(frozen=True, kw_only=True)
class LossContract:
    """What a Megatron job does with what its loss function returns. Two values are the default."""

    num_values: Literal[2, 3] = 2
    """2: `(loss, report)`, which the schedule multiplies by CP and divides by the number of microbatches.
    3: `(loss, num_tokens, report)`, divided by `num_tokens` and the number of microbatches. Without meaning
    where `per_token` is set: three values then.
    """
    per_token: bool = False
    """`TransformerConfig.calculate_per_token_loss`: the schedule scales nothing; gradient finalisation
    divides by the sum of `num_tokens`, and by nothing where that is 0.
    """
    averages: bool | None = None
    """Is the gradient the mean over DP x CP ranks, as in torch's data parallelism, or their sum? None:
    Megatron's, which averages unless `per_token` is set.
    """

    def __post_init__(self) -> None:
        if self.num_values not in (2, 3):
            raise ValueError(f"LossContract.num_values={self.num_values}: expected 2 or 3.")

    def returned(
        self,
        value: torch.Tensor,
        report: LossReport,
        exact: bool,
        num_microbatches: int,
        groups: ParallelGroups,
    ) -> tuple:
        """What the loss function returns so that the optimizer sees the gradient of the sum of `value` over
        microbatches and DP x CP ranks; `exact`: of that sum over the sum of `num_trained`.
        """
        num_trained = report.num_trained
        if self.per_token:
            num_tokens = num_trained if exact else torch.zeros_like(num_trained)
        else:
            num_tokens = torch.ones_like(num_trained)
        return self.scaled(value, num_tokens, report, num_microbatches, groups)

    def scaled(
        self,
        loss: torch.Tensor,
        num_tokens: torch.Tensor,
        report: Any,
        num_microbatches: int,
        groups: ParallelGroups,
    ) -> tuple:
        """What a loss function returns so that gradients are those of the plain sum of `loss` over
        microbatches and DP x CP ranks; where `per_token`, of that sum over the sum of `num_tokens`.

        Shapes: `loss`, `num_tokens` 0-dim; `num_tokens` int64. Collectives: none. Source: Megatron-core's
        `forward_step_calc_loss` and `finalize_model_grads` (0.16.1).
        """
        loss = cancel_megatron_scaling(loss, num_microbatches, groups.dp_size, groups.cp_size, self)
        if self.per_token:
            return loss, num_tokens, report
        if self.num_values == 3:
            # The schedule divides by the count, and by nothing where that is 0.
            return loss * num_tokens.clamp(min=1), num_tokens, report
        return loss, report


TWO_VALUES = LossContract()


def cancel_megatron_scaling(
    loss: torch.Tensor,
    num_microbatches: int,
    dp_size: int,
    cp_size: int = 1,
    contract: LossContract = TWO_VALUES,
) -> torch.Tensor:
    """The loss to return so that the optimizer sees the gradient of the plain sum over microbatches and DP x
    CP ranks: times the number of microbatches x DP for two values in Megatron's own data parallelism.

    Never `loss` itself, which the schedule changes in place.
    """
    averages = not contract.per_token if contract.averages is None else contract.averages
    averaged = dp_size * cp_size if averages else 1
    if contract.per_token:
        return loss * averaged
    if contract.num_values == 3:
        return loss * (num_microbatches * averaged)
    return loss * (num_microbatches * averaged / cp_size)


def divides_by_exact_count(loss: LossConfig) -> bool:
    """Does the run use Megatron's per-token regime (`calculate_per_token_loss`)?

    Nothing is scaled there: gradient finalisation sums `num_tokens` over microbatches and DP x CP ranks and
    divides every gradient by it.
    """
    return loss.actor_denominator == "retained_exact"


@dataclass(frozen=True, kw_only=True)
class OutputHead:
    """How the last stage gets from hidden states to `TokenLogprobs`."""

    groups: ParallelGroups
    vocab_size: int
    """Real vocabulary size."""
    fused: bool
    """Score hidden states and the head's weight; the stage then runs without its head."""
    fused_tokens: int = CHUNK_TOKENS
    """Tokens whose logits exist at once when fused."""
    support: ReplayMode = "recompute"
    """`sampling.support`."""

    def run(self, model: Any, microbatch: Microbatch) -> torch.Tensor:
        """Logits `[b, L, v]` on the last stage, hidden states on the others and everywhere when fused.

        Causal attention; right padding needs no mask, packed rows say where sequences end.
        """
        packed = {}
        if microbatch.packed is not None:
            packed["packed_seq_params"] = packed_seq_params(microbatch.packed.layout)
        with without_head(unwrap(model)) if self.fused else nullcontext():
            return model(microbatch.input_ids_bl, microbatch.position_ids_bl, None, **packed)

    def score(
        self, model: Any, output: torch.Tensor, microbatch: Microbatch, spec: SamplingSpec, entropy: bool
    ) -> TokenLogprobs:
        """The scored tokens of what `run` returned on the last stage."""
        if self.fused:
            return score_hidden(unwrap(model), output, microbatch, self._scoring(spec, entropy))
        return score_logits(output, microbatch, spec, self.groups, self.vocab_size, entropy, self.support)

    def loss(
        self,
        model: Any,
        output: torch.Tensor,
        microbatch: Microbatch,
        spec: SamplingSpec,
        loss: LossConfig,
    ) -> tuple[torch.Tensor, LossReport]:
        """The loss of what `run` returned on the last stage, and its report."""

        def loss_of(part: Microbatch, scores: TokenLogprobs) -> tuple[torch.Tensor, LossReport]:
            return microbatch_loss(part, scores, loss, self.groups.cp)

        entropy = wants_entropy(loss)
        if self.fused and is_sum_over_tokens(loss):
            scoring = self._scoring(spec, entropy)
            value, reports = loss_of_hidden(unwrap(model), output, microbatch, scoring, loss_of)
            report = join_reports(reports)
        else:
            value, report = loss_of(microbatch, self.score(model, output, microbatch, spec, entropy))
        if self.support == "audit":
            audit = self.audit(model, output, microbatch, spec)
            mask_t = kl_mask(microbatch.token_mask_t, microbatch.sample_mask_t, microbatch.sequence_keep_t)
            report = replace(report, metrics={**report.metrics, **audit.metrics(mask_t)})
        return value, report

    def audit(
        self, model: Any, output: torch.Tensor, microbatch: Microbatch, spec: SamplingSpec
    ) -> AuditReport:
        """How the microbatch's `sampling_mask` differs from the searched supports, for what `run` returned on
        the last stage. Without gradient.
        """
        if self.fused:
            return audit_hidden(unwrap(model), output, microbatch, self._scoring(spec, entropy=False))
        return audit_logits(output, microbatch, spec, self.groups, self.vocab_size)

    def _scoring(self, spec: SamplingSpec, entropy: bool) -> Scoring:
        return Scoring(
            spec=spec,
            groups=self.groups,
            vocab_size=self.vocab_size,
            entropy=entropy,
            chunk_tokens=self.fused_tokens,
            replays=self.support == "replay",
        )


def score_logits(
    logits: torch.Tensor,
    microbatch: Microbatch,
    spec: SamplingSpec,
    groups: ParallelGroups,
    vocab_size: int,
    entropy: bool,
    support: ReplayMode = "recompute",
) -> TokenLogprobs:
    """The op on Megatron's `[b, L, v]` logits, flattened in the microbatch's order. Never raises on data.

    `support`: `replay` scores under the microbatch's `sampling_mask`.
    """
    logits_tv, vocab = flat_logits(logits, groups, vocab_size)
    return vocab_parallel_logprob(
        logits_tv,
        microbatch.target_t,
        spec,
        groups.tp,
        vocab,
        entropy=entropy,
        validate=False,
        penalties=microbatch.penalty_tokens,
        replay=microbatch.sampling_mask,
        replay_mode=support,
    )


def audit_logits(
    logits: torch.Tensor,
    microbatch: Microbatch,
    spec: SamplingSpec,
    groups: ParallelGroups,
    vocab_size: int,
) -> AuditReport:
    """`audit_supports` on Megatron's `[b, L, v]` logits and the microbatch's `sampling_mask`."""
    logits_tv, vocab = flat_logits(logits.detach(), groups, vocab_size)
    mask = microbatch.sampling_mask
    assert mask is not None, "the worker checks that a batch it audits has the sampler's kept ids"
    return audit_supports(
        logits_tv,
        microbatch.target_t,
        Replayed(spec, mask),
        groups.tp,
        vocab,
        penalties=microbatch.penalty_tokens,
    )


def flat_logits(
    logits: torch.Tensor, groups: ParallelGroups, vocab_size: int
) -> tuple[torch.Tensor, VocabShard]:
    """Megatron's `[b, L, v]` as `[T, v]`, and which ids its columns are."""
    logits_tv = logits.reshape(-1, logits.shape[-1])
    return logits_tv, VocabShard.even(logits_tv.shape[1] * groups.tp_size, vocab_size, groups.tp)


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


def make_loss_func(
    loss: LossConfig,
    spec: SamplingSpec,
    head: OutputHead,
    num_microbatches: int,
    contract: LossContract = TWO_VALUES,
) -> Callable[[Any, Microbatch, torch.Tensor], tuple]:
    """`(model, microbatch, output)` to what the schedule expects of a loss function: the scaled loss and a
    `LossReport`, as `contract` says. `output`: the last stage's logits `[b, L, v]`, as from `head.run`.

    `retained_exact` needs a contract that is `per_token`.
    """

    def loss_func(model: Any, microbatch: Microbatch, output: torch.Tensor) -> tuple:
        value, report = head.loss(model, output, microbatch, spec, loss)
        return contract.returned(value, report, divides_by_exact_count(loss), num_microbatches, head.groups)

    return loss_func


def make_train_step(
    loss_func: Callable[[Any, Microbatch, torch.Tensor], tuple], head: OutputHead
) -> Callable:
    """A forward step around `make_loss_func`'s result."""

    def train_step(data: Iterator[Microbatch], model: Any) -> tuple[torch.Tensor, Callable]:
        microbatch = next(data)
        return head.run(model, microbatch), partial(loss_func, model, microbatch)

    return train_step
