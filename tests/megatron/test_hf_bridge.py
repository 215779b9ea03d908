"""Weights go from a Hugging Face folder to shards and back bit for bit, and compute the same logits."""

from __future__ import annotations

import json

import pytest
import torch

from tests.rank_pool import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]

# 13 ids do not divide by TP 2; 4 query heads on 2 key/value heads; 4 layers split over 2 stages.
SHAPE = {
    "vocab_size": 13,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
}
VARIANTS = [("llama", True), ("llama", False), ("qwen2", True), ("qwen2", False)]


def _hf_model(model_type, tied):
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    values = {key: value for key, value in SHAPE.items() if key != "rope_theta"}
    values |= {"rope_parameters": {"rope_type": "default", "rope_theta": SHAPE["rope_theta"]}}
    config_cls, model_cls = (
        (LlamaConfig, LlamaForCausalLM) if model_type == "llama" else (Qwen2Config, Qwen2ForCausalLM)
    )
    torch.manual_seed(11)
    model = model_cls(config_cls(**values, tie_word_embeddings=tied)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # also the norms and biases, which start as ones and zeros
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def _write_hf(folder, model_type, tied):
    _hf_model(model_type, tied).save_pretrained(folder)
    return folder


def _build(parallel_values):
    from megatron_worker.groups import initialize_parallel
    from megatron_worker.model_setup import build_chunks
    from rlcore.config import ParallelConfig

    parallel = ParallelConfig(**parallel_values)
    groups = initialize_parallel(parallel, "cpu")
    return groups, lambda arch: build_chunks(arch, parallel, "float32", groups)


def _round_trip(rank, world_size, source, target, parallel_values):
    from megatron_worker.architecture import architecture_from_hf
    from megatron_worker.cpu_backend import cpu_backend
    from megatron_worker.groups import destroy_parallel
    from megatron_worker.hf_bridge import export_hf_tensors, load_hf_weights, save_hf

    with cpu_backend("cpu"):
        groups, build = _build(parallel_values)
        arch = architecture_from_hf(source)
        model = build(arch)
        load_hf_weights(model, arch, source, groups)
        exported = dict(export_hf_tensors(model, arch, groups))
        save_hf(model, arch, target, groups, source=source)
        destroy_parallel()
    return exported


@pytest.mark.parametrize(("model_type", "tied"), VARIANTS)
@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        (1, {}),
        (2, {"tp": 2}),
        (2, {"pp": 2}),
        (4, {"tp": 2, "pp": 2}),
        (2, {"pp": 2, "vpp": 2}),
        (4, {"tp": 2, "pp": 2, "vpp": 2}),
    ],
    ids=["alone", "tp2", "pp2", "tp2pp2", "pp2vpp2", "tp2pp2vpp2"],
)
def test_round_trip_is_bit_equal(tmp_path, model_type, tied, world_size, parallel):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    source = _write_hf(tmp_path / "source", model_type, tied)
    exported = run_ranks(_round_trip, world_size, str(source), str(tmp_path / "out"), parallel)
    original = load_file(source / "model.safetensors")
    written = load_file(tmp_path / "out" / "model.safetensors")
    for tensors in [*exported, written]:
        assert tensors.keys() == original.keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in original.items())
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(8).reshape(1, 8)
    torch.testing.assert_close(
        reloaded(ids).logits, _hf_model(model_type, tied)(ids).logits, rtol=1e-6, atol=1e-6
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def _failed_save(rank, world_size, target):
    from megatron_worker.cpu_backend import cpu_backend
    from megatron_worker.groups import destroy_parallel
    from megatron_worker.hf_bridge import initialize_from_seed, save_hf
    from tests.megatron.stage_runner import tiny_architecture

    with cpu_backend("cpu"):
        groups, build = _build({"tp": 2})
        model = build(tiny_architecture())
        initialize_from_seed(model, tiny_architecture(), 5, groups)
        with pytest.raises(ValueError) as caught:
            save_hf(model, tiny_architecture(), target, groups)
        destroy_parallel()
    return str(caught.value)


def test_a_save_that_fails_is_an_error_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for message in run_ranks(_failed_save, 2, str(tmp_path / "file" / "policy")):
        assert "could not be written" in message
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def _logits(rank, world_size, source, parallel_values):
    from megatron_worker.architecture import architecture_from_hf
    from megatron_worker.cpu_backend import cpu_backend
    from megatron_worker.groups import destroy_parallel
    from megatron_worker.hf_bridge import load_hf_weights
    from tests.megatron.stage_runner import full_logits

    with cpu_backend("cpu"):
        groups, build = _build(parallel_values)
        arch = architecture_from_hf(source)
        model = build(arch)
        load_hf_weights(model, arch, source, groups)
        logits = full_logits(model, arch, groups, torch.arange(12).reshape(1, 12))
        destroy_parallel()
    return logits


@pytest.mark.parametrize(("model_type", "tied"), VARIANTS)
@pytest.mark.parametrize(
    "parallel",
    [
        {"tp": 2, "pp": 2},
        {"tp": 2, "pp": 2, "sequence_parallel": True},
        {"tp": 2, "pp": 2, "vpp": 2},
    ],
)
def test_logits_equal_transformers(tmp_path, model_type, tied, parallel):
    source = _write_hf(tmp_path / "source", model_type, tied)
    with torch.no_grad():
        expected = _hf_model(model_type, tied)(torch.arange(12).reshape(1, 12)).logits
    results = [logits for logits in run_ranks(_logits, 4, str(source), parallel) if logits is not None]
    assert len(results) == 2
    for logits in results:
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def _refusal(rank, world_size, source, parallel_values):
    from megatron_worker.groups import destroy_parallel

    try:
        _logits(rank, world_size, source, parallel_values)
    except ValueError as error:
        destroy_parallel()
        return str(error)
    return ""


def _break_missing(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]


def _break_unused(tensors):
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(6)


def _break_shape(tensors):
    tensors["model.norm.weight"] = torch.ones(25)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_break_missing, "model.layers.1.mlp.up_proj.weight"),
        (_break_unused, "q_norm"),
        (_break_shape, "model.norm.weight has shape"),
    ],
)
def test_weights_that_do_not_fit_are_refused_on_every_rank(tmp_path, damage, message):
    from safetensors.torch import load_file, save_file

    source = _write_hf(tmp_path / "source", "llama", False)
    tensors = load_file(source / "model.safetensors")
    damage(tensors)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    refusals = run_ranks(_refusal, 2, str(source), {"pp": 2})
    assert all(message in refusal for refusal in refusals)


def test_weights_in_several_files_load(tmp_path, monkeypatch):
    from safetensors.torch import load_file

    from megatron_worker import hf_bridge
    from megatron_worker.cpu_backend import cpu_backend

    source = _write_hf(tmp_path / "source", "qwen2", False)
    original = load_file(source / "model.safetensors")
    arch, draft = hf_bridge_arch(source), tmp_path / "split"
    monkeypatch.setattr(hf_bridge, "MAX_FILE_BYTES", 4000)
    with cpu_backend("cpu"):
        hf_bridge._write_folder(iter(original.items()), arch, draft, source)
    index = json.loads((draft / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    expected, split = (run_ranks(_logits, 1, str(folder), {})[0] for folder in (source, draft))
    assert torch.equal(expected, split)


def hf_bridge_arch(source):
    from megatron_worker.architecture import architecture_from_hf

    return architecture_from_hf(source)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "qwen3"),
        ("hidden_act", "gelu"),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("sliding_window", 128),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("quantization_config", {"quant_method": "gptq"}),
    ],
)
def test_what_the_model_does_not_compute_is_refused(tmp_path, key, value):
    from megatron_worker.architecture import architecture_from_hf

    source = _write_hf(tmp_path / "source", "llama", False)
    config = json.loads((source / "config.json").read_text())
    if key == "rope_scaling":
        del config["rope_parameters"]
    (source / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ValueError, match=r"is not supported, expected"):
        architecture_from_hf(source)


def test_older_config_spelling_is_read(tmp_path):
    from megatron_worker.architecture import architecture_from_hf

    source = _write_hf(tmp_path / "source", "qwen2", True)
    new = architecture_from_hf(source)
    config = json.loads((source / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 500.0, "rope_scaling": None, "sliding_window": 4096, "use_sliding_window": False}
    (source / "config.json").write_text(json.dumps(config))
    assert architecture_from_hf(source) == new
    assert (new.rope_theta, new.qkv_bias, new.tie_word_embeddings, new.head_dim) == (500.0, True, True, 6)


def _drawn(rank, world_size, parallel_values):
    from megatron_worker.cpu_backend import cpu_backend
    from megatron_worker.groups import destroy_parallel
    from megatron_worker.hf_bridge import export_hf_tensors, initialize_from_seed
    from tests.megatron.stage_runner import tiny_architecture

    with cpu_backend("cpu"):
        groups, build = _build(parallel_values)
        arch = tiny_architecture()
        model = build(arch)
        initialize_from_seed(model, arch, 5, groups)
        tensors = dict(export_hf_tensors(model, arch, groups))
        destroy_parallel()
    return tensors


def test_drawn_weights_do_not_depend_on_the_layout():
    alone = run_ranks(_drawn, 1, {})[0]
    assert abs(alone["model.layers.0.mlp.gate_proj.weight"].std().item() - 0.02) < 0.002
    assert alone["model.layers.1.self_attn.q_proj.bias"].abs().max() == 0
    assert not torch.equal(
        alone["model.layers.0.mlp.gate_proj.weight"], alone["model.layers.1.mlp.gate_proj.weight"]
    )
    for parallel in ({"tp": 2, "pp": 2}, {"tp": 2, "pp": 2, "vpp": 2}):
        for tensors in run_ranks(_drawn, 4, parallel):
            assert all(torch.equal(tensors[name], tensor) for name, tensor in alone.items())
