"""Experts between folders and shards: bit for bit, by their index in the layer; what other folders mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.megatron.expert_cases import EXPERT_LAYOUTS, expert_config, mixtral_folder
from tests.rank_pool import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]

LAYOUTS = ["alone", "ep2", "tp2ep2", "pp2ep2", "dp4ep2"]
EXPERT = "model.layers.1.block_sparse_moe.experts.3.w1.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return mixtral_folder(tmp_path_factory.mktemp("mixtral") / "policy")


def weights_on_rank(rank, world_size, config, target=None):
    from megatron_worker.worker import MegatronWorker
    from tests.megatron.layout_cases import weights_by_name

    worker = MegatronWorker(config)
    try:
        if target is not None:
            worker.save(target)
        return weights_by_name(worker)
    finally:
        worker.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_comes_back_bit_for_bit(layout, folder, tmp_path):
    """On every rank, in the written file, and in what transformers makes of it."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    target = str(tmp_path / "out")
    config = expert_config(layout, hf_path=folder)
    exported = run_ranks(weights_on_rank, EXPERT_LAYOUTS[layout][0], config, target)
    original = load_file(f"{folder}/model.safetensors")
    assert EXPERT in original and "model.layers.0.block_sparse_moe.gate.weight" in original
    for tensors in [*exported, load_file(f"{target}/model.safetensors")]:
        assert tensors.keys() == original.keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in original.items())
    ids = torch.arange(8).reshape(1, 8)
    ours, theirs = (AutoModelForCausalLM.from_pretrained(path) for path in (target, folder))
    assert ours.config.model_type == "mixtral"
    assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_drawn_weights_do_not_depend_on_the_layout():
    """Each expert is another one, and is drawn by its index in the layer."""
    alone = run_ranks(weights_on_rank, 1, expert_config("alone"))[0]
    assert abs(float(alone[EXPERT].std()) - 0.02) < 0.002
    # Two layers: what ends a block is drawn at a half of that.
    assert abs(float(alone[EXPERT.replace("w1", "w2")].std()) - 0.01) < 0.001
    assert not torch.equal(alone[EXPERT], alone[EXPERT.replace("experts.3", "experts.1")])
    for tensors in run_ranks(weights_on_rank, 4, expert_config("tp2ep2")):
        assert tensors.keys() == alone.keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in alone.items())


def damaged(folder, tmp_path, **changes):
    """`config.json` of the folder with some values changed, or removed where None is given."""
    values = json.loads(Path(folder, "config.json").read_text()) | changes
    values = {key: value for key, value in values.items() if value is not None or key not in changes}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def test_the_numbers_of_a_folder(folder, tmp_path):
    from megatron_worker.architecture import architecture_from_hf

    arch = architecture_from_hf(folder)
    assert (arch.num_moe_experts, arch.moe_router_topk, arch.ffn_hidden_size) == (4, 2, 40)
    assert arch.model_type == "mixtral" and arch.rope_theta == 500.0
    # What a Mixtral folder means where it says nothing; Llama would mean 10000 and 1e-6.
    silent = damaged(folder, tmp_path, rope_parameters=None, rms_norm_eps=None)
    assert architecture_from_hf(silent).rope_theta == 1e6
    assert architecture_from_hf(silent).rms_norm_eps == 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 64}, "sliding_window=64 is not supported"),
        ({"num_local_experts": None}, "has no num_local_experts"),
        ({"num_experts_per_tok": 1}, "moe_router_topk=1"),
        ({"model_type": "qwen2_moe"}, "model_type='qwen2_moe' is not supported, expected llama, qwen2 or"),
    ],
    ids=str,
)
def test_folders_that_mean_another_model_are_refused(folder, tmp_path, changes, message):
    from megatron_worker.architecture import architecture_from_hf

    with pytest.raises(ValueError, match=message):
        architecture_from_hf(damaged(folder, tmp_path, **changes))


def test_a_layout_that_does_not_fit_a_folder_is_refused(folder):
    """The rules of from-scratch configs, on what the folder says."""
    from megatron_worker.architecture import architecture_from_hf
    from megatron_worker.model_setup import check_layout
    from rlcore.config import ParallelConfig

    arch = architecture_from_hf(folder)
    with pytest.raises(ValueError, match=r"parallel.ep=3 does not divide model.num_moe_experts=4"):
        check_layout(arch, ParallelConfig(ep=3))
    with pytest.raises(ValueError, match=r"needs parallel.sequence_parallel=true"):
        check_layout(arch, ParallelConfig(tp=2))


def test_a_gpu_without_transformer_engine_is_refused(monkeypatch):
    """Megatron's router would end in a NameError at the first forward."""
    from megatron.core.transformer.moe import moe_utils

    from megatron_worker.cpu_backend import cpu_backend
    from megatron_worker.model_setup import check_router_runs

    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    with pytest.raises(ValueError, match="needs Transformer Engine"):
        check_router_runs()
    with cpu_backend("cpu"):
        check_router_runs()
