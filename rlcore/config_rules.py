"""The rules of a run config: one function per rule, named after it. `ConfigError` names key and fix."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlcore.config_parse import MAX_TIMEOUT_S, ConfigError, check_each
from rlcore.config_rules_advantage import ADVANTAGE_RULES
from rlcore.config_rules_experts import check_expert_ranks, check_experts
from rlcore.config_rules_loss import LOSS_RULES
from rlcore.config_rules_rollout import ROLLOUT_RULES

if TYPE_CHECKING:
    from rlcore.config import RunConfig


_MODEL_COUNTS = (
    "vocab_size",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "ffn_hidden_size",
    "num_moe_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "max_position_embeddings",
)


def check_run_config(config: RunConfig) -> None:
    """Every rule that does not need the number of processes."""
    for rule in (*FIRST_RULES, *RULES):
        rule(config)


def data_parallel_size(config: RunConfig, world_size: int) -> int:
    """Data-parallel size of this many processes. Raises `ConfigError` when they do not factor."""
    parallel = config.parallel
    replica = parallel.tp * parallel.pp * parallel.cp
    if world_size % replica:
        raise ConfigError(
            f"nproc={world_size} processes do not factor into model replicas of "
            f"parallel.tp={parallel.tp} x parallel.pp={parallel.pp} x parallel.cp={parallel.cp} = {replica}. "
            f"Set nproc to a multiple of {replica}, or change tp/pp/cp."
        )
    return world_size // replica


def check_world(config: RunConfig, world_size: int) -> None:
    """The rules that need the number of processes."""
    if world_size < 1:
        raise ConfigError(f"nproc={world_size}: expected a count of at least 1.")
    dp_size = data_parallel_size(config, world_size)
    check_expert_ranks(config.parallel.ep, dp_size, config.parallel.cp)
    if config.rollout.prompts_per_step % dp_size:
        raise ConfigError(
            f"rollout.prompts_per_step={config.rollout.prompts_per_step} does not divide over {dp_size} "
            f"data-parallel ranks. Set it to a multiple of {dp_size}."
        )
    minibatch = config.train.minibatch_size or config.sequences_per_step
    if config.train.token_budget is not None:
        check_minibatch_shares(minibatch, dp_size)
        return
    rows = config.train.microbatch_size * dp_size
    if minibatch % rows:
        raise ConfigError(
            f"{minibatch} sequences per optimizer step (train.minibatch_size, or rollout.prompts_per_step x "
            "rollout.samples_per_prompt) are not a multiple of "
            f"train.microbatch_size={config.train.microbatch_size} x {dp_size} data-parallel ranks = "
            f"{rows}. Change train.microbatch_size or the batch."
        )
    check_microbatch_groups(config, minibatch // rows)


def check_minibatch_shares(minibatch: int, dp_size: int) -> None:
    """An optimizer step's sequences divide over data-parallel ranks; a token budget cuts the rest."""
    if minibatch % dp_size:
        raise ConfigError(
            f"{minibatch} sequences per optimizer step (train.minibatch_size, or rollout.prompts_per_step x "
            f"rollout.samples_per_prompt) do not divide over {dp_size} data-parallel ranks. Change the batch."
        )


def check_ranges(config: RunConfig) -> None:
    """Every number lies where its use needs it."""
    model, optimizer = config.model, config.optimizer
    counts = {
        "nproc": config.nproc,
        "parallel.tp": config.parallel.tp,
        "parallel.pp": config.parallel.pp,
        "parallel.vpp": config.parallel.vpp,
        "parallel.cp": config.parallel.cp,
        "parallel.ep": config.parallel.ep,
        "train.token_budget": config.train.token_budget,
        "rollout.prompts_per_step": config.rollout.prompts_per_step,
        "rollout.samples_per_prompt": config.rollout.samples_per_prompt,
        "rollout.max_new_tokens": config.rollout.max_new_tokens,
        "rollout.vllm.max_model_len": config.rollout.vllm.max_model_len,
        "task.size": config.task.size,
        "train.steps": config.train.steps,
        "train.microbatch_size": config.train.microbatch_size,
        "train.epochs": config.train.epochs,
        "model.fused_head_tokens": model.fused_head_tokens,
        **{f"model.{name}": getattr(model, name) for name in _MODEL_COUNTS},
    }
    check_each(counts, lambda value: value >= 1, "a count of at least 1")
    rates = {
        "loss.ratio_clip_min": config.loss.ratio_clip_min,
        "loss.ratio_clip_max": config.loss.ratio_clip_max,
        "loss.kl_coef": config.loss.kl_coef,
        "loss.entropy_coef": config.loss.entropy_coef,
        "loss.positive_nll_coef": config.loss.positive_nll_coef,
        "train.max_refused_updates": config.train.max_refused_updates,
        "optimizer.lr": optimizer.lr,
        "optimizer.min_lr": optimizer.min_lr,
        "optimizer.warmup_steps": optimizer.warmup_steps,
        "optimizer.weight_decay": optimizer.weight_decay,
        "optimizer.clip_grad": optimizer.clip_grad,
        "train.save_every": config.train.save_every,
        "train.log_samples": config.train.log_samples,
        "task.reward_workers": config.task.reward_workers,
    }
    check_each(rates, lambda value: 0 <= value < math.inf, "a finite number >= 0")
    positive = {
        "optimizer.adam_eps": optimizer.adam_eps,
        "model.rope_theta": model.rope_theta,
        "model.rms_norm_eps": model.rms_norm_eps,
    }
    check_each(positive, lambda value: 0 < value < math.inf, "a finite number > 0")
    betas = {"optimizer.adam_beta1": optimizer.adam_beta1, "optimizer.adam_beta2": optimizer.adam_beta2}
    check_each(betas, lambda value: 0 <= value < 1, "a number in [0, 1)")
    timeout = {
        "parallel.timeout_s": config.parallel.timeout_s,
        "task.reward_timeout_s": config.task.reward_timeout_s,
    }
    # Transports count milliseconds.
    check_each(timeout, lambda value: 0.001 <= value <= MAX_TIMEOUT_S, "seconds from 0.001 to 1e9")
    check_each({"seed": config.seed}, lambda value: 0 <= value < 2**32, "an integer in [0, 2^32)")
    check_clip_and_lr(config)


def check_clip_and_lr(config: RunConfig) -> None:
    """The lower clip bound stays above 0, and the schedule does not rise."""
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
    """The sampling values are ones a sampler accepts, and kept ids are of something that cuts."""
    try:
        spec = config.sampling.spec()
    except ValueError as error:
        raise ConfigError(f"sampling.{error}") from error
    support = config.sampling.support
    if support != "recompute" and not spec.truncates:
        raise ConfigError(
            f"sampling.support={support} reads the ids that a truncation kept, and sampling names none. Set "
            "sampling.top_k, or sampling.support=recompute."
        )


def check_fused_head(config: RunConfig) -> None:
    """The fused head scores every distribution but those that change whole logits."""
    spec = config.sampling.spec()
    if spec.penalises and config.model.fused_head:
        raise ConfigError(
            f"model.fused_head=true cannot apply sampling.{spec.penalty_fields}: penalties change whole "
            "logits. Set model.fused_head=false, or switch the penalty off."
        )


_ARCHITECTURE_FIELDS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "max_position_embeddings",
)


# Fields that do not describe the architecture: they may be set beside a folder.
_BESIDE_ARCHITECTURE = ("hf_path", "dtype", "fused_head", "fused_head_tokens")


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


def check_positions(config: RunConfig) -> None:
    """A response and at least one prompt token fit a from-scratch model; folders are checked on reading."""
    positions, longest = config.model.max_position_embeddings, config.rollout.max_new_tokens
    if positions is not None and longest >= positions:
        raise ConfigError(
            f"rollout.max_new_tokens={longest} leaves no room for a prompt in "
            f"model.max_position_embeddings={positions}. Lower the one or raise the other."
        )


def check_model_folder(config: RunConfig) -> None:
    """`model.hf_path` is a folder with a config.json. Reads the disk, so loading leaves it out."""
    path = config.model.hf_path
    if path is not None and not os.path.isfile(os.path.join(path, "config.json")):
        raise ConfigError(f"model.hf_path={path}: expected a folder with a config.json.")


def check_heads_divide(config: RunConfig) -> None:
    """TP divides query and key/value heads of a from-scratch model; folders are checked on reading."""
    model = config.model
    if model.hf_path is not None or model.num_attention_heads is None:
        return
    groups = model.num_attention_heads if model.num_query_groups is None else model.num_query_groups
    check_tp_divides(config.parallel.tp, model.num_attention_heads, groups, source="model")
    if model.num_attention_heads % groups:
        raise ConfigError(
            f"model.num_attention_heads={model.num_attention_heads} is not a multiple of "
            f"model.num_query_groups={groups}. Change one of them."
        )
    check_head_width(config)


def check_head_width(config: RunConfig) -> None:
    """The width splits into heads of an even width: rotary embeddings turn pairs."""
    hidden_size, heads = config.model.hidden_size, config.model.num_attention_heads
    if hidden_size is not None and heads is not None and hidden_size % (2 * heads):
        raise ConfigError(
            f"model.hidden_size={hidden_size} is not an even multiple of model.num_attention_heads={heads}. "
            f"Set model.hidden_size to a multiple of {2 * heads}."
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


def check_pipeline(config: RunConfig) -> None:
    """`check_virtual_stages` of the config."""
    check_virtual_stages(config.parallel.pp, config.parallel.vpp)


def check_virtual_stages(pp: int, vpp: int) -> None:
    """Virtual stages are pieces of a pipeline rank, so there is a pipeline."""
    if vpp > 1 and pp == 1:
        raise ConfigError(
            f"parallel.vpp={vpp} virtual stages a pipeline rank need parallel.pp > 1. Set "
            "parallel.vpp=1 or raise pp."
        )


def check_microbatch_groups(config: RunConfig, num_microbatches: int) -> None:
    """With virtual stages the microbatches of a padded step come in groups of pp. Packing, which decides the
    number itself, adds what is missing.
    """
    parallel = config.parallel
    if config.train.token_budget is None and num_microbatches % parallel.microbatch_multiple:
        raise ConfigError(
            f"{num_microbatches} microbatches per optimizer step on each data-parallel rank are not a "
            f"multiple of parallel.pp={parallel.pp}, as parallel.vpp={parallel.vpp} virtual stages need. "
            "Change train.microbatch_size or the batch, or set parallel.vpp=1."
        )


def check_layers_divide(config: RunConfig) -> None:
    """Every stage holds the same number of layers."""
    if config.model.num_layers is not None:
        check_stages_divide(config.parallel.pp, config.parallel.vpp, config.model.num_layers)


def check_stages_divide(pp: int, vpp: int, num_layers: int) -> None:
    """The layers divide over the (virtual) stages, or `ConfigError`."""
    if num_layers % (pp * vpp):
        stages = f"parallel.pp={pp}" if vpp == 1 else f"parallel.pp={pp} x parallel.vpp={vpp} = {pp * vpp}"
        raise ConfigError(f"model.num_layers={num_layers} is not a multiple of {stages}. Change one of them.")


def check_context_parallel(config: RunConfig) -> None:
    """Sequences are cut over CP ranks in packed rows only."""
    if config.parallel.cp > 1 and config.train.token_budget is None:
        raise ConfigError(
            f"parallel.cp={config.parallel.cp} cuts packed rows: set train.token_budget, the tokens of a "
            "microbatch over all context-parallel ranks, at least the longest sequence."
        )


def check_token_budget(config: RunConfig) -> None:
    """A packed row holds the longest response and a prompt token: otherwise a run ends at the first response
    that long, however late. Prompts are checked when they are there.
    """
    budget, longest = config.train.token_budget, config.rollout.max_new_tokens + 1
    if budget is not None and budget < longest:
        raise ConfigError(
            f"train.token_budget={budget} does not hold a sequence of rollout.max_new_tokens="
            f"{config.rollout.max_new_tokens} and its prompt. Raise train.token_budget to at least the "
            f"longest sequence, {longest} or more, or lower rollout.max_new_tokens."
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


FIRST_RULES: tuple[Callable[[RunConfig], None], ...] = (check_ranges, check_sampling)
"""What the other rules take for granted: they need not bear a config that one of these refuses."""

RULES: tuple[Callable[[RunConfig], None], ...] = (
    check_fused_head,
    check_model_source,
    check_positions,
    check_heads_divide,
    check_sequence_parallel,
    check_experts,
    check_pipeline,
    check_layers_divide,
    check_context_parallel,
    check_token_budget,
    *ADVANTAGE_RULES,
    *LOSS_RULES,
    *ROLLOUT_RULES,
    check_minibatch,
)
