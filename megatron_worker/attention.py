"""Core attention of Megatron's local layers on any device: packed rows (thd), padded rows (sbhd), context
parallelism, grouped queries. On a GPU with Transformer Engine its own attention is used instead; that path
has not run with packed rows or CP.

How to run a `GPTModel` of `megatron_worker.model_setup.build_chunks` on a packed microbatch, with or without
CP (checked against megatron-core 0.16.1, rotary embeddings unfused):

    tp_size = groups.tp_size if sequence_parallel else 1
    layout = PackedLayout.of_rows(length_s, rows, cp_size=groups.cp_size, tp_size=tp_size)
    zigzag = ZigZag.of_lengths(layout.padded_lengths, groups.cp_size)
    ids_t = zigzag.split(layout.pack(ids_sl, 0), groups.cp)                 # [t], this CP rank's
    position_t = zigzag.split(layout.position_t, groups.cp)
    params = packed_seq_params(layout)
    logits = model(ids_t[None], position_t[None], None, packed_seq_params=params)   # [1, t, v]

- Every stage and TP rank gets the same `ids_t`; Megatron cuts `t` over TP itself under sequence parallelism.
- Rotary embeddings read `packed_seq_params` only, never the position ids: they restart at each boundary of
  `cu_seqlens_q_padded`, and with CP they take chunks r and 2 CP - 1 - r of each sequence from the attention's
  own CP group, so the tokens must be in zig-zag order. `packed_seq_params.cp_group` stays None. `max_seqlen`
  is that of the *padded* sequences on all CP ranks together; a smaller one gives a shape error.
- A gradient is the sum over CP ranks; Megatron's DDP reduces over DP x CP. Per-token results of the last
  stage come back with `zigzag.gather`, then `layout.unpack`.
- Pipelines: Megatron's schedule needs `config.variable_seq_lengths` where microbatches differ in T.

Padded rows `[L, b]` under CP are one sequence of L tokens per row, in zig-zag order of L, without
`packed_seq_params`; L must be a multiple of 2 x CP.

Source: keys and values gathered over CP as in Llama 3 (Dubey et al., 2024, section 3.3.2); zig-zag order and
thd boundaries as in Megatron-core and Transformer Engine.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils.checkpoint import checkpoint

from rlcore.collectives import Group, group_rank, group_size
from rlcore.layout.context_parallel import ZigZag
from rlcore.layout.packing import PackedLayout

# Queries whose mask exists at once where a chunk's queries come late in their sequence: with 131,072 keys a
# mask of bools is 128 MiB.
QUERY_BLOCK = 1024


def packed_seq_params(layout: PackedLayout) -> PackedSeqParams:
    """What Megatron's layers need to know of a packed microbatch.

    All four boundaries are the padded ones: padding is the tail of its sequence, which no real token sees, so
    attention and rotary embeddings need not tell it apart.
    """
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=layout.cu_seqlens_padded,
        cu_seqlens_kv=layout.cu_seqlens_padded,
        cu_seqlens_q_padded=layout.cu_seqlens_padded,
        cu_seqlens_kv_padded=layout.cu_seqlens_padded,
        max_seqlen_q=layout.max_seqlen,
        max_seqlen_kv=layout.max_seqlen,
    )


class CausalAttention(MegatronModule):
    """Takes the place of Megatron's `DotProductAttention` in a layer spec; same softmax scale, no parameters.

    `ValueError` for what it does not compute: dropout, windows, softmax offsets, masks other than causal.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        _check_supported(config, attn_mask_type, attention_type)
        if pg_collection is None:
            raise ValueError("CausalAttention needs pg_collection with Megatron's context-parallel group.")
        self.cp_group: Group = pg_collection.cp
        assert config.kv_channels is not None
        self.softmax_scale = 1 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Packed: query `[t, h, d]`, key and value `[t, g, d]` give `[t, h d]`, or `[t, 1, ...]` gives
        `[t, 1, h d]`. Otherwise `[l, b, h, d]` and `[k, b, g, d]` give `[l, b, h d]`.

        Always causal within a sequence. Fewer queries than keys (decoding with a cache) are the last ones.
        Collectives: with CP one all-gather of keys and values forward, one reduce-scatter backward.
        """
        if attention_mask is not None or attention_bias is not None:
            raise ValueError(
                "CausalAttention takes no attention mask and no bias: pass None. Right padding needs neither."
            )
        is_packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        shape = query.shape[:-2]
        if is_packed and query.dim() == 3:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        if is_packed or group_size(self.cp_group) > 1:
            lengths = (
                _packed_lengths(packed_seq_params)
                if packed_seq_params is not None and is_packed
                else (query.shape[0] * group_size(self.cp_group),)
            )
            context = zigzag_attention(query, key, value, lengths, self.cp_group, self.softmax_scale)
        else:
            context = last_queries_attention(query, key, value, self.softmax_scale)
        return context.reshape(*shape, -1)


def zigzag_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    padded_lengths: tuple[int, ...],
    cp_group: Group,
    scale: float,
) -> torch.Tensor:
    """Causal attention within each sequence of a row whose tokens lie in zig-zag order over CP ranks.

    Maths: softmax(scale q k) v over the keys at or before the query in its own sequence.
    Shapes: query `[t, b, h, d]`, key and value `[t, b, g, d]`, h a multiple of g; result as query.
    Memory: keys and values of all T tokens on every rank, kept for backward; no mask of T x T. Under CP masks
    of QUERY_BLOCK x sequence exist one at a time; backward computes each block again.
    Collectives: with CP one all-gather of this rank's keys and values; backward one reduce-scatter that sums
    their gradients over CP, in their dtype. Every rank runs both whatever its data.
    Errors: `ValueError` where lengths do not add up to the tokens or 2 x CP does not divide one.
    """
    cp_size, cp_rank = group_size(cp_group), group_rank(cp_group)
    if sum(padded_lengths) != query.shape[0] * cp_size or key.shape[0] != query.shape[0]:
        raise ValueError(
            f"{query.shape[0]} queries and {key.shape[0]} keys on each of {cp_size} context-parallel "
            f"ranks: the sequences {list(padded_lengths)} hold {sum(padded_lengths)} tokens. Build "
            "packed_seq_params from the layout that packed them."
        )
    if cp_size > 1:
        layout = _zigzag(padded_lengths, cp_size, query.device)
        key, value = layout.gather_summed(torch.stack([key, value], dim=1), cp_group).unbind(1)
    contexts, start, own = [], 0, 0
    for length in padded_lengths:
        size = length if cp_size == 1 else length // (2 * cp_size)
        for chunk in (0,) if cp_size == 1 else (cp_rank, 2 * cp_size - 1 - cp_rank):
            stop = start + (chunk + 1) * size
            contexts.append(
                last_queries_attention(query[own : own + size], key[start:stop], value[start:stop], scale)
            )
            own += size
        start += length
    return torch.cat(contexts)


def last_queries_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention of one sequence's last l tokens to its first k, `[l, b, h, d]` and `[k, b, g, d]`.

    Collectives: none. `ValueError` for more queries than keys.
    """
    num_queries, num_keys = query.shape[0], key.shape[0]
    if num_queries > num_keys:
        raise ValueError(f"{num_queries} queries but {num_keys} keys: expected at least as many keys.")
    if num_queries == num_keys:
        return _attend(query, key, value, None, scale)
    contexts = []
    for first in range(0, num_queries, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, num_queries)
        stop = num_keys - num_queries + last
        # Backward would keep every block's mask, T x T / (2 CP) in all: it computes the block again instead.
        contexts.append(
            checkpoint(
                _attend_block,
                query[first:last],
                key[:stop],
                value[:stop],
                scale,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        )
    return torch.cat(contexts)


def _attend_block(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """The last l queries of k keys, with their mask."""
    position_k = torch.arange(key.shape[0], device=query.device)
    sees_lk = position_k <= position_k[key.shape[0] - query.shape[0] :, None]
    return _attend(query, key, value, sees_lk, scale)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sees_lk: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """torch's attention, causal where `sees_lk` is None; it wants `[b, heads, tokens, d]`."""
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    context = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=sees_lk,
        is_causal=sees_lk is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return context.permute(2, 0, 1, 3)


def _packed_lengths(params: PackedSeqParams) -> tuple[int, ...]:
    """Padded length of each sequence. On a GPU this waits for the boundaries, as Megatron's unfused rotary
    embedding does.
    """
    boundaries: Any = (
        params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
    )
    return tuple((boundaries[1:] - boundaries[:-1]).tolist())


@lru_cache(maxsize=16)
def _zigzag(padded_lengths: tuple[int, ...], cp_size: int, device: torch.device) -> ZigZag:
    """Every layer of a microbatch asks for the same one."""
    return ZigZag.of_lengths(padded_lengths, cp_size, device)


def _check_supported(config: TransformerConfig, attn_mask_type: AttnMaskType, attention_type: str) -> None:
    checks = (
        ("attention_type", attention_type, "self"),
        ("attn_mask_type", attn_mask_type, AttnMaskType.causal),
        ("attention_dropout", config.attention_dropout, 0.0),
        ("window_size", config.window_size, None),
        ("softmax_type", config.softmax_type, "vanilla"),
    )
    for name, value, expected in checks:
        if value != expected:
            raise ValueError(f"CausalAttention: {name}={value!r} is not supported, expected {expected!r}.")
