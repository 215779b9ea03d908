"""`rlcore check`'s comparison: right layouts pass, and every planted fault is found."""

from __future__ import annotations

import functools

import pytest

from rlcore.cli.compose import compose_run_config
from tests.megatron.planted_faults import FAULTS, TEMPERATURE, planted
from tests.rank_pool import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]


def make_problem(layout_values, *words):
    """The tiny config of a layout and the layout. Grouped queries, a tied head and QKV bias unless the words
    say otherwise; a KL term, so that the loss reads every mask."""
    from megatron_worker.check_problem import CheckLayout, tiny_config

    layout = CheckLayout(**layout_values)
    values = {
        "model.num_query_groups": "4",
        "model.num_attention_heads": "8",
        "model.tie_word_embeddings": "true",
        "model.qkv_bias": "true",
        "sampling.temperature": str(TEMPERATURE),
        "loss.kl_coef": "0.1",
        "parallel.tp": "1",
        "parallel.pp": "1",
        # As many as the largest layout here has stages: the run's own must divide too.
        "model.num_layers": "8",
    }
    values |= dict(word.split("=") for word in words)
    given = [f"{key}={value}" for key, value in values.items()]
    return tiny_config(compose_run_config("demo", given), layout), layout


def reference_on_rank(rank, world_size, config, layout):
    from megatron_worker.layout_check import measure_reference

    return measure_reference(config, layout)


def compare_on_rank(rank, world_size, config, reference, fault):
    from megatron_worker.layout_check import compare_layout

    with planted(fault):
        return compare_layout(config, reference)


@functools.cache
def cached_reference(layout_values, words):
    config, layout = make_problem(dict(layout_values), *words)
    return run_ranks(reference_on_rank, 1, config, layout)[0]


def differences(layout_values, *words, fault=None):
    """What every rank says; all say the same."""
    config, layout = make_problem(layout_values, *words)
    reference = cached_reference(tuple(sorted(layout_values.items())), words)
    every = run_ranks(compare_on_rank, layout.world_size, config, reference, fault)
    assert all(
        [(line.quantity, line.largest) for line in lines]
        == [(line.quantity, line.largest) for line in every[0]]
        for lines in every
    )
    return every[0]


SP = {"sequence_parallel": True}
LAYOUTS = [
    {"tp": 2, "pp": 2},
    {"tp": 2, "pp": 2, "packed": True, **SP},
    {"tp": 2, "cp": 2, **SP},
    {"pp": 2, "cp": 2},
    {"dp": 2, "cp": 2},
    {"dp": 2, "tp": 2, "num_microbatches": 3},
    {"tp": 4, **SP},
    {"tp": 4, "packed": True, **SP},
    {"pp": 2, "vpp": 2},
    {"tp": 2, "pp": 2, "vpp": 2, "num_microbatches": 4, **SP},
    {"tp": 2, "pp": 2, "vpp": 2, "packed": True, "num_microbatches": 3, **SP},
    {"pp": 4, "vpp": 2, "num_microbatches": 4},
]


@pytest.mark.parametrize("tied", ["true", pytest.param("false", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_right_layout_differs_by_rounding(layout, tied):
    lines = differences(layout, f"model.tie_word_embeddings={tied}")
    assert [line.quantity for line in lines if not line.ok] == []
    # The lines are there, and hold something: no two layouts round alike.
    quantities = {line.quantity for line in lines}
    assert {"loss scale", "logprob", "keep", "log mass", "step taken", "loss", "metrics"} < quantities
    assert ("gradient lm_head.weight" in quantities) == (tied == "false")
    assert "gradient layers.*.self_attn.k_proj.bias" in quantities
    assert max(line.largest for line in lines) > 0.0


EXPERTS = {"adds_experts": True}
EXPERT_LAYOUTS = [
    {"dp": 2, "ep": 2, **EXPERTS},
    {"tp": 2, "dp": 2, "ep": 2, **SP, **EXPERTS},
    {"pp": 2, "dp": 2, "ep": 2, "packed": True, **EXPERTS},
    {"cp": 2, "dp": 2, "ep": 2, **EXPERTS},
]


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS, ids=str)
def test_a_right_layout_of_experts_differs_by_rounding(layout):
    lines = differences(layout)
    assert [line.quantity for line in lines if not line.ok] == []
    quantities = {line.quantity for line in lines}
    for name in ("gate", "experts.*.w1", "experts.*.w2", "experts.*.w3"):
        assert f"gradient layers.*.block_sparse_moe.{name}.weight" in quantities
    # A dense model with a QKV bias becomes one with experts, which have none beside them.
    assert not any("bias" in name or ".mlp." in name for name in quantities)


def test_a_run_with_experts_keeps_its_own_kind_of_them():
    """Three a token stay three, of fewer experts."""
    config, _ = make_problem(
        {"dp": 2, "ep": 2}, "model.qkv_bias=false", "model.num_moe_experts=6", "model.moe_router_topk=3"
    )
    assert (config.model.num_moe_experts, config.model.moe_router_topk) == (4, 3)
    with pytest.raises(ValueError, match=r"parallel.ep=4 does not divide model.num_moe_experts=6"):
        make_problem(
            {"dp": 4, "ep": 4}, "model.qkv_bias=false", "model.num_moe_experts=6", "model.moe_router_topk=3"
        )
    with pytest.raises(ValueError, match=r"parallel.ep=2 cuts experts, and the model has none"):
        make_problem({"dp": 2, "ep": 2})


def test_the_problem_holds_every_kind_of_token():
    """Otherwise a layout would pass on an easy batch."""
    for layout in LAYOUTS:
        metrics = cached_reference(
            tuple(sorted(layout.items())), ("model.tie_word_embeddings=true",)
        ).step.metrics
        for name in ("sample_masked", "dropped_keep_old", "dropped_keep", "trained", "prompt"):
            assert metrics[f"tokens/{name}"] > 0, (layout, name)
        assert metrics["ratio/clipped_low"] > 0 and metrics["ratio/clipped_high"] > 0


@pytest.mark.parametrize(
    "words",
    [
        ("sampling.top_p=0.99",),
        ("sampling.top_p=null", "sampling.min_p=0.05"),
    ],
    ids=str,
)
def test_a_filter_that_keeps_a_uniform_vocabulary_cuts_the_tiny_one(words):
    """Otherwise every token is kept, and a layout with a broken support would pass."""
    metrics = cached_reference((("tp", 2),), ("sampling.top_k=null", *words)).step.metrics
    dropped = metrics["tokens/dropped_keep"] + metrics["tokens/dropped_keep_old"]
    assert metrics["tokens/dropped_keep"] > 0
    assert 0.1 < dropped / metrics["tokens/valid"] < 0.8


@pytest.mark.parametrize(
    "words",
    [
        ("loss.policy=gspo", "loss.aggregation=seq_mean_token_mean"),
        ("loss.actor_denominator=retained_exact", "loss.kl_coef=0"),
        ("importance.correction=tis", "importance.cap=1.1"),
        ("loss.aggregation=seq_mean_token_mean",),
    ],
    ids=str,
)
def test_what_is_compared_is_the_loss_of_the_run(words):
    """Every rank split at once: TP, sequences over CP, and a loss that is not the default one."""
    layout = {"tp": 2, "cp": 2, **SP}
    assert [line for line in differences(layout, *words) if not line.ok] == []
    key = tuple(sorted(layout.items()))
    default, own = (cached_reference(key, given).step.metrics["loss/total"] for given in ((), words))
    assert abs(own - default) > 1e-4


def test_the_fused_head_is_checked_where_the_run_has_it():
    for vpp in (1, 2):
        layout = {"tp": 2, "pp": 2, "vpp": vpp, **SP}
        config, _ = make_problem(layout, "model.fused_head=true")
        assert config.model.fused_head and config.model.fused_head_tokens == 7
        assert config.model.num_layers == 2 * vpp
        assert [line for line in differences(layout, "model.fused_head=true") if not line.ok] == []


@pytest.mark.parametrize("support", ["replay", "audit"])
def test_the_samplers_kept_ids_are_checked_where_the_run_reads_them(support):
    words = (f"sampling.support={support}", "sampling.top_k=8", "model.fused_head=true")
    found = differences({"tp": 2, "cp": 2, **SP}, *words)
    assert [line for line in found if not line.ok] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    """By the quantity that it should show in."""
    _, layout, quantity = FAULTS[fault]
    wrong = {line.quantity: line.largest for line in differences(layout, fault=fault) if not line.ok}
    assert quantity in wrong, (fault, wrong)


def test_the_same_layouts_pass_without_the_faults():
    """With exactly the words of the tests above: it is the plants that were found."""
    layouts = [layout for _, layout, _ in FAULTS.values()]
    for index, layout in enumerate(layouts):
        if layout not in layouts[:index]:
            assert [line for line in differences(layout) if not line.ok] == [], layout


def test_the_list_of_faults_is_long_enough():
    assert len(FAULTS) >= 10
