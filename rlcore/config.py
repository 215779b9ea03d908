"""The typed run config: the only place that knows defaults, and one function per rule that spans fields.

`load_run_config` turns a plain nested mapping (hydra's output) into a frozen `RunConfig`. Unknown keys, wrong types and
contradictions raise `ConfigError` (a `ValueError`) that names the key as typed on the command line and the fix.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlcore.sampling import SamplingSpec


class ConfigError(ValueError):
    """A run config that cannot be run as it stands."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy: a Hugging Face folder, or an architecture trained from scratch (Llama/Qwen2 family)."""

    hf_path: str | None = None
    """Folder with config.json and safetensors. When set, the architecture fields below must stay unset."""
    vocab_size: int | None = None
    """Real vocabulary size. From scratch: None takes the task's."""
    num_layers: int | None = None
    """Transformer layers of the whole model."""
    hidden_size: int | None = None
    """Width D."""
    num_attention_heads: int | None = None
    """Query heads."""
    num_query_groups: int | None = None
    """Key/value heads; None: as many as query heads."""
    ffn_hidden_size: int | None = None
    """Width of the SwiGLU layer."""
    max_position_embeddings: int | None = None
    """Longest sequence, in tokens."""
    tie_word_embeddings: bool | None = None
    """Does the output head share the input embedding's weight?"""
    qkv_bias: bool | None = None
    """Bias on the QKV projection (Qwen2) or not (Llama)."""
    rope_theta: float | None = None
    """Base of the rotary embedding."""
    rms_norm_eps: float | None = None
    """Added to the mean square inside RMSNorm."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameter and activation dtype. The op and the loss are float32 whatever this says."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How one model replica is cut. Data parallel size is what the number of processes leaves over."""

    tp: int = 1
    """Tensor parallel size."""
    pp: int = 1
    """Pipeline parallel size."""
    sequence_parallel: bool = False
    """Shard activations outside attention and MLP over TP ranks (needs tp > 1)."""
    distributed_optimizer: bool = False
    """Shard optimizer state over data-parallel ranks."""
    backend: Literal["auto", "cpu", "cuda"] = "auto"
    """`cpu` runs Megatron-core on gloo; `auto` takes CUDA where there is a device."""
    timeout_s: float = 600.0
    """A collective that waits longer than this many seconds is an error on the waiting rank."""


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

    def spec(self) -> SamplingSpec:
        """The `SamplingSpec` of these fields."""
        return SamplingSpec(**dataclasses.asdict(self))


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are drawn."""

    engine: Literal["policy"] = "policy"
    """`policy`: the embedded sampler, drawing from the Megatron policy itself."""
    prompts_per_step: int = 16
    """Prompts per step over the whole run (all data-parallel ranks)."""
    samples_per_prompt: int = 8
    """Responses per prompt: the size of an advantage group."""
    max_new_tokens: int = 32
    """Longest response, in tokens, end-of-text included."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Prompts and rewards."""

    name: str = "echo"
    """`echo` (characters), `reasoning_gym/<dataset>`, or `package.module:factory` of your own."""
    size: int = 1000
    """Number of distinct prompts."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the task by name."""


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """From rewards to advantages."""

    estimator: Literal["grpo"] = "grpo"
    """`grpo`: reward minus the group mean, over the group's sample standard deviation."""
    normalize_std: bool = True
    """Divide by the group's standard deviation (Bessel)."""


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The clipped policy-gradient loss."""

    ratio_clip_min: float = 0.2
    """Epsilon below: the ratio is clipped at 1 - ratio_clip_min."""
    ratio_clip_max: float = 0.2
    """Epsilon above: the ratio is clipped at 1 + ratio_clip_max."""
    actor_denominator: Literal["retained", "valid"] = "retained"
    """`retained`: token & sample & keep_old. `valid`: token & sample."""
    kl_coef: float = 0.0
    """Weight of the reference KL term (k3, on unfiltered logprobs). 0 loads no reference policy."""
    kl_type: Literal["k3"] = "k3"
    """KL estimator."""
    entropy_metric: bool = False
    """Also report the exact entropy, filtered and unfiltered."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Megatron's Adam."""

    lr: float = 1e-6
    """Peak learning rate."""
    min_lr: float = 0.0
    """Final learning rate of the schedule."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0."""
    decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the schedule after warm-up."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    adam_beta1: float = 0.9
    """First-moment decay."""
    adam_beta2: float = 0.95
    """Second-moment decay."""
    adam_eps: float = 1e-8
    """Adam's epsilon."""
    clip_grad: float = 1.0
    """Global gradient-norm clip; 0 is off."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Steps and batches."""

    steps: int = 100
    """Rollout + update steps."""
    microbatch_size: int = 8
    """Sequences per forward on one rank."""
    minibatch_size: int | None = None
    """Sequences per optimizer step over the whole run; None: all of a step's."""
    epochs: int = 1
    """Passes over one step's rollouts."""
    save_every: int = 0
    """Write the policy as a Hugging Face folder every this many steps; 0: only after the last one."""
    save_final: bool = False
    """Write the policy as a Hugging Face folder after the last step."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run."""

    seed: int = 0
    """Seeds weights, prompts and sampling."""
    run_dir: str = "runs/default"
    """Config, metrics, pictures and weights go here."""
    nproc: int = 1
    """Processes that `rlcore train` starts when it is not already under torchrun."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Layout."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """The distribution."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Responses."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """Prompts and rewards."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """Advantages."""
    loss: LossConfig = field(default_factory=LossConfig)
    """The objective."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The update."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """The loop."""

    @property
    def sequences_per_step(self) -> int:
        """Responses drawn per step over the whole run."""
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt


def load_run_config(values: Mapping[str, Any]) -> RunConfig:
    """A checked `RunConfig` from a plain nested mapping. Raises `ConfigError` naming the key."""
    config = _build(RunConfig, values, path="")
    check_run_config(config)
    return config


def to_plain(config: RunConfig) -> dict[str, Any]:
    """The config as plain nested dicts, every default filled in (what the run folder keeps)."""
    return dataclasses.asdict(config)


def check_run_config(config: RunConfig) -> None:
    """Every rule that does not need the number of processes."""
    check_ranges(config)
    check_sampling(config)
    check_model_source(config)
    check_heads_divide(config)
    check_sequence_parallel(config)
    check_layers_divide(config)
    check_group_size(config)
    check_minibatch(config)


def data_parallel_size(config: RunConfig, world_size: int) -> int:
    """Data-parallel size of this many processes. Raises `ConfigError` when they do not factor."""
    replica = config.parallel.tp * config.parallel.pp
    if world_size % replica:
        raise ConfigError(
            f"nproc={world_size} processes do not factor into model replicas of parallel.tp={config.parallel.tp} x "
            f"parallel.pp={config.parallel.pp} = {replica}. Set nproc to a multiple of {replica}, or change tp/pp."
        )
    return world_size // replica


def check_world(config: RunConfig, world_size: int) -> None:
    """The rules that need the number of processes."""
    dp_size = data_parallel_size(config, world_size)
    if config.rollout.prompts_per_step % dp_size:
        raise ConfigError(
            f"rollout.prompts_per_step={config.rollout.prompts_per_step} does not divide over {dp_size} data-parallel "
            f"ranks. Set it to a multiple of {dp_size}."
        )
    minibatch = config.train.minibatch_size or config.sequences_per_step
    rows = config.train.microbatch_size * dp_size
    if minibatch % rows:
        raise ConfigError(
            f"{minibatch} sequences per optimizer step (train.minibatch_size, or rollout.prompts_per_step x "
            f"rollout.samples_per_prompt) are not a multiple of train.microbatch_size={config.train.microbatch_size} x "
            f"{dp_size} data-parallel ranks = {rows}. Change train.microbatch_size or the batch."
        )


def check_ranges(config: RunConfig) -> None:
    """Counts are at least 1, rates are finite and not negative."""
    counts = {
        "nproc": config.nproc,
        "parallel.tp": config.parallel.tp,
        "parallel.pp": config.parallel.pp,
        "rollout.prompts_per_step": config.rollout.prompts_per_step,
        "rollout.samples_per_prompt": config.rollout.samples_per_prompt,
        "rollout.max_new_tokens": config.rollout.max_new_tokens,
        "task.size": config.task.size,
        "train.steps": config.train.steps,
        "train.microbatch_size": config.train.microbatch_size,
        "train.epochs": config.train.epochs,
    }
    for key, value in counts.items():
        if value < 1:
            raise ConfigError(f"{key}={value}: expected a count of at least 1.")
    rates = {
        "parallel.timeout_s": config.parallel.timeout_s,
        "loss.ratio_clip_min": config.loss.ratio_clip_min,
        "loss.ratio_clip_max": config.loss.ratio_clip_max,
        "loss.kl_coef": config.loss.kl_coef,
        "optimizer.lr": config.optimizer.lr,
        "optimizer.min_lr": config.optimizer.min_lr,
        "optimizer.warmup_steps": config.optimizer.warmup_steps,
        "optimizer.weight_decay": config.optimizer.weight_decay,
        "optimizer.clip_grad": config.optimizer.clip_grad,
        "train.save_every": config.train.save_every,
    }
    for key, value in rates.items():
        if not math.isfinite(value) or value < 0:
            raise ConfigError(f"{key}={value}: expected a finite number >= 0.")
    if config.loss.ratio_clip_min >= 1:
        raise ConfigError(
            f"loss.ratio_clip_min={config.loss.ratio_clip_min}: it is an epsilon (the bound is 1 - epsilon), so it must "
            "be below 1. For a lower bound of 0.8 set 0.2."
        )
    if config.optimizer.min_lr > config.optimizer.lr:
        raise ConfigError(
            f"optimizer.min_lr={config.optimizer.min_lr} is above optimizer.lr={config.optimizer.lr}. Lower min_lr."
        )


def check_sampling(config: RunConfig) -> None:
    """The sampling values are ones a sampler accepts."""
    try:
        config.sampling.spec()
    except ValueError as error:
        raise ConfigError(f"sampling.{error}") from error


_ARCHITECTURE_FIELDS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "max_position_embeddings",
)


def check_model_source(config: RunConfig) -> None:
    """Either a Hugging Face folder or a full architecture, not both and not neither."""
    model = config.model
    if model.hf_path is not None:
        names = [f.name for f in dataclasses.fields(model) if f.name not in ("hf_path", "dtype")]
        extra = [name for name in names if getattr(model, name) is not None]
        if extra:
            raise ConfigError(
                f"model.{extra[0]} is set, but model.hf_path={model.hf_path} already fixes the architecture. "
                f"Remove model.{extra[0]}, or set model.hf_path=null to train from scratch."
            )
        return
    missing = [name for name in _ARCHITECTURE_FIELDS if getattr(model, name) is None]
    if missing:
        raise ConfigError(f"model.{missing[0]} is not set and there is no model.hf_path. Set one of the two.")
    for name in _ARCHITECTURE_FIELDS:
        if getattr(model, name) < 1:
            raise ConfigError(f"model.{name}={getattr(model, name)}: expected at least 1.")


def check_heads_divide(config: RunConfig) -> None:
    """TP divides the attention heads and the key/value heads (from-scratch models; folders are checked on reading)."""
    model = config.model
    if model.hf_path is not None or model.num_attention_heads is None:
        return
    groups = model.num_query_groups or model.num_attention_heads
    check_tp_divides(config.parallel.tp, model.num_attention_heads, groups, source="model")
    if model.num_attention_heads % groups:
        raise ConfigError(
            f"model.num_attention_heads={model.num_attention_heads} is not a multiple of "
            f"model.num_query_groups={groups}."
        )


def check_tp_divides(tp: int, num_heads: int, num_groups: int, source: str) -> None:
    """TP divides both head counts, or `ConfigError`."""
    for name, count in (("num_attention_heads", num_heads), ("num_query_groups", num_groups)):
        if count % tp:
            divisors = [d for d in range(1, count + 1) if num_heads % d == 0 and num_groups % d == 0]
            raise ConfigError(
                f"parallel.tp={tp} does not divide {source}.{name}={count}. "
                f"Set parallel.tp to one of {divisors}."
            )


def check_sequence_parallel(config: RunConfig) -> None:
    """Sequence parallelism shards over TP ranks, so it needs some."""
    if config.parallel.sequence_parallel and config.parallel.tp == 1:
        raise ConfigError("parallel.sequence_parallel=true needs parallel.tp > 1. Set it to false or raise tp.")


def check_layers_divide(config: RunConfig) -> None:
    """Every stage holds the same number of layers."""
    layers = config.model.num_layers
    if layers is not None and layers % config.parallel.pp:
        raise ConfigError(
            f"model.num_layers={layers} is not a multiple of parallel.pp={config.parallel.pp}. Change one of them."
        )


def check_group_size(config: RunConfig) -> None:
    """A group of one has advantage 0: nothing would ever be learned."""
    if config.rollout.samples_per_prompt < 2:
        raise ConfigError(
            "rollout.samples_per_prompt=1 makes every GRPO advantage 0 (a group of one has no baseline). "
            "Set rollout.samples_per_prompt to at least 2."
        )


def check_minibatch(config: RunConfig) -> None:
    """Optimizer steps divide the rollouts of a step."""
    minibatch = config.train.minibatch_size
    if minibatch is None:
        return
    if minibatch < 1 or config.sequences_per_step % minibatch:
        raise ConfigError(
            f"train.minibatch_size={minibatch} does not divide the {config.sequences_per_step} sequences of a step "
            "(rollout.prompts_per_step x rollout.samples_per_prompt)."
        )


def _build(cls: type, values: Any, path: str) -> Any:
    """A frozen dataclass from a mapping, recursively, refusing what the dataclass does not have."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path or 'config'}={values!r}: expected a section with keys.")
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    for key in values:
        if key not in known:
            raise ConfigError(_unknown_key_message(f"{path}.{key}".lstrip("."), str(key), sorted(known)))
    built = {}
    for key, value in values.items():
        key_path = f"{path}.{key}".lstrip(".")
        hint = hints[key]
        built[key] = _build(hint, value, key_path) if dataclasses.is_dataclass(hint) else _coerce(hint, value, key_path)
    return cls(**built)


def _unknown_key_message(key_path: str, key: str, known: list[str]) -> str:
    message = f"{key_path}: no such key."
    close = difflib.get_close_matches(key, known, n=1)
    if close:
        message += f" Did you mean {'.'.join([*key_path.split('.')[:-1], close[0]])}?"
    homes = [path for path in all_key_paths() if path.split(".")[-1] == key]
    if homes:
        message += f" That key lives at {' or '.join(homes)}."
    return message + f" Known here: {', '.join(known)}."


def all_key_paths(cls: type = RunConfig, path: str = "") -> list[str]:
    """Every key of the config as a dotted path."""
    paths = []
    for name, hint in typing.get_type_hints(cls).items():
        here = f"{path}.{name}".lstrip(".")
        paths += all_key_paths(hint, here) if dataclasses.is_dataclass(hint) else [here]
    return paths


def _coerce(hint: Any, value: Any, path: str) -> Any:
    """`value` as the annotated type; ints stand for floats, nothing else is converted."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value in choices:
            return value
        raise ConfigError(f"{path}={value!r}: expected one of {', '.join(map(repr, choices))}.")
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in choices:
            return None
        return _coerce(next(c for c in choices if c is not type(None)), value, path)
    if origin is not None and issubclass(origin, Mapping):
        if isinstance(value, Mapping):
            return dict(value)
        raise ConfigError(f"{path}={value!r}: expected a mapping.")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool):
        return value
    raise ConfigError(f"{path}={value!r}: expected {hint.__name__}.")
