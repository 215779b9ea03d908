"""Layouts and a batch for models with experts."""

from __future__ import annotations

import dataclasses

from rlcore.config import RunConfig, load_run_config
from tests.megatron.layout_cases import MODEL, NUM_SEQUENCES, make_config

# Four experts, two a token, narrower than the dense width so that the one is not taken for the other.
EXPERT_MODEL = {
    **MODEL,
    "qkv_bias": False,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 40,
}
