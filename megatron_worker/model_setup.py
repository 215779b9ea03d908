"""Builds a rank's stages of the policy: Megatron-core's `GPTModel` for an `Architecture` and a layout."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_worker.architecture import Architecture
from megatron_worker.attention import CausalAttention
from megatron_worker.chunks import num_stages, stage_of
from megatron_worker.cpu_backend import cpu_backend_is_active
from megatron_worker.parameter_layouts import ParameterLayout, local_layer_name, stage_layouts
from rlcore.config import ParallelConfig
from rlcore.config_rules import check_stages_divide, check_tp_divides, check_virtual_stages
from rlcore.config_rules_experts import check_expert_sequence_parallel, check_expert_shares
from rlcore.groups import ParallelGroups

DtypeName = Literal["float32", "bfloat16"]


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm built the way Megatron builds a norm.

    Under sequence parallelism each TP rank normalises its share of the tokens, so the weight's gradient is a
    partial sum; the `sequence_parallel` mark makes Megatron add the shares up. Megatron's own wrapper refuses
    that layout.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, device=device, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]


def torch_dtype(dtype: DtypeName) -> torch.dtype:
    """The torch dtype of a config's dtype name."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]


def uses_transformer_engine() -> bool:
    """Are layers built from Transformer Engine modules? Only where it is installed and the model is on a
    GPU.
    """
    on_gpu = torch.cuda.is_available() and not cpu_backend_is_active()
    return on_gpu and importlib.util.find_spec("transformer_engine") is not None


def transformer_config(
    arch: Architecture,
    parallel: ParallelConfig,
    dtype: DtypeName,
    per_token_loss: bool = False,
    variable_lengths: bool = False,
) -> TransformerConfig:
    """Megatron's config of this architecture and layout. `ValueError` when the layout does not divide the
    model.
    """
    check_layout(arch, parallel)
    on_cpu = cpu_backend_is_active()
    return TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.ffn_hidden_size,
        num_attention_heads=arch.num_attention_heads,
        num_query_groups=arch.num_query_groups,
        kv_channels=arch.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=arch.rms_norm_eps,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        # Of two ranks each sends to the other both ways: only transfers of their own keep them apart.
        overlap_p2p_comm=parallel.vpp > 1,
        batch_p2p_comm=parallel.vpp == 1,
        context_parallel_size=parallel.cp,
        sequence_parallel=parallel.sequence_parallel,
        params_dtype=torch_dtype(dtype),
        pipeline_dtype=torch_dtype(dtype),
        variable_seq_lengths=variable_lengths,
        bf16=dtype == "bfloat16",
        use_cpu_initialization=on_cpu,
        # Weights are always loaded or drawn by name afterwards, so that they do not depend on the layout.
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=uses_transformer_engine(),
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=per_token_loss,
        persist_layer_norm=False,
        **expert_settings(arch, parallel),
    )


def expert_settings(arch: Architecture, parallel: ParallelConfig) -> dict[str, Any]:
    """What Megatron's config says of experts.

    No token is dropped, and there is no balancing loss: its gradient would come on top of the policy's,
    through Megatron's own scale and not the step's denominators, count prompts, padding and masked samples
    like any token, and depend on which ranks and microbatches the tokens lie in. The objective is the one
    that the loss section names, and no other.
    """
    # Read for experts alone, but variable lengths are refused with the default one.
    settings: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall"}
    if arch.num_moe_experts is None:
        return settings
    check_router_runs()
    return settings | {
        "num_moe_experts": arch.num_moe_experts,
        "moe_router_topk": arch.moe_router_topk,
        "moe_ffn_hidden_size": arch.ffn_hidden_size,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.tp,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # A softmax over the logits of the chosen experts: Mixtral's softmax over all, made to sum to 1 again.
        "moe_router_pre_softmax": False,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": False,
    }


def check_router_runs() -> None:
    """Megatron-core 0.16's router names Transformer Engine's GEMM even where that is not installed;
    `cpu_backend` puts the name there.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        raise ValueError(
            "a model with experts on a GPU needs Transformer Engine, which Megatron-core's router calls. "
            "Install it, or set parallel.backend=cpu."
        )


def check_layout(arch: Architecture, parallel: ParallelConfig) -> None:
    """TP divides the heads and the SwiGLU width, the stages the layers, EP the experts; `ValueError`
    otherwise.
    """
    check_tp_divides(parallel.tp, arch.num_attention_heads, arch.num_query_groups, source="model")
    if arch.ffn_hidden_size % parallel.tp:
        raise ValueError(
            f"parallel.tp={parallel.tp} does not divide model.ffn_hidden_size={arch.ffn_hidden_size}. "
            "Change parallel.tp."
        )
    check_virtual_stages(parallel.pp, parallel.vpp)
    check_stages_divide(parallel.pp, parallel.vpp, arch.num_layers)
    if parallel.sequence_parallel and parallel.tp == 1:
        raise ValueError(
            "parallel.sequence_parallel=true needs parallel.tp > 1. Set it to false or raise tp."
        )
    check_expert_shares(parallel.ep, arch.num_moe_experts, source="model")
    if arch.num_moe_experts is not None:
        check_expert_sequence_parallel(parallel.tp, parallel.sequence_parallel)


def build_chunks(
    arch: Architecture,
    parallel: ParallelConfig,
    dtype: DtypeName,
    groups: ParallelGroups,
    per_token_loss: bool = False,
    variable_lengths: bool = False,
) -> list[GPTModel]:
    """This rank's `parallel.vpp` chunks as bare modules with undefined weights: load or draw them next.

    The vocabulary is padded to a multiple of TP; logits `[S, L, v]` stay sharded over TP. Collective over the
    replica. `per_token_loss`: Megatron divides gradients by the token counts that the loss returns.
    `variable_lengths`: microbatches differ in T, so pipeline stages tell each other the shape first.
    """
    # One config for all of them: Megatron's schedules read that of the first chunk.
    config = transformer_config(arch, parallel, dtype, per_token_loss, variable_lengths)
    return [_build_chunk(arch, parallel, config, groups, index) for index in range(parallel.vpp)]


def _build_chunk(
    arch: Architecture,
    parallel: ParallelConfig,
    config: TransformerConfig,
    groups: ParallelGroups,
    index: int,
) -> GPTModel:
    stage, last = stage_of(index, groups), num_stages(parallel.vpp, groups) - 1
    model = GPTModel(
        config=config,
        transformer_layer_spec=_layer_specs(arch, parallel),
        vocab_size=arch.padded_vocab_size(parallel.tp),
        max_sequence_length=arch.max_position_embeddings,
        pre_process=stage == 0,
        post_process=stage == last,
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=arch.rope_theta,  # pyright: ignore[reportArgumentType]
        vp_stage=index if parallel.vpp > 1 else None,
    )
    _mark_tensor_parallel(model, stage_layouts(arch, last + 1, stage, groups.ep_size, groups.ep_rank))
    return model if cpu_backend_is_active() else model.cuda()


def _mark_tensor_parallel(model: GPTModel, layouts: Mapping[str, ParameterLayout]) -> None:
    """Marks the parameters that TP cuts, as Megatron's initialisation, which we skip, would.

    Without the mark Megatron takes a shard for a copy and leaves the other ranks' shards out of the gradient
    norm.
    """
    for name, parameter in model.named_parameters():
        axis = layouts[local_layer_name(name)].partition_axis
        if axis is not None and not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=axis, stride=1)


def _layer_specs(arch: Architecture, parallel: ParallelConfig) -> Any:
    """Transformer Engine's layers on a GPU that has it; Megatron's local ones otherwise, with our norm and
    attention.
    """
    if uses_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec(num_experts=arch.num_moe_experts)
    layer: Any = get_gpt_layer_local_spec(num_experts=arch.num_moe_experts, normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    # Megatron's own core attention refuses packed rows and context parallelism.
    layer.submodules.self_attention.submodules.core_attention = CausalAttention
    norm: Any = RMSNorm
    num_layers = arch.num_layers // (parallel.pp * parallel.vpp)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm)


def wrap_ddp(model: GPTModel, parallel: ParallelConfig) -> DistributedDataParallel:
    """A chunk inside Megatron's data parallelism: gradients are accumulated and reduced in float32.

    Every replica must hold the same weights already.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=parallel.distributed_optimizer,
        check_for_nan_in_grad=False,
    )
    return DistributedDataParallel(config=model.config, ddp_config=ddp_config, module=model)
