"""How each Megatron parameter is cut out of Hugging Face tensors: names, fusion and TP shards, in both
directions.

Megatron names are those of its local layers; `local_layer_name` translates Transformer Engine's. HF names are
those of the Llama and Qwen2 families, which agree, and for experts Mixtral's, as folders hold them
(transformers 5 keeps other names in memory and translates when it reads and writes). Loaders hand in
`read(hf_name, axis, start, stop)`, which returns one slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_worker.architecture import Architecture

ReadSlice = Callable[[str, int, int, int], torch.Tensor]
EXPERTS = "experts.local_experts"
"""Where Megatron's local layers keep a rank's experts, inside a layer's `mlp`."""


class ParameterLayout(Protocol):
    """One Megatron parameter as a function of HF tensors."""

    @property
    def partition_axis(self) -> int | None:
        """Axis of the Megatron parameter that TP cuts; None for a parameter every TP rank holds in full."""
        ...

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and full shapes of the HF tensors it is made of."""
        ...

    def shard_shape(self, tp_size: int) -> tuple[int, ...]:
        """Shape of one TP rank's parameter."""
        ...

    def shard(self, read: ReadSlice, tp_rank: int, tp_size: int) -> torch.Tensor:
        """This TP rank's parameter, read slice by slice."""
        ...

    def unshard(self, shards: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The full HF tensors from the shards of all TP ranks, in rank order."""
        ...


@dataclass(frozen=True, kw_only=True)
class Replicated:
    """The same on every TP rank (norm weights, a router)."""

    hf_name: str
    shape: tuple[int, ...]

    @property
    def partition_axis(self) -> int | None:
        return None

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.hf_name: self.shape}

    def shard_shape(self, tp_size: int) -> tuple[int, ...]:
        return self.shape

    def shard(self, read: ReadSlice, tp_rank: int, tp_size: int) -> torch.Tensor:
        return read(self.hf_name, 0, 0, self.shape[0])

    def unshard(self, shards: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {self.hf_name: shards[0]}


@dataclass(frozen=True, kw_only=True)
class VocabRows:
    """`[V, D]` cut by rows; rows that only pad the vocabulary are zero and never leave."""

    hf_name: str
    vocab_size: int
    hidden_size: int

    @property
    def partition_axis(self) -> int | None:
        return 0

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.hf_name: (self.vocab_size, self.hidden_size)}

    def shard_shape(self, tp_size: int) -> tuple[int, ...]:
        return (-(-self.vocab_size // tp_size), self.hidden_size)

    def shard(self, read: ReadSlice, tp_rank: int, tp_size: int) -> torch.Tensor:
        num_rows = self.shard_shape(tp_size)[0]
        start = min(tp_rank * num_rows, self.vocab_size)
        stop = min(start + num_rows, self.vocab_size)
        real = read(self.hf_name, 0, start, stop)
        return torch.cat([real, real.new_zeros(num_rows - (stop - start), self.hidden_size)])

    def unshard(self, shards: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {self.hf_name: torch.cat(list(shards))[: self.vocab_size]}


@dataclass(frozen=True, kw_only=True)
class InputColumns:
    """`[out, in]` cut along the input axis (projections that end a block)."""

    hf_name: str
    out_size: int
    in_size: int

    @property
    def partition_axis(self) -> int | None:
        return 1

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.hf_name: (self.out_size, self.in_size)}

    def shard_shape(self, tp_size: int) -> tuple[int, ...]:
        return (self.out_size, self.in_size // tp_size)

    def shard(self, read: ReadSlice, tp_rank: int, tp_size: int) -> torch.Tensor:
        width = self.in_size // tp_size
        return read(self.hf_name, 1, tp_rank * width, (tp_rank + 1) * width)

    def unshard(self, shards: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {self.hf_name: torch.cat(list(shards), dim=1)}


@dataclass(frozen=True, kw_only=True)
class FusedGateUp:
    """SwiGLU's two input projections: each TP rank holds its gate rows, then its up rows."""

    gate_name: str
    up_name: str
    ffn_hidden_size: int
    hidden_size: int

    @property
    def partition_axis(self) -> int | None:
        return 0

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        shape = (self.ffn_hidden_size, self.hidden_size)
        return {self.gate_name: shape, self.up_name: shape}

    def shard_shape(self, tp_size: int) -> tuple[int, ...]:
        return (2 * self.ffn_hidden_size // tp_size, self.hidden_size)

    def shard(self, read: ReadSlice, tp_rank: int, tp_size: int) -> torch.Tensor:
        width = self.ffn_hidden_size // tp_size
        start, stop = tp_rank * width, (tp_rank + 1) * width
        return torch.cat([read(self.gate_name, 0, start, stop), read(self.up_name, 0, start, stop)])

    def unshard(self, shards: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return {
            self.gate_name: torch.cat([gate for gate, _ in halves]),
            self.up_name: torch.cat([up for _, up in halves]),
        }


@dataclass(frozen=True, kw_only=True)
class FusedQkv:
    """Query, key and value rows, interleaved per key/value head: its queries, its key, its value, then the
    next.
    """

    names: tuple[str, str, str]
    num_heads: int
    num_groups: int
    head_dim: int
    tail: tuple[int, ...]
    """Axes after the rows: `(D,)` for the weight, `()` for the bias."""

    @property
    def _rows_per_group(self) -> tuple[int, int, int]:
        return (self.num_heads // self.num_groups * self.head_dim, self.head_dim, self.head_dim)

    @property
    def partition_axis(self) -> int | None:
        return 0

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        rows = self._rows_per_group
        return {name: (self.num_groups * n, *self.tail) for name, n in zip(self.names, rows, strict=True)}

    def shard_shape(self, tp_size: int) -> tuple[int, ...]:
        return (self.num_groups // tp_size * sum(self._rows_per_group), *self.tail)

    def shard(self, read: ReadSlice, tp_rank: int, tp_size: int) -> torch.Tensor:
        groups = self.num_groups // tp_size
        parts = [
            read(name, 0, tp_rank * groups * rows, (tp_rank + 1) * groups * rows).reshape(
                groups, rows, *self.tail
            )
            for name, rows in zip(self.names, self._rows_per_group, strict=True)
        ]
        return torch.cat(parts, dim=1).reshape(-1, *self.tail)

    def unshard(self, shards: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        rows = self._rows_per_group
        per_group = torch.cat(list(shards)).reshape(self.num_groups, sum(rows), *self.tail)
        parts = per_group.split(rows, dim=1)
        return {name: part.reshape(-1, *self.tail) for name, part in zip(self.names, parts, strict=True)}


def layer_layouts(
    arch: Architecture, layer: int, ep_size: int = 1, ep_rank: int = 0
) -> dict[str, ParameterLayout]:
    """Layouts of one transformer layer by the parameter's name inside the layer; `layer` counts over all
    stages. With experts: those that EP rank `ep_rank` holds.
    """
    prefix = f"model.layers.{layer}."
    attention = prefix + "self_attn."
    layouts: dict[str, ParameterLayout] = {
        "input_layernorm.weight": Replicated(
            hf_name=prefix + "input_layernorm.weight", shape=(arch.hidden_size,)
        ),
        "self_attention.linear_qkv.weight": _fused_qkv(arch, attention, "weight", (arch.hidden_size,)),
        "self_attention.linear_proj.weight": InputColumns(
            hf_name=attention + "o_proj.weight",
            out_size=arch.hidden_size,
            in_size=arch.num_attention_heads * arch.head_dim,
        ),
        "pre_mlp_layernorm.weight": Replicated(
            hf_name=prefix + "post_attention_layernorm.weight", shape=(arch.hidden_size,)
        ),
    }
    if arch.qkv_bias:
        layouts["self_attention.linear_qkv.bias"] = _fused_qkv(arch, attention, "bias", ())
    if arch.num_moe_experts is None:
        names = (f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight")
        return layouts | _swiglu(arch, "mlp", names, f"{prefix}mlp.down_proj.weight")
    moe = prefix + "block_sparse_moe."
    layouts["mlp.router.weight"] = Replicated(
        hf_name=moe + "gate.weight", shape=(arch.num_moe_experts, arch.hidden_size)
    )
    num_local = arch.num_moe_experts // ep_size
    for local in range(num_local):
        # Megatron counts the experts of a rank, folders those of the layer.
        expert = f"{moe}experts.{ep_rank * num_local + local}."
        names = (f"{expert}w1.weight", f"{expert}w3.weight")
        layouts |= _swiglu(arch, f"mlp.{EXPERTS}.{local}", names, f"{expert}w2.weight")
    return layouts


def stage_layouts(
    arch: Architecture, num_stages: int, stage: int, ep_size: int = 1, ep_rank: int = 0
) -> dict[str, ParameterLayout]:
    """Layouts of every parameter of one of the model's stages, virtual ones counted, on one EP rank, by
    Megatron's name (layers count from 0 in each stage, experts from 0 on each EP rank).
    """
    layouts: dict[str, ParameterLayout] = {}
    embedding = _vocab_rows(arch, "model.embed_tokens.weight")
    if stage == 0:
        layouts["embedding.word_embeddings.weight"] = embedding
    num_layers = arch.num_layers // num_stages
    for layer in range(num_layers):
        for name, layout in layer_layouts(arch, stage * num_layers + layer, ep_size, ep_rank).items():
            layouts[f"decoder.layers.{layer}.{name}"] = layout
    if stage == num_stages - 1:
        layouts["decoder.final_layernorm.weight"] = Replicated(
            hf_name="model.norm.weight", shape=(arch.hidden_size,)
        )
        if not arch.tie_word_embeddings:
            layouts["output_layer.weight"] = _vocab_rows(arch, "lm_head.weight")
        elif num_stages > 1:
            # With a tied head the last stage keeps its own copy of the embedding.
            layouts["output_layer.weight"] = embedding
    return layouts


def hf_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the HF model, in model order; a tied head has none of its own."""
    return {
        name: shape
        for layout in stage_layouts(arch, 1, 0).values()
        for name, shape in layout.hf_shapes().items()
    }


def is_expert(name: str) -> bool:
    """Does a Megatron name mean an expert's parameter, another one on each EP rank?"""
    return f".{EXPERTS}." in name


def local_layer_name(name: str) -> str:
    """A parameter's name in Megatron's local layers; Transformer Engine fuses the norms into the next
    projection.
    """
    name = name.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
    return name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")


def _swiglu(
    arch: Architecture, prefix: str, gate_up: tuple[str, str], down: str
) -> dict[str, ParameterLayout]:
    """The two weights of a SwiGLU layer, dense or an expert's, from HF's three."""
    return {
        f"{prefix}.linear_fc1.weight": FusedGateUp(
            gate_name=gate_up[0],
            up_name=gate_up[1],
            ffn_hidden_size=arch.ffn_hidden_size,
            hidden_size=arch.hidden_size,
        ),
        f"{prefix}.linear_fc2.weight": InputColumns(
            hf_name=down, out_size=arch.hidden_size, in_size=arch.ffn_hidden_size
        ),
    }


def _fused_qkv(arch: Architecture, prefix: str, kind: str, tail: tuple[int, ...]) -> FusedQkv:
    return FusedQkv(
        names=(f"{prefix}q_proj.{kind}", f"{prefix}k_proj.{kind}", f"{prefix}v_proj.{kind}"),
        num_heads=arch.num_attention_heads,
        num_groups=arch.num_query_groups,
        head_dim=arch.head_dim,
        tail=tail,
    )


def _vocab_rows(arch: Architecture, hf_name: str) -> VocabRows:
    return VocabRows(hf_name=hf_name, vocab_size=arch.vocab_size, hidden_size=arch.hidden_size)
