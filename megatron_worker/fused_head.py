"""Scoring from hidden states and the head's weight: the stage runs without its head, and logits exist one
chunk of tokens at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlcore.batch import Microbatch
from rlcore.groups import ParallelGroups
from rlcore.ops.linear_logprob import linear_vocab_parallel_logprob
from rlcore.ops.logprob import TokenLogprobs, VocabShard
from rlcore.sampling import SamplingSpec


@contextmanager
def without_head(stage: Any) -> Iterator[None]:
    """A bare stage returns hidden states while open."""
    post_process = stage.post_process
    stage.post_process = False
    try:
        yield
    finally:
        stage.post_process = post_process


def score_hidden(
    stage: Any,
    hidden: torch.Tensor,
    microbatch: Microbatch,
    spec: SamplingSpec,
    groups: ParallelGroups,
    vocab_size: int,
    entropy: bool,
) -> TokenLogprobs:
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
        microbatch.target_t.view(num_rows, length).t().reshape(-1),
        spec,
        groups.tp,
        VocabShard.even(weight_vd.shape[0] * groups.tp_size, vocab_size, groups.tp),
        entropy=entropy,
        validate=False,
        sequence_parallel=stage.config.sequence_parallel,
    )
    by_row: dict[str, Any] = {
        field.name: None if value is None else value.view(length, num_rows).t().reshape(-1)
        for field in dataclasses.fields(scores)
        for value in [getattr(scores, field.name)]
    }
    return TokenLogprobs(**by_row)


def output_weight(stage: Any) -> torch.Tensor:
    """`[v, D]`: this rank's rows of the head of a bare last stage, tied to the embedding or not."""
    if stage.share_embeddings_and_output_weights:
        return stage.shared_embedding_or_output_weight()
    return stage.output_layer.weight
