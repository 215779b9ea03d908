"""What the op is given: shapes, dtypes, ids and which of them this rank holds, checked at the border."""

from __future__ import annotations

import torch

from rlcore.collectives import Group, group_size
from rlcore.ops.penalties import PenaltyTokens
from rlcore.sampling_mask import SamplingMask


def check_coverage(logits_tv: torch.Tensor, start: int, vocab_size: int, tp_group: Group) -> None:
    """A rank that is alone holds every id; several are not asked, because that would take a collective."""
    stop = start + logits_tv.shape[1]
    if group_size(tp_group) == 1 and (start > 0 or stop < vocab_size):
        raise ValueError(
            f"logits of ids {start} to {stop} for a vocabulary of {vocab_size}, and no other rank "
            "holds the rest. Pass the tensor-parallel group, or the vocabulary these columns are."
        )


def check_shapes(logits_tv: torch.Tensor, target_t: torch.Tensor) -> None:
    """`ValueError` for anything but `[t, v]` floats and `[t]` integers."""
    if logits_tv.dim() != 2 or target_t.dim() != 1 or logits_tv.shape[0] != target_t.shape[0]:
        raise ValueError(
            f"logits of shape {tuple(logits_tv.shape)} and targets of shape {tuple(target_t.shape)}: "
            "expected [t, v] and "
            "[t]. Flatten batch and sequence into one token axis."
        )
    if not logits_tv.is_floating_point() or target_t.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"logits are {logits_tv.dtype} and targets {target_t.dtype}: expected a float dtype and integer "
            "ids, int32 or int64."
        )


def check_targets(target_t: torch.Tensor, vocab_size: int) -> None:
    """Raises `ValueError` naming the first row whose target is no id of the vocabulary."""
    bad_t = (target_t < 0) | (target_t >= vocab_size)
    if bad_t.any():
        row = int(bad_t.nonzero()[0])
        raise ValueError(
            f"target {int(target_t[row])} in row {row} is outside the vocabulary [0, {vocab_size}). "
            "Give masked positions any valid id, such as 0."
        )


def check_ids(
    target_t: torch.Tensor, vocab_size: int, replay: SamplingMask | None, penalties: PenaltyTokens | None
) -> None:
    """Reads values back: targets, replayed ids and penalty tokens lie in the vocabulary, a row each."""
    check_targets(target_t, vocab_size)
    if replay is not None:
        replay.check(target_t.shape[0], vocab_size)
    if penalties is not None:
        penalties.check(target_t.shape[0], vocab_size)
