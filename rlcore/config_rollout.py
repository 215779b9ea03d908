"""The sections of the run config that say how responses are drawn and graded: sampling, rollout, task."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlcore.sampling import SamplingSpec


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """The one truncated distribution that the sampler draws from and the trainer scores under."""

    temperature: float = 1.0
    """See `SamplingSpec`."""
    top_k: int | None = None
    """See `SamplingSpec`."""
    top_p: float | None = None
    """See `SamplingSpec`."""
    min_p: float = 0.0
    """See `SamplingSpec`."""
    ties: Literal["share", "all"] = "share"
    """See `SamplingSpec`."""
    repetition_penalty: float = 1.0
    """See `SamplingSpec`."""
    presence_penalty: float = 0.0
    """See `SamplingSpec`."""
    frequency_penalty: float = 0.0
    """See `SamplingSpec`."""

    support: Literal["recompute", "replay", "audit"] = "recompute"
    """Whose kept ids the trainer scores under. `recompute`: those that it finds itself. `replay`: those that
    the sampler kept, token by token. `audit`: its own, and how they differ from the sampler's is reported
    with each update (`audit/...`).
    """

    @property
    def reads_kept_ids(self) -> bool:
        """Must batches hold the ids that the sampler kept?"""
        return self.support != "recompute"

    def spec(self) -> SamplingSpec:
        """The `SamplingSpec` of these fields."""
        values = dataclasses.asdict(self)
        del values["support"]
        return SamplingSpec(**values)


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """vLLM as the rollout engine (`rollout.engine=vllm`)."""

    urls: Sequence[str] = ()
    """Servers (`vllm serve`) that share the prompts, such as `http://node7:8000`; none: an engine of this
    run's own, started by rank 0.
    """
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    """What the sampler's logprobs describe: the truncated distribution, or the model's own (never right to
    train on).
    """
    max_model_len: int | None = None
    """Longest prompt + response, in tokens; None: the model's positions."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of vLLM's engine, by its names; for an engine of this run's own."""
    sampling_args: Mapping[str, Any] = field(default_factory=dict)
    """More of vLLM's `SamplingParams`, by its names. What changes the distribution is refused: the trainer
    would not see it.
    """
    start_timeout_s: float = 600.0
    """An engine or server that has not answered after so many seconds is an error."""
    timeout_s: float = 1800.0
    """A step's responses, or a weight update, that take longer than so many seconds are an error."""
    retries: int = 1
    """How often a step's responses are drawn again when the engine returned something that cannot be trained
    on (a missing sample, NaN). A dead engine is an error at once.
    """
    transfer: Literal["auto", "folder", "nccl", "ipc"] = "auto"
    """How weights reach the engine: a folder in memory, or vLLM's weight transfer between GPUs. `auto`:
    folder where weights are on the host and for several servers; else ipc for an engine of this run's own and
    nccl for one server.
    """
    transfer_folder: str = "/dev/shm"
    """Where `transfer=folder` writes; servers on other machines must see it."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are drawn."""

    engine: Literal["policy", "vllm"] = "policy"
    """`policy`: the embedded sampler, drawing from the Megatron policy itself. `vllm`: vLLM, which is sent
    the policy's weights.
    """
    prompts_per_step: int = 16
    """Prompts per step over the whole run (all data-parallel ranks)."""
    samples_per_prompt: int = 8
    """Responses per prompt: the size of an advantage group."""
    max_new_tokens: int = 32
    """Longest response, in tokens, end-of-text included; less than the model's positions."""
    one_step_off: bool = False
    """Draw the next step's responses while this step trains, from the weights before it: one update old.
    `vllm` only, with an importance correction.
    """
    vllm: VllmConfig = field(default_factory=VllmConfig)
    """Of `engine=vllm`."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Prompts and rewards."""

    name: str = "echo"
    """`echo` (characters), `reasoning_gym/<dataset>`, `jsonl`, `math`, or `package.module:factory` of your
    own.
    """
    size: int = 1000
    """Number of distinct prompts; of a file, the first so many lines."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the task by name."""
    reward_workers: int = 1
    """Processes that grade responses, on the first rank of each model replica; 0: the rank grades itself,
    and a reward function that hangs hangs the run.
    """
    reward_timeout_s: float = 60.0
    """A response whose reward takes longer has none: its sample leaves the step."""
