"""From a token-aligned step batch to packed microbatches, cut over context-parallel ranks, and back.

Order: everything moves to the position that predicts it on the whole sequence (`shift_to_predictor`), is laid
end to end (`PackedLayout`), and only then cut (`ZigZag`). Results go the same way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_worker.microbatches import check_splits, described_columns, kept_ids, mask_rows, prompt_lengths
from rlcore.batch import Microbatch, TrainBatch
from rlcore.collectives import Group
from rlcore.groups import ParallelGroups
from rlcore.layout.balancing import plan_microbatches
from rlcore.layout.context_parallel import ZigZag
from rlcore.layout.packing import PackedLayout, shift_to_predictor, shift_to_token, unpack_all
from rlcore.ops.penalties import PenaltyTokens
from rlcore.step_weights import StepWeights


@dataclass(frozen=True, kw_only=True)
class PackedRow:
    """Where the tokens of a packed microbatch come from, and which of them this CP rank holds."""

    layout: PackedLayout
    zigzag: ZigZag

    def local(self, value_t: torch.Tensor, cp_group: Group) -> torch.Tensor:
        """This CP rank's `[t]` of the row's `[T]`."""
        return self.zigzag.split(value_t, cp_group)

    def whole(self, value_t: torch.Tensor, cp_group: Group) -> torch.Tensor:
        """The row's `[T]` from every CP rank's `[t]`. Collective over CP."""
        if value_t.dtype == torch.bool:
            return self.zigzag.gather(value_t.to(torch.uint8), cp_group).bool()
        return self.zigzag.gather(value_t, cp_group)


def pack_batch(
    batch: TrainBatch,
    token_budget: int,
    groups: ParallelGroups,
    tp_size: int,
    weights: StepWeights | None = None,
    counts_penalties: bool = False,
    count_multiple: int = 1,
) -> list[Microbatch]:
    """Packed microbatches of at most `token_budget` positions (all CP ranks together), equally many on every
    data-parallel rank; a rank with too few sequences has fillers, which count for nothing.

    `tp_size`: that of sequence parallelism, 1 without. The others: as in `split_batch`.
    Collectives: one all-reduce over DP. Raises `ValueError` on every rank for a sequence that the budget does
    not hold, and as `check_splits`.
    """
    check_splits(batch)
    length_s = batch.length_s.cpu()
    device = batch.ids_sl.device
    bins = plan_microbatches(
        length_s,
        token_budget,
        groups.dp,
        cp_size=groups.cp_size,
        tp_size=tp_size,
        count_multiple=count_multiple,
        device=device,
    )
    columns = {
        name: (shift_to_predictor(value_sl, batch.length_s, fill), fill)
        for name, (value_sl, fill) in described_columns(batch, weights).items()
    }
    mask_row_sl = mask_rows(batch)
    if mask_row_sl is not None:
        mask_row_sl = shift_to_predictor(mask_row_sl, batch.length_s, -1)
    penalties = None
    if counts_penalties:
        penalties = PenaltyTokens.of(batch.ids_sl, prompt_lengths(batch), batch.length_s)
    return [
        _pack_row(
            batch,
            PackedLayout.of_rows(length_s, rows, cp_size=groups.cp_size, tp_size=tp_size, device=device),
            columns,
            (penalties, mask_row_sl),
            groups.cp,
        )
        for rows in bins
    ]


def _pack_row(
    batch: TrainBatch,
    layout: PackedLayout,
    columns: dict[str, tuple[torch.Tensor, float | bool]],
    of_tokens: tuple[PenaltyTokens | None, torch.Tensor | None],
    cp_group: Group,
) -> Microbatch:
    """One microbatch: this CP rank's tokens of one packed row. `of_tokens`: what penalties count, and the
    predicted tokens' rows of the sampling mask `[S, L]`.
    """
    penalties, mask_row_sl = of_tokens
    zigzag = ZigZag.of_lengths(layout.padded_lengths, layout.cp_size, batch.ids_sl.device)
    packed = PackedRow(layout=layout, zigzag=zigzag)

    def local(value_t: torch.Tensor) -> torch.Tensor:
        return packed.local(value_t, cp_group)

    row_t = local(layout.row_t)
    in_batch_t = row_t.clamp(min=0)
    index_t = in_batch_t * batch.ids_sl.shape[1] + local(layout.column_t).clamp(min=0)
    return Microbatch(
        input_ids_bl=local(layout.pack(batch.ids_sl, 0))[None],
        position_ids_bl=local(layout.position_t)[None],
        sample_mask_t=torch.where(row_t >= 0, batch.sample_mask_s[in_batch_t], False),
        sample_index_t=row_t,
        segment_t=local(layout.segment_t),
        num_segments=layout.num_segments,
        num_samples=batch.num_sequences,
        penalty_tokens=None if penalties is None else penalties.rows(index_t.cpu()),
        sampling_mask=None if mask_row_sl is None else kept_ids(batch, local(layout.pack(mask_row_sl, -1))),
        packed=packed,
        **{f"{name}_t": local(layout.pack(value_sl, fill)) for name, (value_sl, fill) in columns.items()},
    )


def unpack_scores(
    microbatches: Sequence[Microbatch],
    parts_t: Sequence[torch.Tensor],
    batch: TrainBatch,
    fill: float | bool,
    cp_group: Group,
) -> torch.Tensor:
    """Predictor-aligned `[t]` results of the microbatches as token-aligned `[S, L]` of the batch, on every CP
    rank; `fill` where nothing was predicted. Collective over CP: one all-gather a microbatch.
    """
    rows = [microbatch.packed for microbatch in microbatches]
    whole = [row.whole(part_t, cp_group) for row, part_t in zip(rows, parts_t, strict=True)]
    shape = (batch.ids_sl.shape[0], batch.ids_sl.shape[1])
    predicted_sl = unpack_all([row.layout for row in rows], whole, fill, shape)
    return shift_to_token(predicted_sl, batch.length_s, fill)
