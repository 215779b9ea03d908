"""Scoring from hidden states and the head's weight: the stage runs without its head, and logits exist one
chunk of tokens at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rlcore.batch import Microbatch
from rlcore.groups import ParallelGroups
from rlcore.ops.audit import AuditReport, linear_audit_supports
from rlcore.ops.linear_logprob import linear_logprob_loss, linear_vocab_parallel_logprob
from rlcore.ops.logprob import TokenLogprobs, VocabShard
from rlcore.ops.replay import Replayed
from rlcore.sampling import SamplingSpec
from rlcore.sampling_mask import SamplingMask


@contextmanager
def without_head(stage: Any) -> Iterator[None]:
    """A bare stage returns hidden states while open."""
    post_process = stage.post_process
    stage.post_process = False
    try:
        yield
    finally:
        stage.post_process = post_process


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How hidden states are scored."""

    spec: SamplingSpec
    groups: ParallelGroups
    vocab_size: int
    """Real vocabulary size."""
    entropy: bool
    """Are the entropies wanted?"""
    chunk_tokens: int
    """Tokens whose logits exist at once."""
    replays: bool = False
    """Under the microbatch's kept ids, where it has some?"""

    def options(self, stage: Any, weight_vd: torch.Tensor) -> dict[str, Any]:
        """The arguments that both forms of the op take by name."""
        num_rows = weight_vd.shape[0] * self.groups.tp_size
        return {
            "spec": self.spec,
            "tp_group": self.groups.tp,
            "vocab": VocabShard.even(num_rows, self.vocab_size, self.groups.tp),
            "entropy": self.entropy,
            "chunk_tokens": self.chunk_tokens,
            "validate": False,
            "sequence_parallel": stage.config.sequence_parallel,
        }


def score_hidden(stage: Any, hidden: torch.Tensor, microbatch: Microbatch, scoring: Scoring) -> TokenLogprobs:
    """The op on a bare last stage's `[l, b, D]` hidden states, in the microbatch's order. Never raises
    on data.

    l: L, or with sequence parallelism this rank's share of L. Tokens are scored position by position, as
    Megatron holds them, so that hidden states need no copy; only the O(T) targets and results are reordered.
    """
    num_rows, length = microbatch.input_ids_bl.shape
    weight_vd = output_weight(stage)
    scores = linear_vocab_parallel_logprob(
        hidden.flatten(0, 1),
        weight_vd,
        _by_position(microbatch.target_t, num_rows, length),
        replay=_kept_ids(microbatch) if scoring.replays else None,
        **scoring.options(stage, weight_vd),
    )
    return TokenLogprobs(**_by_row(scores, num_rows, length))


def audit_hidden(stage: Any, hidden: torch.Tensor, microbatch: Microbatch, scoring: Scoring) -> AuditReport:
    """`score_hidden`, for how the microbatch's kept ids, which it must have, differ from a search."""
    num_rows, length = microbatch.input_ids_bl.shape
    weight_vd = output_weight(stage)
    mask = _kept_ids(microbatch)
    assert mask is not None, "the config reads kept ids"
    options = scoring.options(stage, weight_vd)
    report = linear_audit_supports(
        hidden.flatten(0, 1),
        weight_vd,
        _by_position(microbatch.target_t, num_rows, length),
        Replayed(options.pop("spec"), mask),
        **options,
    )
    return AuditReport(**_by_row(report, num_rows, length))


def loss_of_hidden(
    stage: Any,
    hidden: torch.Tensor,
    microbatch: Microbatch,
    scoring: Scoring,
    loss_of: Callable[[Microbatch, TokenLogprobs], tuple[torch.Tensor, Any]],
) -> tuple[torch.Tensor, list[Any]]:
    """The loss of a bare last stage's hidden states, where it is a sum over tokens: logits are computed once,
    chunk by chunk, and never stored.

    `loss_of(part, scores)` gets some of the microbatch's tokens and returns their summand and a report. A
    part's `_t` fields hold its own tokens; its `_bl` fields are those of the whole microbatch.
    """
    num_rows, length = microbatch.input_ids_bl.shape
    weight_vd = output_weight(stage)
    by_position = {
        field.name: _by_position(value, num_rows, length)
        for field in dataclasses.fields(microbatch)
        if field.name.endswith("_t") and (value := getattr(microbatch, field.name)) is not None
    }

    def loss_of_chunk(scores: TokenLogprobs, chunk: slice) -> tuple[torch.Tensor, Any]:
        part: dict[str, Any] = {name: value_t[chunk] for name, value_t in by_position.items()}
        return loss_of(dataclasses.replace(microbatch, **part), scores)

    return linear_logprob_loss(
        hidden.flatten(0, 1),
        weight_vd,
        by_position["target_t"],
        loss_of_chunk=loss_of_chunk,
        replay=_kept_ids(microbatch) if scoring.replays else None,
        **scoring.options(stage, weight_vd),
    )


def _by_position(value_t: torch.Tensor, num_rows: int, length: int) -> torch.Tensor:
    """Tokens of the microbatch in Megatron's order: position by position."""
    return value_t.view(num_rows, length).t().reshape(-1)


def _by_row(value: Any, num_rows: int, length: int) -> dict[str, Any]:
    """The `_t` fields of a result in the microbatch's order."""
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {
        name: None if value_t is None else value_t.view(length, num_rows).t().reshape(-1)
        for name, value_t in fields.items()
    }


def _kept_ids(microbatch: Microbatch) -> SamplingMask | None:
    """The microbatch's kept ids in Megatron's order."""
    mask = microbatch.sampling_mask
    num_rows, length = microbatch.input_ids_bl.shape
    if mask is None or num_rows == 1:
        return mask
    return mask.select(_by_position(torch.arange(num_rows * length), num_rows, length))


def output_weight(stage: Any) -> torch.Tensor:
    """`[v, D]`: this rank's rows of the head of a bare last stage, tied to the embedding or not."""
    if stage.share_embeddings_and_output_weights:
        return stage.shared_embedding_or_output_weight()
    return stage.output_layer.weight
