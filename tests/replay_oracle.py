"""Compares a shard under replay or penalties with the float64 reference on the whole, gradients included."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlcore.ops.logprob import VocabShard, vocab_parallel_logprob
from rlcore.ops.penalties import PenaltyTokens
from rlcore.ops.reference import reference_logprob, reference_penalised, reference_replay
from rlcore.sampling import RowSampling, SamplingSpec
from rlcore.sampling_mask import SamplingMask
from tests.oracle import TOLERANCE, assert_close, assert_same_values, gradients, make_weights


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Columns [start, stop) of the whole, and `padding` columns after them that nobody may read."""

    start: int
    stop: int
    padding: int = 0
    group: Any = None

    def cut(self, logits: torch.Tensor) -> torch.Tensor:
        """This shard's columns as a leaf; the padding holds large values and NaN."""
        width = self.stop - self.start
        columns = torch.full((logits.shape[0], width + self.padding), 1e4, dtype=logits.dtype)
        columns[:, width:][:, ::2] = math.nan
        columns[:, :width] = logits[:, self.start : self.stop]
        return columns.requires_grad_()

    def vocab(self, vocab_size: int) -> VocabShard:
        """Which ids the columns are."""
        return VocabShard(start=self.start, vocab_size=vocab_size)


def check_replayed(
    logits: torch.Tensor,
    target_t: torch.Tensor,
    spec: SamplingSpec,
    kept_ids: Sequence[Sequence[int]],
    shard: Shard,
    backend: str = "auto",
) -> None:
    """The op under replay on one shard equals the reference on the whole row."""
    whole = logits.detach().double().requires_grad_()
    reference = reference_replay(whole, target_t, spec, kept_ids)
    columns = shard.cut(logits)
    before = columns.detach().clone()
    ours = vocab_parallel_logprob(
        columns,
        target_t,
        spec,
        shard.group,
        shard.vocab(logits.shape[1]),
        replay=SamplingMask.from_lists(kept_ids),
        entropy=True,
        backend=backend,
    )
    assert_same_values(ours, reference, hint=(spec, shard))
    assert torch.equal(columns.detach().nan_to_num(5.0), before.nan_to_num(5.0)), "the input was modified"
    _check_gradients(ours, columns, reference, whole, shard)


@dataclass(frozen=True, kw_only=True)
class History:
    """Sequences whose tokens the penalties count; rows `[S * L]` are predictor-aligned."""

    ids_sl: torch.Tensor
    prompt_length_s: torch.Tensor
    length_s: torch.Tensor

    @staticmethod
    def random(num_sequences: int, length: int, num_ids: int, seed: int) -> History:
        """Lengths from 1 to `length`, prompts from nothing to everything, ids below `num_ids`."""
        generator = torch.Generator().manual_seed(seed)
        ids_sl = torch.randint(0, num_ids, (num_sequences, length), generator=generator)
        length_s = torch.randint(1, length + 1, (num_sequences,), generator=generator)
        prompt_length_s = (torch.rand(num_sequences, generator=generator) * (length_s + 1)).long()
        return History(ids_sl=ids_sl, prompt_length_s=prompt_length_s, length_s=length_s)

    def tokens(self) -> PenaltyTokens:
        """As the op takes it."""
        return PenaltyTokens.of(self.ids_sl, self.prompt_length_s, self.length_s)

    def before(self) -> tuple[list[list[int]], list[list[int]]]:
        """Prompt and response tokens that each row has seen, one token at a time."""
        prompts, responses = [], []
        for ids, prompt, length in zip(self.ids_sl, self.prompt_length_s, self.length_s, strict=True):
            for row in range(len(ids)):
                seen = range(row + 1) if row < length else range(0)
                prompts.append([int(ids[j]) for j in seen if j < prompt])
                responses.append([int(ids[j]) for j in seen if j >= prompt])
        return prompts, responses


def check_penalised(
    logits: torch.Tensor,
    target_t: torch.Tensor,
    specs: Sequence[SamplingSpec],
    history: History,
    shard: Shard,
) -> None:
    """The op with penalties on one shard equals the reference; one spec for all rows, or one each."""
    whole = logits.detach().double().requires_grad_()
    row_specs = list(specs) * logits.shape[0] if len(specs) == 1 else list(specs)
    penalised = reference_penalised(whole, *history.before(), row_specs)
    reference = reference_logprob(penalised, target_t, specs[0].without_penalties())
    columns = shard.cut(logits)
    before = columns.detach().clone()
    ours = vocab_parallel_logprob(
        columns,
        target_t,
        specs[0] if len(specs) == 1 else RowSampling.of(specs),
        shard.group,
        shard.vocab(logits.shape[1]),
        penalties=history.tokens(),
        entropy=True,
    )
    assert_same_values(ours, reference, hint=(specs[0], shard))
    assert torch.equal(columns.detach().nan_to_num(5.0), before.nan_to_num(5.0)), "the input was modified"
    _check_gradients(ours, columns, reference, whole, shard)


def _check_gradients(
    ours: Any, columns: torch.Tensor, reference: Any, whole: torch.Tensor, shard: Shard
) -> None:
    """One output at a time; padding has none."""
    width = shard.stop - shard.start
    weights = make_weights(columns.shape[0], seed=7)
    expected = gradients(reference, whole, weights)
    for name, grad in gradients(ours, columns, weights).items():
        own = expected[name][:, shard.start : shard.stop]
        # A bfloat16 gradient is rounded once, to 8 bits.
        rounding = 2.0**-8 * own.abs() if columns.dtype == torch.bfloat16 else 0.0
        apart = ((grad[:, :width].double() - own).abs() - rounding).clamp(min=0.0)
        assert_close(own + apart, own, TOLERANCE, (name, shard))
        assert not grad[:, width:].any(), (name, "padding has a gradient")
