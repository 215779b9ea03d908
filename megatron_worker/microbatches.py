"""From a token-aligned step batch to the microbatches of Megatron's schedule, and back.

The one place that shifts: targets and everything that describes them move from the token to the position that
    predicts it, on the whole sequence, before anything is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlcore.batch import Microbatch, TrainBatch
from rlcore.collectives import all_reduce_
from rlcore.groups import ParallelGroups
from rlcore.ops.penalties import PenaltyTokens
from rlcore.sampling_mask import SamplingMask
from rlcore.step_weights import StepWeights

# Fill of positions that predict nothing, by field: neutral values that no mask lets through.
_FILLS = {
    "advantage": 0.0,
    "sampler_logprob": 0.0,
    "old_logprob": 0.0,
    "keep_old": True,
    "old_log_mass": 0.0,
    "reference_logprob": 0.0,
}
_WEIGHT_FILLS = {
    "policy_multiplier": 0.0,
    "kl_multiplier": 0.0,
    "nll_multiplier": 0.0,
    "sequence_keep": True,
    "importance": 1.0,
    "importance_keep": True,
}


def num_microbatches(batch: TrainBatch, microbatch_size: int, count_multiple: int = 1) -> int:
    """How many microbatches of `microbatch_size` sequences hold the batch, raised to a multiple of
    `count_multiple`; the last ones may need filler rows.
    """
    rows = microbatch_size * count_multiple
    return -(-batch.num_sequences // rows) * count_multiple


def common_count(
    batch: TrainBatch, microbatch_size: int, groups: ParallelGroups, count_multiple: int = 1
) -> int:
    """How many padded microbatches this rank runs: its own number, or with expert parallelism the largest of
    all replicas. Those exchange tokens in every forward, so one that stopped earlier would leave the others
    waiting.

    Collectives: with expert parallelism one all-reduce (max) of a number over `groups.dp`, else none.
    """
    count = num_microbatches(batch, microbatch_size, count_multiple)
    if groups.ep_size == 1:
        return count
    return int(all_reduce_(torch.tensor(count, device=batch.ids_sl.device), "max", groups.dp))


def padded_length(batch: TrainBatch, length_multiple: int) -> int:
    """The batch's padded length L, raised to a multiple (of TP under sequence parallelism)."""
    return -(-batch.ids_sl.shape[1] // length_multiple) * length_multiple


def check_splits(batch: TrainBatch) -> None:
    """`ValueError` for a batch without sequences, or without a single position that predicts something."""
    if batch.num_sequences == 0 or batch.ids_sl.shape[1] < 2:
        raise ValueError(
            f"a batch of shape {tuple(batch.ids_sl.shape)} holds nothing to predict: expected at least one "
            "sequence of "
            "at least two tokens."
        )


def split_batch(
    batch: TrainBatch,
    microbatch_size: int,
    length_multiple: int = 1,
    weights: StepWeights | None = None,
    counts_penalties: bool = False,
    count_multiple: int = 1,
    least_count: int = 1,
) -> list[Microbatch]:
    """Microbatches of equal shape, in the batch's order. Filler rows have zero masks and sample index -1.

    `weights`: what the loss reads of each token; None for a scoring pass. `counts_penalties`: prepare the
    tokens that repetition, presence and frequency penalties count. `count_multiple`: the number of
    microbatches is a multiple of it. `least_count`: and no less than this (see `common_count`). Raises as
    `check_splits`.
    """
    check_splits(batch)
    length = padded_length(batch, length_multiple)
    count = max(num_microbatches(batch, microbatch_size, count_multiple), least_count)
    rows = count * microbatch_size
    ids_sl = _pad(batch.ids_sl, rows, length, 0)
    sample_mask_s = _pad(batch.sample_mask_s[:, None], rows, 1, False)
    index_s = _pad(torch.arange(batch.num_sequences, device=ids_sl.device)[:, None], rows, 1, -1)
    columns = {
        "sample_mask": sample_mask_s.expand(rows, length),
        "sample_index": index_s.expand(rows, length),
        **{
            name: _shift(_pad(value_sl, rows, length, fill), fill)
            for name, (value_sl, fill) in described_columns(batch, weights).items()
        },
    }
    of_rows = (prompt_lengths(batch), batch.length_s)
    prompt_s, length_s = (_pad(value_s[:, None], rows, 1, 0)[:, 0] for value_s in of_rows)
    mask_row_sl = mask_rows(batch)
    if mask_row_sl is not None:
        mask_row_sl = _shift(_pad(mask_row_sl, rows, length, -1), -1).cpu()
    position_l = torch.arange(length, device=ids_sl.device)
    row_t = torch.arange(microbatch_size, device=ids_sl.device).repeat_interleave(length)
    chunks = [slice(start, start + microbatch_size) for start in range(0, rows, microbatch_size)]
    return [
        Microbatch(
            input_ids_bl=ids_sl[chunk],
            position_ids_bl=position_l.expand(microbatch_size, length),
            segment_t=torch.where(index_s[chunk, 0].repeat_interleave(length) < 0, -1, row_t),
            num_segments=microbatch_size,
            num_samples=batch.num_sequences,
            penalty_tokens=PenaltyTokens.of(ids_sl[chunk], prompt_s[chunk], length_s[chunk])
            if counts_penalties
            else None,
            sampling_mask=None if mask_row_sl is None else kept_ids(batch, mask_row_sl[chunk]),
            **{f"{name}_t": value[chunk].reshape(-1) for name, value in columns.items()},
        )
        for chunk in chunks
    ]


def described_columns(
    batch: TrainBatch, weights: StepWeights | None
) -> dict[str, tuple[torch.Tensor, float | bool]]:
    """What describes the token a position predicts, by `Microbatch` field: token-aligned `[S, L]`, not yet
    shifted, with the value of positions that predict nothing.
    """
    real_sl = torch.arange(batch.ids_sl.shape[1], device=batch.ids_sl.device) < batch.length_s[:, None]
    columns: dict[str, tuple[torch.Tensor, float | bool]] = {
        "target": (batch.ids_sl, 0),
        "real": (real_sl, False),
        "token_mask": (batch.token_mask_sl, False),
    }
    sources = [(batch, _FILLS)] if weights is None else [(batch, _FILLS), (weights, _WEIGHT_FILLS)]
    for source, fills in sources:
        for name, fill in fills.items():
            value_sl = getattr(source, f"{name}_sl")
            if value_sl is not None:
                columns[name] = (value_sl, fill)
    return columns


def mask_rows(batch: TrainBatch) -> torch.Tensor | None:
    """`[S, L]` int64, token-aligned: the row of the batch's `sampling_mask` that belongs to each response
    token; -1 elsewhere. None where the batch has none.
    """
    if batch.sampling_mask is None:
        return None
    row_sl = torch.arange(batch.ids_sl.numel(), device=batch.ids_sl.device).view_as(batch.ids_sl)
    return torch.where(batch.token_mask_sl, row_sl, -1)


def kept_ids(batch: TrainBatch, mask_row_t: torch.Tensor) -> SamplingMask:
    """The batch's `sampling_mask` at those of its rows, which may have any shape."""
    assert batch.sampling_mask is not None, "mask_rows has seen it"
    return batch.sampling_mask.select(mask_row_t.reshape(-1).cpu())


def prompt_lengths(batch: TrainBatch) -> torch.Tensor:
    """`[S]`: tokens before the first response token; all, where there is none."""
    first_s = batch.token_mask_sl.to(torch.int8).argmax(dim=1)
    return torch.where(batch.token_mask_sl.any(dim=1), first_s, batch.length_s)


def join_scores(
    parts_t: Sequence[torch.Tensor], batch: TrainBatch, length: int, fill: float | bool
) -> torch.Tensor:
    """Predictor-aligned results of the microbatches, in order, as token-aligned `[S, L]` of the batch.

    `length` is the microbatches' padded length. Filler rows and padding are cut; the first token of a
    sequence, which nothing predicts, and padding get `fill`.
    """
    predicted_sl = torch.cat([part.reshape(-1, length) for part in parts_t])[: batch.num_sequences]
    out_sl = torch.full(batch.ids_sl.shape, fill, dtype=predicted_sl.dtype, device=predicted_sl.device)
    out_sl[:, 1:] = predicted_sl[:, : batch.ids_sl.shape[1] - 1]
    position_l = torch.arange(batch.ids_sl.shape[1], device=out_sl.device)
    return out_sl.masked_fill(position_l >= batch.length_s[:, None], fill)


def _pad(value_sl: torch.Tensor, rows: int, length: int, fill: float | bool) -> torch.Tensor:
    """A copy of `[rows, length]` with the value in its upper left corner."""
    out_sl = torch.full((rows, length), fill, dtype=value_sl.dtype, device=value_sl.device)
    out_sl[: value_sl.shape[0], : value_sl.shape[1]] = value_sl
    return out_sl


def _shift(value_sl: torch.Tensor, fill: float | bool) -> torch.Tensor:
    """Entry j becomes that of token j + 1; the last position predicts nothing."""
    return torch.cat([value_sl[:, 1:], torch.full_like(value_sl[:, :1], fill)], dim=1)
