"""Runs a stage through Megatron's schedule without training, for tests that look at logits."""

from __future__ import annotations

import torch


def tiny_architecture():
    """Four layers, grouped queries, QKV bias, an untied head and 13 ids, which TP 2 does not divide."""
    from megatron_worker.architecture import Architecture

    return Architecture(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        head_dim=8,
        ffn_hidden_size=48,
        vocab_size=13,
        max_position_embeddings=32,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        qkv_bias=True,
    )


@torch.no_grad()
def full_logits(model, arch, groups, ids_sl):
    """`[S, L, V]` logits of one microbatch, gathered over TP, on the last stage; None on the others."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_worker.chunks import chunks_of
    from rlcore.collectives import all_gather

    chunks = chunks_of(model)
    position_sl = torch.arange(ids_sl.shape[1]).expand_as(ids_sl)

    def forward_step(data, stage):
        return stage(ids_sl, position_sl, None), lambda output, non_loss_data: output

    collected = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[None] * len(chunks),
        model=chunks,
        # The interleaved schedule takes no fewer than there are pipeline ranks: the same one again.
        num_microbatches=groups.pp_size if len(chunks) > 1 else 1,
        seq_length=ids_sl.shape[1],
        micro_batch_size=ids_sl.shape[0],
        forward_only=True,
        collect_non_loss_data=True,
    )
    if not groups.is_last_stage:
        return None
    return torch.cat(list(all_gather(collected[0], groups.tp)), dim=-1)[..., : arch.vocab_size]
