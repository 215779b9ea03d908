"""Faults that `rlcore check` must find, each planted in every rank's process by replacing one function.

`FAULTS`: name -> (how it is planted, layout where it matters, quantity that must give it away).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tests.megatron.planted_model_faults import (
    VPP,
    chunks_counted_as_microbatches,
    expert_gradients_scaled_by_ep,
    experts_of_every_rank_counted_from_0,
    experts_reduced_like_dense_weights,
    gradient_of_later_chunks_scaled,
    gradient_of_one_tp_rank_scaled,
    last_norm_of_tp_rank_1_scaled,
    layers_of_a_rank_in_a_row,
    norms_not_summed_over_tp,
    reference_of_other_weights,
    tied_embedding_not_summed,
    tied_head_of_the_last_stage_scaled,
    tp_shards_counted_as_copies,
)


def wrong_cp_factor():
    """Divides by CP, as if the schedule's factor were not cancelled by the average over DP x CP."""
    from megatron_worker import forward_step

    right = forward_step.cancel_megatron_scaling

    def planted(*args):
        return right(*args) / 2

    return mock.patch.object(forward_step, "cancel_megatron_scaling", planted)


def dp_size_left_out():
    """Data parallelism's average is not cancelled."""
    from megatron_worker import forward_step

    return mock.patch.object(
        forward_step,
        "cancel_megatron_scaling",
        lambda loss, num_microbatches, dp_size, cp_size, contract: loss * num_microbatches,
    )


def schedule_left_out():
    """Only the average over data and context parallel ranks is cancelled: with as many microbatches as CP
    ranks the schedule's two factors hide each other.
    """
    from megatron_worker import forward_step

    return mock.patch.object(
        forward_step,
        "cancel_megatron_scaling",
        lambda loss, num_microbatches, dp_size, cp_size, contract: loss * (dp_size * cp_size),
    )


def microbatches_left_out():
    """The schedule's division by the number of microbatches is not cancelled."""
    from megatron_worker import forward_step

    return mock.patch.object(
        forward_step,
        "cancel_megatron_scaling",
        lambda loss, num_microbatches, dp_size, cp_size, contract: loss * dp_size,
    )


@contextlib.contextmanager
def targets_shifted_after_the_split():
    """Each CP rank shifts what it holds: wrong at every seam of its chunks."""
    from megatron_worker import packed_microbatches

    pack, local = packed_microbatches.PackedLayout.pack, packed_microbatches.PackedRow.local

    def planted_pack(self, value_sl, fill):
        packed_t = pack(self, value_sl, fill)
        packed_t.is_late = getattr(value_sl, "is_late", False)
        return packed_t

    def planted_local(self, value_t, cp_group):
        own_t = local(self, value_t, cp_group)
        return torch.roll(own_t, -1, 0) if getattr(value_t, "is_late", False) else own_t

    with (
        mock.patch.object(packed_microbatches, "shift_to_predictor", _unshifted),
        mock.patch.object(packed_microbatches.PackedLayout, "pack", planted_pack),
        mock.patch.object(packed_microbatches.PackedRow, "local", planted_local),
    ):
        yield


@contextlib.contextmanager
def targets_shifted_after_packing():
    """The whole row is shifted: a sequence's last token predicts the next one's first."""
    from megatron_worker import packed_microbatches

    pack = packed_microbatches.PackedLayout.pack

    def planted(self, value_sl, fill):
        packed_t = pack(self, value_sl, fill)
        return torch.roll(packed_t, -1, 0) if getattr(value_sl, "is_late", False) else packed_t

    with (
        mock.patch.object(packed_microbatches, "shift_to_predictor", _unshifted),
        mock.patch.object(packed_microbatches.PackedLayout, "pack", planted),
    ):
        yield


def _unshifted(value_sl, length_s, fill):
    late_sl = value_sl.clone()
    late_sl.is_late = True
    return late_sl


def unpadded_cu_seqlens():
    """Attention and rotary positions read the real boundaries of a padded row."""
    from megatron_worker import forward_step

    right = forward_step.packed_seq_params

    def planted(layout):
        # To what zig-zag can cut, and the rest of the row to the last sequence: lengths that do not add up or
        # divide are refused, and a fault that is refused proves nothing.
        multiple = 2 * layout.cp_size
        boundaries = layout.cu_seqlens // multiple * multiple
        boundaries[-1] = layout.cu_seqlens_padded[-1]
        boundaries = boundaries.unique_consecutive()
        names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        longest = int((boundaries[1:] - boundaries[:-1]).max())
        changed = dict.fromkeys(names, boundaries) | dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), longest)
        return dataclasses.replace(right(layout), **changed)

    return mock.patch.object(forward_step, "packed_seq_params", planted)


def temperature_on_every_stage():
    """What each stage returns is divided by the temperature: hidden states too, and logits twice."""
    from megatron_worker.forward_step import OutputHead

    run = OutputHead.run
    return mock.patch.object(OutputHead, "run", lambda *args: run(*args) / TEMPERATURE)


def temperature_twice():
    """The last stage divides logits that the op divides again."""
    from megatron_worker.forward_step import OutputHead

    run = OutputHead.run

    def planted(self, *args):
        output = run(self, *args)
        return output / TEMPERATURE if self.groups.is_last_stage else output

    return mock.patch.object(OutputHead, "run", planted)


@contextlib.contextmanager
def keep_old_ignored():
    """-inf of the old pass becomes 0 and its tokens stay in the loss and its denominator."""
    from megatron_worker import forward_step
    from rlcore import step_weights

    right, counted = forward_step.microbatch_loss, step_weights.retained_mask

    def planted(microbatch, scores, loss, cp_group=None):
        old_t = torch.nan_to_num(microbatch.old_logprob_t, neginf=0.0)
        everything_t = torch.ones_like(microbatch.keep_old_t)
        changed = dataclasses.replace(microbatch, old_logprob_t=old_t, keep_old_t=everything_t)
        return right(changed, scores, loss, cp_group)

    def planted_count(token_mask_sl, sample_mask_sl, keep_old_sl, sequence_keep_sl):
        return counted(token_mask_sl, sample_mask_sl, torch.ones_like(keep_old_sl), sequence_keep_sl)

    with (
        mock.patch.object(forward_step, "microbatch_loss", planted),
        mock.patch.object(step_weights, "retained_mask", planted_count),
    ):
        yield


@contextlib.contextmanager
def zigzag_chunks_swapped():
    """Each rank holds its late chunk before its early one."""
    from megatron_worker import attention
    from rlcore.layout import context_parallel

    right = context_parallel.owned_positions

    def planted(padded_lengths, cp_size, cp_rank):
        owned, swapped, start = right(padded_lengths, cp_size, cp_rank), [], 0
        for length in padded_lengths:
            early, late = owned[start : start + length // cp_size].chunk(2)
            swapped += [late, early]
            start += length // cp_size
        return torch.cat(swapped)

    # Attention knows Megatron's order by itself, as Transformer Engine's does.
    own = {}

    def right_order(padded_lengths, cp_size, device):
        key = (padded_lengths, cp_size)
        if key not in own:
            owned_rt = torch.stack([right(padded_lengths, cp_size, rank) for rank in range(cp_size)])
            own[key] = context_parallel.ZigZag(
                cp_size=cp_size, owned_rt=owned_rt, origin_t=torch.argsort(owned_rt.reshape(-1))
            )
        return own[key]

    with (
        mock.patch.object(context_parallel, "owned_positions", planted),
        mock.patch.object(attention, "_zigzag", right_order),
    ):
        yield


@contextlib.contextmanager
def mask_shifted_by_one():
    """The token mask describes the position after the one that predicts the token."""
    from megatron_worker import microbatches, packed_microbatches

    right = microbatches.described_columns

    def planted(batch, weights):
        columns = right(batch, weights)
        mask_sl, fill = columns["token_mask"]
        columns["token_mask"] = (torch.roll(mask_sl, 1, 1), fill)
        return columns

    with (
        mock.patch.object(microbatches, "described_columns", planted),
        mock.patch.object(packed_microbatches, "described_columns", planted),
    ):
        yield


def denominators_of_each_rank():
    """Token counts are not added up over data-parallel ranks."""
    from rlcore.ops import aggregation

    return mock.patch.object(aggregation, "all_reduce_", lambda tensor, op, group: tensor)


def padding_vocabulary_counted():
    """Rows of the embedding that only pad the vocabulary take part in the normaliser."""
    from megatron_worker import forward_step

    right = forward_step.VocabShard

    class Planted:
        @staticmethod
        def even(padded_size: int, size: int, group: Any):
            return right.even(padded_size, padded_size, group)

    return mock.patch.object(forward_step, "VocabShard", Planted)


TEMPERATURE = 0.8
"""Of the test's config."""

TP2PP2_SP = {"tp": 2, "pp": 2, "sequence_parallel": True}
PACKED_SP = {**TP2PP2_SP, "packed": True}
PP2CP2 = {"pp": 2, "cp": 2}
DP2CP2 = {"dp": 2, "cp": 2}
TP2PP2VPP2 = {"tp": 2, "pp": 2, "vpp": VPP}

# The test's config is dense, so the tiny model is given experts.
EP2 = {"dp": 2, "ep": 2, "adds_experts": True}

EVERY_COPY = "gradient, every rank's own copy"

FAULTS = {
    "wrong_cp_factor": (wrong_cp_factor, PP2CP2, "loss scale"),
    "dp_size_left_out": (dp_size_left_out, DP2CP2, "loss scale"),
    "schedule_left_out": (schedule_left_out, DP2CP2, "loss scale"),
    "microbatches_left_out": (microbatches_left_out, DP2CP2, "loss scale"),
    "targets_shifted_after_the_split": (targets_shifted_after_the_split, PP2CP2, "logprob"),
    "targets_shifted_after_packing": (targets_shifted_after_packing, PACKED_SP, "metrics"),
    "unpadded_cu_seqlens": (unpadded_cu_seqlens, DP2CP2, "logprob"),
    "temperature_on_every_stage": (temperature_on_every_stage, TP2PP2_SP, "logprob"),
    "temperature_twice": (temperature_twice, TP2PP2_SP, "logprob"),
    "keep_old_ignored": (keep_old_ignored, TP2PP2_SP, "loss"),
    "zigzag_chunks_swapped": (zigzag_chunks_swapped, PP2CP2, "logprob"),
    "mask_shifted_by_one": (mask_shifted_by_one, PACKED_SP, "loss"),
    "denominators_of_each_rank": (denominators_of_each_rank, DP2CP2, "loss"),
    "padding_vocabulary_counted": (padding_vocabulary_counted, TP2PP2_SP, "logprob"),
    "gradient_of_one_tp_rank_scaled": (
        gradient_of_one_tp_rank_scaled,
        TP2PP2_SP,
        "gradient layers.*.mlp.gate_proj.weight",
    ),
    "norms_not_summed_over_tp": (
        norms_not_summed_over_tp,
        TP2PP2_SP,
        "gradient layers.*.input_layernorm.weight",
    ),
    "layers_of_a_rank_in_a_row": (layers_of_a_rank_in_a_row, TP2PP2VPP2, "logprob"),
    "chunks_counted_as_microbatches": (chunks_counted_as_microbatches, TP2PP2VPP2, "loss scale"),
    "gradient_of_later_chunks_scaled": (
        gradient_of_later_chunks_scaled,
        TP2PP2VPP2,
        "gradient layers.*.mlp.down_proj.weight",
    ),
    "tied_embedding_not_summed": (tied_embedding_not_summed, TP2PP2_SP, "gradient embed_tokens.weight"),
    "last_norm_of_tp_rank_1_scaled": (last_norm_of_tp_rank_1_scaled, TP2PP2_SP, EVERY_COPY),
    "tied_head_of_the_last_stage_scaled": (tied_head_of_the_last_stage_scaled, TP2PP2_SP, EVERY_COPY),
    "tp_shards_counted_as_copies": (tp_shards_counted_as_copies, TP2PP2_SP, "metrics"),
    "reference_of_other_weights": (reference_of_other_weights, TP2PP2_SP, "reference logprob"),
    "expert_gradients_scaled_by_ep": (expert_gradients_scaled_by_ep, EP2, "loss scale"),
    "experts_reduced_like_dense_weights": (
        experts_reduced_like_dense_weights,
        EP2,
        "gradient layers.*.block_sparse_moe.experts.*.w2.weight",
    ),
    "experts_of_every_rank_counted_from_0": (experts_of_every_rank_counted_from_0, EP2, "logprob"),
}


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """The fault while open; None: nothing."""
    if name is None:
        yield
        return
    with FAULTS[name][0]():
        yield
