"""What crosses files: frozen dataclasses. Axis letters: S sequences, L padded length, T = tokens of a
microbatch.

Two alignments exist, and only `megatron_worker/microbatches.py` converts between them:
- token-aligned `[S, L]`: entry j describes the token `ids[s, j]` itself (the probability it was drawn with,
  ...);
- predictor-aligned `[T]`: entry j describes the token that position j predicts, `ids[s, j + 1]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from rlcore.sampling_mask import SamplingMask


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt of a task."""

    ids: Sequence[int]
    """Token ids."""
    group_id: int
    """Identity of the prompt: samples that share it form one advantage group, wherever they stand in a batch.
    """
    answer: object = None
    """Whatever the task's reward needs to grade a response."""


@dataclass(frozen=True, kw_only=True)
class Graded:
    """What became of grading one response."""

    reward: float | None
    """Finite; None: the response has no reward."""
    reason: str = ""
    """Why it has none, in one line."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What a rollout engine produced on one data-parallel rank. Token-aligned, right-padded."""

    ids_sl: torch.Tensor
    """`[S, L]` int64: prompt, response, padding."""
    prompt_length_s: torch.Tensor
    """`[S]` int64: number of prompt tokens."""
    length_s: torch.Tensor
    """`[S]` int64: number of prompt + response tokens."""
    sampler_logprob_sl: torch.Tensor
    """`[S, L]` float32: processed logprob of each response token under the sampler; 0 elsewhere (masked
    there).
    """
    finished_s: torch.Tensor
    """`[S]` bool: the response ended by itself (end-of-text), not by the length limit."""
    group_id_s: torch.Tensor
    """`[S]` int64: `Prompt.group_id`."""
    version_s: torch.Tensor
    """`[S]` int64: steps that the policy had been trained for when it drew the response."""
    sampling_mask: SamplingMask | None = None
    """The ids that the sampler kept, `S x L` rows in the order of `ids_sl`, on the host; rows of prompt and
    padding list none. None: the engine was not asked for them.
    """

    @property
    def token_mask_sl(self) -> torch.Tensor:
        """`[S, L]` bool: is this position a response token?"""
        position_l = torch.arange(self.ids_sl.shape[1], device=self.ids_sl.device)
        return (position_l >= self.prompt_length_s[:, None]) & (position_l < self.length_s[:, None])


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """One optimizer step's data on one data-parallel rank. Token-aligned, right-padded; never changed in
    place.
    """

    ids_sl: torch.Tensor
    """`[S, L]` int64."""
    length_s: torch.Tensor
    """`[S]` int64: number of real tokens, prompt + response."""
    token_mask_sl: torch.Tensor
    """`[S, L]` bool: response tokens."""
    sample_mask_s: torch.Tensor
    """`[S]` bool: this sample takes part."""
    advantage_sl: torch.Tensor
    """`[S, L]` float32: 0 outside the token mask."""
    sampler_logprob_sl: torch.Tensor
    """`[S, L]` float32: the rollout engine's processed logprob."""
    old_logprob_sl: torch.Tensor | None = None
    """`[S, L]` float32: recomputed before the update; -inf where `keep_old` is False. None: the pass was
    skipped.
    """
    keep_old_sl: torch.Tensor | None = None
    """`[S, L]` bool: was the token inside the trainer's support before the update?"""
    old_log_mass_sl: torch.Tensor | None = None
    """`[S, L]` float32: log of the surviving mass, for diagnostics."""
    old_unfiltered_logprob_sl: torch.Tensor | None = None
    """`[S, L]` float32: the old policy's logprob without truncation, where a KL penalty in the reward reads
    it.
    """
    reference_logprob_sl: torch.Tensor | None = None
    """`[S, L]` float32: frozen reference policy, never truncated. None: no KL term."""
    sampling_mask: SamplingMask | None = None
    """`Rollout.sampling_mask`, where the config replays or audits it."""

    def __post_init__(self) -> None:
        num_sequences, length = self.ids_sl.shape
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or field.name == "sampling_mask":
                continue
            expected = (num_sequences,) if field.name.endswith("_s") else (num_sequences, length)
            if tuple(value.shape) != expected:
                raise ValueError(
                    f"TrainBatch.{field.name} has shape {tuple(value.shape)}; ids_sl says it must be "
                    f"{expected}."
                )
        if self.sampling_mask is not None and self.sampling_mask.num_rows != num_sequences * length:
            raise ValueError(
                f"TrainBatch.sampling_mask has {self.sampling_mask.num_rows} rows; ids_sl says it must have "
                f"{num_sequences} x {length}."
            )
        for name in ("token_mask_sl", "sample_mask_s", "keep_old_sl"):
            mask = getattr(self, name)
            if mask is not None and mask.dtype != torch.bool:
                raise ValueError(f"TrainBatch.{name} is {mask.dtype}; expected torch.bool.")

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.ids_sl.shape[0]

    def rows(self, chunk: slice) -> TrainBatch:
        """Some consecutive samples, as views. `ValueError` for a slice with a step, where there is a mask."""
        changed: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                changed[field.name] = value[chunk]
        if self.sampling_mask is not None:
            length = self.ids_sl.shape[1]
            start, stop, step = chunk.indices(self.num_sequences)
            changed["sampling_mask"] = self.sampling_mask.rows(slice(start * length, stop * length, step))
        return replace(self, **changed)

    def with_sampler_as_old(self) -> TrainBatch:
        """The sampler's logprobs as the old policy's (`loss.old_logprobs=sampler`).

        Every token was in the sampler's support when it was drawn: one without a finite logprob cannot be
        scored, and leaves through `keep_old`. How much mass the sampler cut is not known.
        """
        finite_sl = torch.isfinite(self.sampler_logprob_sl)
        return replace(
            self,
            old_logprob_sl=torch.where(finite_sl, self.sampler_logprob_sl, -torch.inf),
            keep_old_sl=finite_sl,
        )


@dataclass(frozen=True, kw_only=True)
class ScoredTokens:
    """Result of a scoring pass, the same on every rank of a model replica. Token-aligned `[S, L]`."""

    logprob_sl: torch.Tensor
    """float32 under the truncated distribution; -inf where `keep_sl` is False; 0 where nothing was predicted.
    """
    keep_sl: torch.Tensor
    """bool: the token is inside the support. True where nothing was predicted."""
    log_mass_sl: torch.Tensor
    """float32, <= 0: log of the surviving mass."""
    unfiltered_logprob_sl: torch.Tensor | None = None
    """float32 under the whole distribution, where the config asks for it."""


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """What one forward of the model reads. Predictor-aligned, flattened `[T]`, T = sequences x padded
    length.
    """

    input_ids_bl: torch.Tensor
    """`[b, L]` int64: model input."""
    position_ids_bl: torch.Tensor
    """`[b, L]` int64."""
    target_t: torch.Tensor
    """`[T]` int64: the id that each position predicts (0 where it predicts nothing; masked there)."""
    real_t: torch.Tensor
    """`[T]` bool: the position predicts a token of its sequence, prompt or response; False in padding."""
    token_mask_t: torch.Tensor
    """`[T]` bool: the predicted id is a response token."""
    sample_mask_t: torch.Tensor
    """`[T]` bool."""
    sample_index_t: torch.Tensor
    """`[T]` int64: row of the step's batch that the position belongs to; -1 for filler rows."""
    advantage_t: torch.Tensor
    """`[T]` float32."""
    sampler_logprob_t: torch.Tensor
    """`[T]` float32."""
    old_logprob_t: torch.Tensor | None = None
    """`[T]` float32."""
    keep_old_t: torch.Tensor | None = None
    """`[T]` bool."""
    old_log_mass_t: torch.Tensor | None = None
    """`[T]` float32."""
    reference_logprob_t: torch.Tensor | None = None
    """`[T]` float32."""
    segment_t: torch.Tensor | None = None
    """`[T]` int64: index of the position's sequence in this microbatch; -1 in filler."""
    policy_multiplier_t: torch.Tensor | None = None
    """`[T]` float32: this and the next five as in `rlcore.step_weights.StepWeights`; None for scoring."""
    kl_multiplier_t: torch.Tensor | None = None
    """`[T]` float32."""
    nll_multiplier_t: torch.Tensor | None = None
    """`[T]` float32."""
    sequence_keep_t: torch.Tensor | None = None
    """`[T]` bool."""
    importance_t: torch.Tensor | None = None
    """`[T]` float32."""
    importance_keep_t: torch.Tensor | None = None
    """`[T]` bool."""
    penalty_tokens: Any = None
    """`rlcore.ops.penalties.PenaltyTokens` of the T positions, on the host; None where nothing is penalised.
    """
    sampling_mask: SamplingMask | None = None
    """The ids that the sampler kept where it drew each predicted token, T rows, on the host; rows that
    predict no response token list none. None where the config neither replays nor audits them.
    """
    packed: Any = None
    """`megatron_worker.packed_microbatches.PackedRow`: the T positions are this context-parallel rank's part
    of one row of sequences end to end. None: b rows of L positions.
    """
    num_segments: int = 0
    """Sequences of this microbatch, filler included."""
    num_samples: int = 0
    """Rows of the step's batch."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Outcome of one optimizer step, the same on every rank."""

    metrics: Mapping[str, float]
    """Reduced metrics by name."""
    stepped: bool
    """False when the step was refused or empty; weights and optimizer are then untouched."""
    reason: str = ""
    """Why the step was not taken."""
    refused: bool = False
    """Not taken because of NaN or inf, on all ranks together."""
    broken_samples: tuple[tuple[int, int], ...] = ()
    """The samples with NaN or inf in logits or loss: data-parallel rank and row of its batch; the first few
    of each rank.
    """
