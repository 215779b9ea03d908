"""The rules of a run config: one function per rule, named after it. `ConfigError` names key and fix."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from rlcore.config_parse import ConfigError

if TYPE_CHECKING:
    from rlcore.config import RunConfig


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
            f"nproc={world_size} processes do not factor into model replicas of "
            f"parallel.tp={config.parallel.tp} x parallel.pp={config.parallel.pp} = {replica}. Set nproc to "
            f"a multiple of {replica}, or change tp/pp."
        )
    return world_size // replica


def check_world(config: RunConfig, world_size: int) -> None:
    """The rules that need the number of processes."""
    dp_size = data_parallel_size(config, world_size)
    if config.rollout.prompts_per_step % dp_size:
        raise ConfigError(
            f"rollout.prompts_per_step={config.rollout.prompts_per_step} does not divide over {dp_size} "
            f"data-parallel ranks. Set it to a multiple of {dp_size}."
        )
    minibatch = config.train.minibatch_size or config.sequences_per_step
    rows = config.train.microbatch_size * dp_size
    if minibatch % rows:
        raise ConfigError(
            f"{minibatch} sequences per optimizer step (train.minibatch_size, or rollout.prompts_per_step x "
            "rollout.samples_per_prompt) are not a multiple of "
            f"train.microbatch_size={config.train.microbatch_size} x {dp_size} data-parallel ranks = "
            f"{rows}. Change train.microbatch_size or the batch."
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
            f"loss.ratio_clip_min={config.loss.ratio_clip_min}: it is an epsilon (the bound is 1 - "
            "epsilon), so it must be below 1. For a lower bound of 0.8 set 0.2."
        )
    if config.optimizer.min_lr > config.optimizer.lr:
        raise ConfigError(
            f"optimizer.min_lr={config.optimizer.min_lr} is above optimizer.lr={config.optimizer.lr}. Lower "
            "min_lr."
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


# Fields that do not describe the architecture: they may be set beside a folder.
_BESIDE_ARCHITECTURE = ("hf_path", "dtype", "fused_head")


def check_model_source(config: RunConfig) -> None:
    """Either a Hugging Face folder or a full architecture, not both and not neither."""
    model = config.model
    if model.hf_path is not None:
        names = [f.name for f in dataclasses.fields(model) if f.name not in _BESIDE_ARCHITECTURE]
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
    """TP divides query and key/value heads of a from-scratch model; folders are checked on reading."""
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
        raise ConfigError(
            "parallel.sequence_parallel=true needs parallel.tp > 1. Set it to false or raise tp."
        )


def check_layers_divide(config: RunConfig) -> None:
    """Every stage holds the same number of layers."""
    layers = config.model.num_layers
    if layers is not None and layers % config.parallel.pp:
        raise ConfigError(
            f"model.num_layers={layers} is not a multiple of parallel.pp={config.parallel.pp}. Change one "
            "of them."
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
            f"train.minibatch_size={minibatch} does not divide the {config.sequences_per_step} sequences of "
            "a step (rollout.prompts_per_step x rollout.samples_per_prompt)."
        )
