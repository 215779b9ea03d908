"""Layouts for models with experts, and the same model in transformers.

A router picks by comparing logits, so two layouts whose rounding differs may pick other experts where the
second and the third choice are all but equal. `margin_on_rank` says how far from that a test's tokens are:
far enough, and a difference between layouts is a fault.
"""

from __future__ import annotations

import dataclasses

import torch

from rlcore.config import RunConfig
from tests.megatron.layout_cases import BUDGETS, MODEL, NUM_SEQUENCES, make_config

# Four experts, two a token, narrower than the dense width so that the one is not taken for the other.
EXPERT_MODEL = {
    "qkv_bias": False,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 40,
}

# name -> (world size, parallel section)
EXPERT_LAYOUTS = {
    "alone": (1, {}),
    "ep2": (2, {"ep": 2}),
    "ep2+distopt": (2, {"ep": 2, "distributed_optimizer": True}),
    "tp2": (2, {"tp": 2, "sequence_parallel": True}),
    "cp2ep2": (2, {"cp": 2, "ep": 2}),
    "tp2ep2": (4, {"tp": 2, "ep": 2, "sequence_parallel": True}),
    "pp2ep2": (4, {"pp": 2, "ep": 2}),
    "dp4ep2": (4, {"ep": 2}),
    "ep4": (4, {"ep": 4}),
    "cp2dp2ep4": (4, {"cp": 2, "ep": 4}),
    "tp2ep2+packed+fused": (4, {"tp": 2, "ep": 2, "sequence_parallel": True}),
}
MARGIN = 1e-5
"""Least distance between a token's last chosen and first rejected router logit; rounding is about 1e-7."""


def expert_config(layout: str, num_microbatches: int = 1, hf_path: str | None = None, **loss) -> RunConfig:
    """The config of the layout tests with experts; with the weights of a folder where one is given."""
    world_size, parallel = EXPERT_LAYOUTS[layout]
    config = make_config("tp1", 1, **loss)
    model = dataclasses.replace(config.model, **EXPERT_MODEL, fused_head=layout.endswith("+fused"))
    if hf_path is not None:
        model = dataclasses.replace(type(model)(hf_path=hf_path), fused_head=model.fused_head)
    parallel_config = dataclasses.replace(config.parallel, **parallel)
    dp = world_size // (parallel_config.tp * parallel_config.pp * parallel_config.cp)
    packs = "packed" in layout or parallel_config.cp > 1
    train = dataclasses.replace(
        config.train,
        microbatch_size=NUM_SEQUENCES // dp // num_microbatches,
        token_budget=BUDGETS[num_microbatches] if packs else None,
    )
    return dataclasses.replace(config, model=model, parallel=parallel_config, train=train)


def mixtral_folder(folder, dtype=torch.float32):
    """A folder of transformers' own with weights large enough that routing and experts matter."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=MODEL["vocab_size"],
        hidden_size=MODEL["hidden_size"],
        intermediate_size=EXPERT_MODEL["moe_ffn_hidden_size"],
        num_hidden_layers=MODEL["num_layers"],
        num_attention_heads=MODEL["num_attention_heads"],
        num_key_value_heads=MODEL["num_query_groups"],
        max_position_embeddings=MODEL["max_position_embeddings"],
        num_local_experts=EXPERT_MODEL["num_moe_experts"],
        num_experts_per_tok=EXPERT_MODEL["moe_router_topk"],
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    torch.manual_seed(3)
    model = MixtralForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder)
    return str(folder)


def by_folder_names(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Transformers keeps a layer's experts in two tensors and writes three an expert: the written names."""
    named = {}
    for name, value in gradients.items():
        name = name.replace(".mlp.", ".block_sparse_moe.")
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(value):
                gate, up = both.chunk(2)
                prefix = name.replace("gate_up_proj", str(expert))
                named |= {f"{prefix}.w1.weight": gate, f"{prefix}.w3.weight": up}
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(value):
                named[name.replace("down_proj", f"{expert}.w2.weight")] = down
        else:
            named[name] = value
    return named


def margin_on_rank(rank, world_size, config, batch):
    """The smallest distance between the last chosen and the first rejected logit of any token and layer, and
    how many tokens each expert of each layer got."""
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    margins, counts = [], []

    def watch(router, inputs, output):
        logits = router.gating(inputs[0]).flatten(0, 1)
        ordered = logits.sort(dim=-1, descending=True).values
        margins.append(float((ordered[:, router.topk - 1] - ordered[:, router.topk]).min()))
        counts.append(output[1].sum(dim=0).tolist())

    try:
        for module in worker.model.modules():
            if isinstance(module, TopKRouter):
                module.register_forward_hook(watch)
        worker.logprobs(batch)
        return min(margins), counts
    finally:
        worker.close()
