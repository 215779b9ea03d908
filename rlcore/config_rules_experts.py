"""The rules of models with experts: one function per rule, named after it; messages name key and fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcore.config_parse import ConfigError

if TYPE_CHECKING:
    from rlcore.config import ModelConfig, RunConfig


def check_experts(config: RunConfig) -> None:
    """Every rule of experts that does not need the number of processes; folders are checked on reading."""
    model, parallel = config.model, config.parallel
    check_expert_fields(model)
    if model.hf_path is not None:
        return
    if model.num_moe_experts is not None:
        assert model.moe_router_topk is not None
        check_router_topk(model.moe_router_topk, model.num_moe_experts, source="model")
        check_no_qkv_bias(model)
        check_expert_sequence_parallel(parallel.tp, parallel.sequence_parallel)
    check_expert_shares(parallel.ep, model.num_moe_experts, source="model")


def check_expert_fields(model: ModelConfig) -> None:
    """The number of experts and of those that a token takes come together."""
    if model.num_moe_experts is None:
        for name in ("moe_router_topk", "moe_ffn_hidden_size"):
            if getattr(model, name) is not None:
                raise ConfigError(
                    f"model.{name}={getattr(model, name)} describes experts, and the model has none. Set "
                    f"model.num_moe_experts, or leave model.{name} out."
                )
    elif model.moe_router_topk is None:
        raise ConfigError(
            f"model.num_moe_experts={model.num_moe_experts}, but not how many of them each token takes. Set "
            "model.moe_router_topk."
        )


def check_router_topk(topk: int, num_experts: int, source: str) -> None:
    """A token takes at least two experts, whose weights add up to 1, and no more than there are."""
    if topk < 2:
        raise ConfigError(
            f"{source}.moe_router_topk={topk}: the weights of a token's experts are a softmax over those "
            "chosen, so with one of them it is 1 whatever the router says, and the router never learns. Set "
            "it to at least 2."
        )
    if topk > num_experts:
        raise ConfigError(
            f"{source}.moe_router_topk={topk} is more than {source}.num_moe_experts={num_experts}. Lower the "
            "one or raise the other."
        )


def check_no_qkv_bias(model: ModelConfig) -> None:
    """Mixtral, the family with experts that is read and written, has no bias on its QKV projection."""
    if model.qkv_bias:
        raise ConfigError(
            "model.qkv_bias=true with model.num_moe_experts: no Hugging Face model that this project writes "
            "has both. Set model.qkv_bias=false."
        )


def check_expert_sequence_parallel(tp: int, sequence_parallel: bool) -> None:
    """Experts under TP need sequence parallelism: otherwise every TP rank would send the same tokens, and
    Megatron refuses to train so.
    """
    if tp > 1 and not sequence_parallel:
        raise ConfigError(
            f"parallel.tp={tp} with experts needs parallel.sequence_parallel=true: each TP rank sends its "
            "own tokens to the experts. Set it to true, or parallel.tp=1."
        )


def check_expert_shares(ep: int, num_experts: int | None, source: str) -> None:
    """EP cuts experts into equal shares, so it needs some, and a divisor of their number."""
    if ep == 1:
        return
    if num_experts is None:
        raise ConfigError(
            f"parallel.ep={ep} cuts experts, and the model has none. Set parallel.ep=1, or "
            "model.num_moe_experts for a model trained from scratch."
        )
    if num_experts % ep:
        divisors = [d for d in range(1, num_experts + 1) if num_experts % d == 0]
        raise ConfigError(
            f"parallel.ep={ep} does not divide {source}.num_moe_experts={num_experts}. Set parallel.ep to "
            f"one of {divisors}."
        )


def check_expert_ranks(ep: int, dp_size: int, cp_size: int) -> None:
    """EP ranks are ranks of data x context parallel. (TP cuts experts too, so Megatron's own rule, world size
    a multiple of TP x EP x PP, says the same.)
    """
    if (dp_size * cp_size) % ep:
        raise ConfigError(
            f"parallel.ep={ep} does not divide {dp_size} data-parallel x {cp_size} context-parallel ranks = "
            f"{dp_size * cp_size}. Set nproc so that parallel.ep divides them, or lower parallel.ep."
        )
