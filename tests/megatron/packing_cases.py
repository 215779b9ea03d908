"""A tiny real model through Megatron's schedule on packed rows, in any layout; logits and gradients of a loss
that weighs every logit of every real token."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch

from tests.megatron.layout_cases import gradients_by_name
from tests.megatron.stage_runner import tiny_architecture

LENGTHS = [9, 1, 14, 4, 6, 12]
SHAPE = (len(LENGTHS), max(LENGTHS) + 1)
# Two microbatches of different T; rows out of order.
BINS = [[2, 0, 5], [3, 1, 4]]


def make_ids(seed: int = 0) -> torch.Tensor:
    """`[S, L]` ids below 13, junk behind each sequence's end included."""
    return torch.randint(0, 13, SHAPE, generator=torch.Generator().manual_seed(seed))


def make_weights() -> torch.Tensor:
    """`[S, L, V]` float32."""
    return torch.randn(*SHAPE, 13, generator=torch.Generator().manual_seed(1))


class _Stage:
    """What `gradients_by_name` reads of a worker."""

    def __init__(self, model, arch, groups):
        self.chunks, self.arch, self.groups = [model], arch, groups


class _JoinVocabulary(torch.autograd.Function):
    """`[t, v]` of each TP rank side by side; a shard's gradient is its own slice, alike on all TP ranks."""

    @staticmethod
    def forward(ctx, logits_tv, groups):
        from rlcore.collectives import all_gather

        ctx.columns = slice(groups.tp_rank * logits_tv.shape[1], (groups.tp_rank + 1) * logits_tv.shape[1])
        return torch.cat(list(all_gather(logits_tv, groups.tp)), dim=1)

    @staticmethod
    def backward(ctx, grad):
        return grad[:, ctx.columns].contiguous(), None


@contextlib.contextmanager
def stage(parallel_values, cp_size, core_attention=None):
    """Groups and this rank's stage with seeded weights, inside Megatron's DDP."""
    from megatron.core.distributed import finalize_model_grads

    from megatron_worker import model_setup
    from megatron_worker.cpu_backend import cpu_backend
    from megatron_worker.groups import destroy_parallel, initialize_parallel
    from megatron_worker.hf_bridge import initialize_from_seed
    from rlcore.config import ParallelConfig

    parallel, arch = ParallelConfig(backend="cpu", cp=cp_size, **parallel_values), tiny_architecture()
    attention = core_attention or model_setup.CausalAttention
    with cpu_backend("cpu"), mock.patch.object(model_setup, "CausalAttention", attention):
        groups = initialize_parallel(parallel, "cpu")
        try:
            (model,) = model_setup.build_chunks(arch, parallel, "float32", groups)
            initialize_from_seed(model, arch, 7, groups)
            chunk = model_setup.wrap_ddp(model, parallel)
            model.config.finalize_model_grads_func = finalize_model_grads
            model.config.variable_seq_lengths = True
            yield parallel, arch, groups, chunk
        finally:
            destroy_parallel()


def run_schedule(chunk, groups, vocab_size, forwards, weights):
    """Forward and backward of the microbatches; the last stage returns each one's `[t, V]` logits.

    `forwards`: per microbatch a function of the stage that gives `[t, v]` logits (hidden states before the
    last stage). `weights`: per microbatch `[t, V]`. The loss is a plain sum: two values are returned, so the
    schedule multiplies by CP and divides by the number of microbatches, and DDP divides by DP x CP.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    collected = []

    def loss_of(weight_tv, output):
        logits_tv = output.flatten(0, 1)
        whole_tv = _JoinVocabulary.apply(logits_tv, groups)[:, :vocab_size]
        collected.append(whole_tv.detach())
        loss = (whole_tv * weight_tv).sum() * len(forwards) * groups.dp_size
        return loss, {}

    def forward_step(data, model):
        forward, weight_tv = next(data)
        return forward(model), lambda output: loss_of(weight_tv, output)

    chunk.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(zip(forwards, weights, strict=True)),
        model=[chunk],
        num_microbatches=len(forwards),
        seq_length=SHAPE[1],
        micro_batch_size=1,
        forward_only=False,
    )
    return collected


def packed_step(rank, world_size, parallel_values, cp_size, bins=BINS, ids_sl=None):
    """`[S, L, V]` logits (None before the last stage; rows of other DP ranks NaN) and whole gradients."""
    from megatron_worker.attention import packed_seq_params
    from rlcore.layout.context_parallel import ZigZag
    from rlcore.layout.packing import PackedLayout

    ids_sl = make_ids() if ids_sl is None else ids_sl
    lengths = LENGTHS[: ids_sl.shape[0]]
    with stage(parallel_values, cp_size) as (parallel, arch, groups, chunk):
        own = bins[groups.dp_rank :: groups.dp_size]
        tp_size = parallel.sp_size
        layouts = [PackedLayout.of_rows(lengths, rows, cp_size=cp_size, tp_size=tp_size) for rows in own]
        zigzags = [ZigZag.of_lengths(layout.padded_lengths, cp_size) for layout in layouts]
        forwards, weights = [], []
        for layout, zigzag in zip(layouts, zigzags, strict=True):
            ids_t = zigzag.split(layout.pack(ids_sl, 0), groups.cp)
            position_t = zigzag.split(layout.position_t, groups.cp)
            params = packed_seq_params(layout)
            forwards.append(
                lambda model, ids_t=ids_t, position_t=position_t, params=params: model(
                    ids_t[None], position_t[None], None, packed_seq_params=params
                )
            )
            weight = layout.pack(make_weights()[: ids_sl.shape[0]], 0.0)
            weights.append(zigzag.split(weight, groups.cp))
        collected = run_schedule(chunk, groups, arch.vocab_size, forwards, weights)
        gradients = gradients_by_name(_Stage(chunk, arch, groups))
        if not groups.is_last_stage:
            return None, gradients
        logits = torch.full((*ids_sl.shape, arch.vocab_size), torch.nan)
        for layout, zigzag, logits_tv in zip(layouts, zigzags, collected, strict=True):
            whole = layout.unpack(zigzag.gather(logits_tv, groups.cp), torch.nan, tuple(ids_sl.shape))
            logits = torch.where(torch.isnan(whole), logits, whole)
        return logits, gradients


def padded_step(rank, world_size, parallel_values, cp_size, own_attention):
    """The same without packing: right-padded rows in one microbatch; with `own_attention` False under
    Megatron's own core attention."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from rlcore.layout.context_parallel import ZigZag

    core_attention = None if own_attention else DotProductAttention
    with stage(parallel_values, cp_size, core_attention) as (_, arch, groups, chunk):
        length = -(-SHAPE[1] // (2 * cp_size)) * 2 * cp_size
        zigzag = ZigZag.of_lengths([length], cp_size)
        ids_ls = torch.nn.functional.pad(make_ids(), (0, length - SHAPE[1])).T
        weight_lsv = torch.nn.functional.pad(make_weights(), (0, 0, 0, length - SHAPE[1])).transpose(0, 1)
        real_ls = torch.arange(length)[:, None] < torch.tensor(LENGTHS)
        weight_lsv = torch.where(real_ls[..., None], weight_lsv, 0.0)
        ids_sl, weight_slv, position_sl = (
            zigzag.split(value, groups.cp).transpose(0, 1).contiguous()
            for value in (ids_ls, weight_lsv, torch.arange(length)[:, None].expand(-1, SHAPE[0]))
        )
        collected = run_schedule(
            chunk,
            groups,
            arch.vocab_size,
            [lambda model: model(ids_sl, position_sl, None)],
            [weight_slv.flatten(0, 1)],
        )
        gradients = gradients_by_name(_Stage(chunk, arch, groups))
        logits_ls = collected[0].reshape(SHAPE[0], -1, arch.vocab_size).transpose(0, 1)
        logits = zigzag.gather(logits_ls, groups.cp)[: SHAPE[1]].transpose(0, 1)
        return logits, gradients
