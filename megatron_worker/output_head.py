"""From a stage's forward to scored tokens: the op on whole logits, or with the head fused into it, where
logits exist one chunk of tokens at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megatron_worker.hf_bridge import unwrap
from rlcore.batch import Microbatch
from rlcore.groups import ParallelGroups
from rlcore.ops.linear_logprob import linear_vocab_parallel_logprob
from rlcore.ops.logprob import TokenLogprobs, VocabShard, vocab_parallel_logprob
from rlcore.sampling import SamplingSpec


@dataclass(frozen=True, kw_only=True)
class OutputHead:
    """How the last stage turns hidden states into `TokenLogprobs`. No method raises on account of data."""

    groups: ParallelGroups
    vocab_size: int
    """Real vocabulary size."""
    fused: bool
    """Score hidden states and head weight; the stage then runs without its head."""

    def run(self, model: Any, microbatch: Microbatch) -> torch.Tensor:
        """Causal attention; right padding needs no mask.

        On the last stage logits `[b, L, v]`, or fused hidden states `[l, b, D]` (l: L, or with sequence
        parallelism this rank's share of L); on the others what they send on.
        """
        ids_bl, position_ids_bl = microbatch.input_ids_bl, microbatch.position_ids_bl
        if not self.fused:
            return model(ids_bl, position_ids_bl, None)
        with without_head(unwrap(model)):
            return model(ids_bl, position_ids_bl, None)

    def score(
        self, model: Any, output: torch.Tensor, microbatch: Microbatch, spec: SamplingSpec, entropy: bool
    ) -> TokenLogprobs:
        """The scored tokens of what `run` returned on the last stage, in the microbatch's order."""
        if self.fused:
            return self._score_hidden(unwrap(model), output, microbatch, spec, entropy)
        logits_tv = output.reshape(-1, output.shape[-1])
        vocab = self._vocab(logits_tv.shape[1])
        return vocab_parallel_logprob(
            logits_tv, microbatch.target_t, spec, self.groups.tp, vocab, entropy=entropy, validate=False
        )

    def _score_hidden(
        self, stage: Any, hidden: torch.Tensor, microbatch: Microbatch, spec: SamplingSpec, entropy: bool
    ) -> TokenLogprobs:
        """Tokens in Megatron's order, position by position, so that hidden states need no copy; then back."""
        shape_bl = microbatch.input_ids_bl.shape
        weight_vd = output_weight(stage)
        scores = linear_vocab_parallel_logprob(
            hidden.flatten(0, 1),
            weight_vd,
            microbatch.target_t.view(shape_bl).t().reshape(-1),
            spec,
            self.groups.tp,
            self._vocab(weight_vd.shape[0]),
            entropy=entropy,
            validate=False,
            sequence_parallel=stage.config.sequence_parallel,
        )
        by_row: dict[str, Any] = {
            field.name: None if value is None else value.view(shape_bl[1], shape_bl[0]).t().reshape(-1)
            for field in dataclasses.fields(scores)
            for value in [getattr(scores, field.name)]
        }
        return TokenLogprobs(**by_row)

    def _vocab(self, width: int) -> VocabShard:
        return VocabShard.even(width * self.groups.tp_size, self.vocab_size, self.groups.tp)


def output_weight(stage: Any) -> torch.Tensor:
    """`[v, D]`: this rank's rows of the head of a bare last stage, tied to the embedding or not."""
    if stage.share_embeddings_and_output_weights:
        return stage.shared_embedding_or_output_weight()
    return stage.output_layer.weight


@contextmanager
def without_head(stage: Any) -> Iterator[None]:
    """A bare stage returns hidden states while open."""
    post_process = stage.post_process
    stage.post_process = False
    try:
        yield
    finally:
        stage.post_process = post_process
