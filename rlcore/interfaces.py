"""What the loop needs from its parts. The loop knows these names and nothing about Megatron or vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from rlcore.batch import Graded, Prompt, Rollout, ScoredTokens, StepResult, TrainBatch
from rlcore.groups import ParallelGroups


class PolicyWorker(Protocol):
    """The policy under training, sharded over the ranks of this process group layout."""

    groups: ParallelGroups
    device: torch.device
    """Where the policy's weights are."""

    def logprobs(self, batch: TrainBatch) -> ScoredTokens:
        """Scores the batch under the current weights. Collective: every rank calls it with its replica's
        batch.
        """
        ...

    def reference_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """`[S, L]` unfiltered logprobs of the frozen reference policy. Collective."""
        ...

    def train_step(self, batch: TrainBatch) -> StepResult:
        """One optimizer step. Collective."""
        ...

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, whole tensor on the host) of every weight, on every rank, in model order,
        without a tied head. Collective: every rank exhausts it.
        """
        ...

    def save(self, path: str) -> None:
        """Writes the policy as a Hugging Face folder. Collective."""
        ...


class DecodingModel(Protocol):
    """What the embedded sampler needs: sharded next-token logits of a model, one position at a time."""

    groups: ParallelGroups
    vocab_size: int
    """Real vocabulary size V, without padding."""
    device: torch.device
    """Where ids are expected and logits returned."""

    def start_decoding(self, num_sequences: int, max_length: int) -> None:
        """Forgets earlier state and makes room for `[num_sequences, max_length]` tokens. Collective."""
        ...

    def next_logits(self, ids_sl: torch.Tensor, num_seen: int) -> torch.Tensor | None:
        """Logits `[S, v]` (this TP rank's columns) that predict the token after the last column of `ids_sl
        [S, L]`.

        The model has already seen the first `num_seen` columns. All rows have the same length L, so rows are
        aligned at the start. None on every stage but the last. Collective over the model replica, and with
        expert parallelism over all replicas: each calls it equally often.
        """
        ...


class RolloutEngine(Protocol):
    """Draws responses."""

    def update_weights(self, version: int) -> None:
        """Draws from the policy's current weights from now on, those after `version` steps. Collective; not
        between `begin` and `collect`. Raises on every rank where the engine may hold anything else.
        """
        ...

    def begin(self, prompts: Sequence[Prompt], samples_per_prompt: int, seed: int) -> None:
        """Asks for `samples_per_prompt` responses to each prompt. Collective; `collect` follows."""
        ...

    def collect(self) -> Rollout:
        """The responses, next to each other, in the order of the prompts. Collective."""
        ...


class Task(Protocol):
    """Prompts and rewards."""

    eos_id: int
    """Id that ends a response."""
    vocab_size: int
    """Real vocabulary size V: every id of the task is below it. A model trained from scratch takes it."""

    def prompts(self, step: int, num_prompts: int) -> list[Prompt]:
        """The prompts of one step: a pure function of the arguments, so every rank computes the same list."""
        ...

    def reward(self, prompt: Prompt, response_ids: Sequence[int]) -> float:
        """Grades one response (without the end-of-text id) from its arguments alone: it may run in another
        process, on a copy of the task that was never asked for prompts. May raise: the sample then has no
        reward.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some ids, for logs."""
        ...


class Grader(Protocol):
    """Grades responses. Only the first rank of each model replica asks it."""

    limits_time: bool
    """Is every response given up after a while? Ranks that wait then take no batch, however long, for a hang.
    """

    def grade(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> list[Graded]:
        """One outcome a response, in order; `prompts` holds each response's own. No collective.

        A reward function that raises, or returns something that is not a finite number, costs its sample.
        Raises `ValueError` when nothing can be graded at all.
        """
        ...


class RunLog(Protocol):
    """Where the loop reports. One object a rank; all but rank 0's do nothing."""

    def step(
        self,
        step: int,
        metrics: Mapping[str, float],
        updates: Sequence[StepResult],
        notes: Sequence[str] = (),
        samples: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Records a finished step: its own metrics, the outcome of each of its optimizer steps, what a person
        should know of it, and some of its responses (`rlcore.samples`).
        """
        ...
