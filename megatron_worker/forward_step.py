"""What Megatron's schedule calls: scoring and loss of one microbatch, and the one place that cancels loss
scaling.

Nothing here raises on account of data: only the last stage would, and the others would wait for it. Broken
    rows are reported in the returned values, and the worker refuses the step on all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_worker.fused_head import Scoring, loss_of_hidden, score_hidden, without_head
from megatron_worker.hf_bridge import unwrap
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
from rlcore.ops.linear_head import CHUNK_TOKENS
from rlcore.ops.logprob import TokenLogprobs, VocabShard, vocab_parallel_logprob
from rlcore.sampling import SamplingSpec


def cancel_megatron_scaling(loss: torch.Tensor, num_microbatches: int, dp_size: int) -> torch.Tensor:
    """The loss to return so that the optimizer sees the gradient of the plain sum over microbatches and DP x
    CP ranks.

    For the two-value contract: the schedule multiplies by CP and divides by the number of microbatches, and
    data parallelism divides gradients by DP x CP. What is left to cancel is num_microbatches x DP.
    """
    return loss * (num_microbatches * dp_size)


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
        return score_logits(output, microbatch, spec, self.groups, self.vocab_size, entropy)

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
            return microbatch_loss(part, scores, loss)

        entropy = wants_entropy(loss)
        if not (self.fused and is_sum_over_tokens(loss)):
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
    microbatch: Microbatch,
    spec: SamplingSpec,
    groups: ParallelGroups,
    vocab_size: int,
    entropy: bool,
) -> TokenLogprobs:
    """The op on Megatron's `[b, L, v]` logits, flattened in the microbatch's order. Never raises on data."""
    logits_tv = logits.reshape(-1, logits.shape[-1])
    vocab = VocabShard.even(logits_tv.shape[1] * groups.tp_size, vocab_size, groups.tp)
    return vocab_parallel_logprob(
        logits_tv,
        microbatch.target_t,
        spec,
        groups.tp,
        vocab,
        entropy=entropy,
        validate=False,
        penalties=microbatch.penalty_tokens,
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
    loss: LossConfig, spec: SamplingSpec, head: OutputHead, num_microbatches: int
) -> Callable:
    """A forward step whose loss function returns the scaled loss and a `LossReport`; with `retained_exact`
    the number of trained tokens between them.
    """

    def train_step(data: Iterator[Microbatch], model: Any) -> tuple[torch.Tensor, Callable]:
        microbatch = next(data)
        return head.run(model, microbatch), partial(loss_of, model, microbatch)

    def loss_of(model: Any, microbatch: Microbatch, output: torch.Tensor) -> tuple:
        value, report = head.loss(model, output, microbatch, spec, loss)
        if divides_by_exact_count(loss):
            return value, report.num_trained, report
        return cancel_megatron_scaling(value, num_microbatches, head.groups.dp_size), report

    return train_step
