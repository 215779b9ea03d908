"""The shape of a policy: Llama, Qwen2 and Mixtral style decoders (RMSNorm, SwiGLU, grouped queries, rotary
positions; Mixtral's SwiGLU layers are experts behind a router).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlcore.config import ModelConfig
from rlcore.config_rules_experts import check_router_topk

# What Llama uses where a config does not say.
DEFAULT_ROPE_THETA = 10000.0
DEFAULT_RMS_NORM_EPS = 1e-6
# What a Mixtral folder means where its config does not say.
MIXTRAL_ROPE_THETA = 1e6
MIXTRAL_RMS_NORM_EPS = 1e-5
_MODEL_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "mixtral": "MixtralForCausalLM",
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder of the Llama/Qwen2/Mixtral family. `ValueError` on construction when the numbers contradict
    each other.
    """

    num_layers: int
    """Transformer layers of the whole model."""
    hidden_size: int
    """Width D."""
    num_attention_heads: int
    """Query heads."""
    num_query_groups: int
    """Key/value heads."""
    head_dim: int
    """Width of one head."""
    ffn_hidden_size: int
    """Width of the SwiGLU layer, or of each expert."""
    vocab_size: int
    """Real vocabulary size V, without padding."""
    max_position_embeddings: int
    """Longest sequence, in tokens."""
    rope_theta: float
    """Base of the rotary embedding."""
    rms_norm_eps: float
    """Added to the mean square inside RMSNorm."""
    tie_word_embeddings: bool
    """The output head shares the input embedding's weight."""
    qkv_bias: bool
    """Bias on the QKV projection: Qwen2 has one, Llama and Mixtral have none."""
    num_moe_experts: int | None = None
    """Experts of every layer; None: a dense model."""
    moe_router_topk: int = 2
    """Experts that a token takes; their weights are a softmax over the logits of those chosen. Read with
    experts alone.
    """

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"{self.num_attention_heads} attention heads are not a multiple of {self.num_query_groups} "
                "key/value heads. Change one of them."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: rotary embeddings rotate pairs, so it must be even.")
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size={self.vocab_size}: expected at least 1.")
        if self.num_moe_experts is not None:
            check_router_topk(self.moe_router_topk, self.num_moe_experts, source="model")
            if self.qkv_bias:
                raise ValueError("experts and a QKV bias: no family has both. Set qkv_bias to False.")

    @property
    def model_type(self) -> Literal["llama", "qwen2", "mixtral"]:
        """Name of the Hugging Face architecture with these parts."""
        if self.num_moe_experts is not None:
            return "mixtral"
        return "qwen2" if self.qkv_bias else "llama"

    def padded_vocab_size(self, tp_size: int) -> int:
        """Rows of the embedding: the vocabulary rounded up so that every TP rank holds equally many."""
        return -(-self.vocab_size // tp_size) * tp_size


def architecture_from_config(model: ModelConfig, task_vocab_size: int) -> Architecture:
    """The architecture that a from-scratch run config describes; the vocabulary is the task's unless it is
    set.

    Raises `ValueError` naming the key when fields are missing or contradict each other.
    """

    def required(name: str) -> int:
        value = getattr(model, name)
        if value is None:
            raise ValueError(f"model.{name} is not set: a model trained from scratch needs it.")
        return value

    hidden_size, num_heads = required("hidden_size"), required("num_attention_heads")
    if hidden_size % num_heads:
        raise ValueError(
            f"model.hidden_size={hidden_size} is not a multiple of model.num_attention_heads={num_heads}. "
            "Change one of them."
        )
    vocab_size = task_vocab_size if model.vocab_size is None else model.vocab_size
    if vocab_size < task_vocab_size:
        raise ValueError(
            f"model.vocab_size={vocab_size} is smaller than the task's vocabulary of {task_vocab_size} ids. "
            f"Set it to at least {task_vocab_size}, or leave it unset."
        )
    # Every layer has experts where any has, so nothing else has the dense width.
    ffn_hidden_size = required("ffn_hidden_size")
    experts: dict[str, int] = {}
    if model.num_moe_experts is not None:
        experts = {"num_moe_experts": model.num_moe_experts, "moe_router_topk": required("moe_router_topk")}
    return Architecture(
        num_layers=required("num_layers"),
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_query_groups=num_heads if model.num_query_groups is None else model.num_query_groups,
        head_dim=hidden_size // num_heads,
        ffn_hidden_size=ffn_hidden_size if model.moe_ffn_hidden_size is None else model.moe_ffn_hidden_size,
        vocab_size=vocab_size,
        max_position_embeddings=required("max_position_embeddings"),
        rope_theta=DEFAULT_ROPE_THETA if model.rope_theta is None else model.rope_theta,
        rms_norm_eps=DEFAULT_RMS_NORM_EPS if model.rms_norm_eps is None else model.rms_norm_eps,
        tie_word_embeddings=bool(model.tie_word_embeddings),
        qkv_bias=bool(model.qkv_bias),
        **experts,
    )


def architecture_from_hf(path: str | Path) -> Architecture:
    """Reads `config.json` of a Hugging Face folder. `ValueError` for a missing file or a part we do not
    have.
    """
    config_path = Path(path) / "config.json"
    if not config_path.is_file():
        raise ValueError(f"model.hf_path={path}: expected a folder with a config.json.")
    values = json.loads(config_path.read_text(encoding="utf-8"))
    _refuse_unsupported(values, config_path)
    num_heads = _required(values, "num_attention_heads", config_path)
    hidden_size = _required(values, "hidden_size", config_path)
    rope = _rope_parameters(values)
    is_mixtral = values["model_type"] == "mixtral"
    experts: dict[str, int] = {}
    if is_mixtral:
        experts = {
            "num_moe_experts": _required(values, "num_local_experts", config_path),
            "moe_router_topk": _required(values, "num_experts_per_tok", config_path),
        }
    default_theta = MIXTRAL_ROPE_THETA if is_mixtral else DEFAULT_ROPE_THETA
    default_eps = MIXTRAL_RMS_NORM_EPS if is_mixtral else DEFAULT_RMS_NORM_EPS
    return Architecture(
        num_layers=_required(values, "num_hidden_layers", config_path),
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_query_groups=values.get("num_key_value_heads") or num_heads,
        head_dim=values.get("head_dim") or hidden_size // num_heads,
        ffn_hidden_size=_required(values, "intermediate_size", config_path),
        vocab_size=_required(values, "vocab_size", config_path),
        max_position_embeddings=_required(values, "max_position_embeddings", config_path),
        rope_theta=float(rope.get("rope_theta", default_theta)),
        rms_norm_eps=float(values.get("rms_norm_eps", default_eps)),
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        qkv_bias=values["model_type"] == "qwen2",
        **experts,
    )


def hf_config(arch: Architecture, dtype: str) -> dict[str, Any]:
    """The `config.json` of this architecture. `dtype` is torch's name, such as `float32`."""
    values: dict[str, Any] = {
        "architectures": [_MODEL_CLASSES[arch.model_type]],
        "model_type": arch.model_type,
        "dtype": dtype,
        "hidden_act": "silu",
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.ffn_hidden_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_attention_heads,
        "num_key_value_heads": arch.num_query_groups,
        "head_dim": arch.head_dim,
        "vocab_size": arch.vocab_size,
        "max_position_embeddings": arch.max_position_embeddings,
        "rms_norm_eps": arch.rms_norm_eps,
        "rope_theta": arch.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": arch.rope_theta},
        "tie_word_embeddings": arch.tie_word_embeddings,
    }
    if arch.model_type == "llama":
        values |= {"attention_bias": False, "mlp_bias": False}
    if arch.num_moe_experts is not None:
        values |= {
            "num_local_experts": arch.num_moe_experts,
            "num_experts_per_tok": arch.moe_router_topk,
            "sliding_window": None,
        }
    return values


def _required(values: Mapping[str, Any], key: str, config_path: Path) -> Any:
    if values.get(key) is None:
        raise ValueError(f"{config_path} has no {key}: it does not describe a Llama, Qwen2 or Mixtral model.")
    return values[key]


def _rope_parameters(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary settings: one mapping in newer configs, `rope_theta` and `rope_scaling` side by side in older
    ones.
    """
    merged = dict(values.get("rope_scaling") or {})
    if values.get("rope_theta") is not None:
        merged["rope_theta"] = values["rope_theta"]
    return merged | dict(values.get("rope_parameters") or {})


def _refuse_unsupported(values: Mapping[str, Any], config_path: Path) -> None:
    """`ValueError` for the first setting that would make this project compute another model than the folder
    holds.
    """
    rope = _rope_parameters(values)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    # Qwen2 writes a window into every config and says separately whether it is used.
    uses_window = values.get("use_sliding_window", values.get("model_type") != "qwen2")
    window = values.get("sliding_window") if uses_window else None
    rotary_share = rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    quantization = values.get("quantization_config")
    checks = [
        (
            "model_type",
            values.get("model_type"),
            values.get("model_type") in _MODEL_CLASSES,
            "llama, qwen2 or mixtral",
        ),
        ("hidden_act", values.get("hidden_act", "silu"), values.get("hidden_act", "silu") == "silu", "silu"),
        ("rope_type", rope_type, rope_type == "default", "default (no rotary scaling)"),
        ("sliding_window", window, window is None, "none"),
        ("attention_bias", values.get("attention_bias"), not values.get("attention_bias"), "false"),
        ("mlp_bias", values.get("mlp_bias"), not values.get("mlp_bias"), "false"),
        ("partial_rotary_factor", rotary_share, rotary_share == 1.0, "1.0"),
        ("quantization_config", quantization, quantization is None, "none (dequantise the weights first)"),
    ]
    for key, value, supported, expected in checks:
        if not supported:
            raise ValueError(f"{config_path}: {key}={value!r} is not supported, expected {expected}.")
