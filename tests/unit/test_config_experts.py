"""Rules of models with experts: what is refused names the numbers, the key and the fix."""

from __future__ import annotations

import pytest

from rlcore.config import load_run_config
from rlcore.config_parse import ConfigError
from rlcore.config_rules import check_world

MODEL = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "ffn_hidden_size": 8,
    "max_position_embeddings": 64,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
}


def load(parallel=None, **model):
    model = {key: value for key, value in (MODEL | model).items() if value is not None}
    return load_run_config({"model": model, "parallel": parallel or {}})


@pytest.mark.parametrize(
    ("model", "parallel", "message"),
    [
        ({"moe_router_topk": None}, {}, r"model.num_moe_experts=4, but not how many.*model.moe_router_topk"),
        ({"num_moe_experts": None}, {}, r"model.moe_router_topk=2 describes experts.*num_moe_experts"),
        (
            {"num_moe_experts": None, "moe_router_topk": None, "moe_ffn_hidden_size": 8},
            {},
            r"model.moe_ffn_hidden_size=8 describes experts",
        ),
        ({"moe_router_topk": 1}, {}, r"model.moe_router_topk=1: .*the router never learns.*at least 2"),
        ({"moe_router_topk": 5}, {}, r"model.moe_router_topk=5 is more than model.num_moe_experts=4"),
        ({"moe_router_topk": 0}, {}, r"model.moe_router_topk=0: expected a count of at least 1"),
        ({"qkv_bias": True}, {}, r"model.qkv_bias=true with model.num_moe_experts.*qkv_bias=false"),
        ({}, {"tp": 2}, r"parallel.tp=2 with experts needs parallel.sequence_parallel=true"),
        ({}, {"ep": 3}, r"parallel.ep=3 does not divide model.num_moe_experts=4.*one of \[1, 2, 4\]"),
        ({}, {"ep": 0}, r"parallel.ep=0: expected a count of at least 1"),
        (
            {"num_moe_experts": None, "moe_router_topk": None},
            {"ep": 2},
            r"parallel.ep=2 cuts experts, and the model has none. Set parallel.ep=1",
        ),
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused(model, parallel, message):
    with pytest.raises(ConfigError, match=message):
        load(parallel, **model)


def test_experts_are_cut_over_data_and_context_parallel_ranks():
    config = load({"ep": 4, "pp": 2})
    with pytest.raises(ConfigError, match=r"parallel.ep=4 does not divide 2 data-parallel x 1 context-par"):
        check_world(config, 4)
    check_world(config, 8)
    packed = load_run_config(
        {"model": MODEL, "parallel": {"ep": 4, "cp": 2}, "train": {"token_budget": 64, "microbatch_size": 1}}
    )
    check_world(packed, 4)
    with pytest.raises(ConfigError, match=r"1 data-parallel x 2 context-parallel ranks = 2"):
        check_world(packed, 2)


def test_a_model_with_experts_loads():
    config = load({"tp": 2, "sequence_parallel": True, "ep": 2}, moe_ffn_hidden_size=6)
    assert config.model.num_moe_experts == 4 and config.parallel.ep == 2
