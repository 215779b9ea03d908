"""Prompts of all replicas to the rank that has the engine, and each replica's responses back to its ranks.

The engine's rank is rank 0 of the run, the first rank of the first replica.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from rlcore.batch import Prompt, Rollout
from rlcore.collectives import all_gather, broadcast_, scatter
from rlcore.groups import ParallelGroups
from rlcore.sampling_mask import SamplingMask

_NUMBERS = ("prompt_length_s", "length_s", "finished_s", "group_id_s", "version_s")
"""Fields of a rollout that travel beside the ids, in this order."""


def gather_prompts(
    prompts: Sequence[Prompt], seed: int, groups: ParallelGroups, device: torch.device
) -> list[tuple[list[Prompt], int]]:
    """Prompts (ids and group, without the answer) and seed of every replica, in data-parallel order.

    Collectives: over `groups.dp`, two all-gathers: three int64, then the longest replica's ids and two int64
    a prompt.
    """
    ids = [token for prompt in prompts for token in prompt.ids]
    sizes_rn = all_gather(torch.tensor([len(prompts), len(ids), seed], device=device), groups.dp).tolist()
    most_prompts, most_ids = (max(sizes[axis] for sizes in sizes_rn) for axis in (0, 1))
    lengths, ids_of_groups = [len(prompt.ids) for prompt in prompts], [prompt.group_id for prompt in prompts]
    padding = [0] * (most_prompts - len(prompts))
    flat = [*lengths, *padding, *ids_of_groups, *padding, *ids, *([0] * (most_ids - len(ids)))]
    gathered_rn = all_gather(torch.tensor(flat, dtype=torch.int64, device=device), groups.dp).tolist()
    return [
        (_unpack(flat, most_prompts, num_prompts), own_seed)
        for flat, (num_prompts, _, own_seed) in zip(gathered_rn, sizes_rn, strict=True)
    ]


def _unpack(flat: Sequence[int], most_prompts: int, num_prompts: int) -> list[Prompt]:
    prompts, start = [], 2 * most_prompts
    for index in range(num_prompts):
        length, group_id = flat[index], flat[most_prompts + index]
        prompts.append(Prompt(ids=list(flat[start : start + length]), group_id=group_id))
        start += length
    return prompts


def share_rollouts(
    drawn: Sequence[Rollout] | None, kept: bool, groups: ParallelGroups, device: torch.device
) -> Rollout:
    """This rank's replica's rollout. `drawn`: one a replica on rank 0, equally many rows; None elsewhere.

    Collectives: a broadcast of three int64 over the world; then, for ids and numbers, logprobs, and with
    `kept` two more: one scatter over the replicas' first ranks and one broadcast over the model replica each.
    """
    parts: list[list[torch.Tensor]] = []
    sizes = [0, 0, 0]
    if drawn is not None:
        longest = max(rollout.ids_sl.shape[1] for rollout in drawn)
        parts = [_pack(_padded(rollout, longest), kept) for rollout in drawn]
        most_kept = max(part[3].shape[0] for part in parts) if kept else 0
        sizes = [drawn[0].ids_sl.shape[0], longest, most_kept]
    # Everybody waits for rank 0, which has waited for its engine.
    header = broadcast_(torch.tensor(sizes, dtype=torch.int64, device=device), 0, groups.world)
    num_rows, length, most_kept = header.tolist()
    fields = [((num_rows, length + len(_NUMBERS)), torch.int64), ((num_rows, length), torch.float32)]
    if kept:
        fields += [((num_rows * length,), torch.int32), ((most_kept,), torch.int32)]
    received = []
    for index, (shape, dtype) in enumerate(fields):
        out = torch.zeros(shape, dtype=dtype, device=device)
        if groups.is_model_leader:
            stacked = None
            if drawn is not None:
                stacked = torch.stack([_filled(part[index], shape) for part in parts]).to(device)
            # The first ranks of the other replicas wait for rank 0.
            out = scatter(stacked, out, 0, groups.dp)
        received.append(broadcast_(out, 0, groups.model))
    return _unpack_rollout(received, length)


def _padded(rollout: Rollout, length: int) -> Rollout:
    """The rollout with `length` columns."""
    num_rows, width = rollout.ids_sl.shape
    if width == length:
        return rollout
    columns = (0, length - width)
    mask = rollout.sampling_mask
    if mask is not None:
        row_sl = torch.arange(num_rows * width).reshape(num_rows, width)
        mask = mask.select(torch.nn.functional.pad(row_sl, columns, value=-1).flatten())
    return dataclasses.replace(
        rollout,
        ids_sl=torch.nn.functional.pad(rollout.ids_sl, columns),
        sampler_logprob_sl=torch.nn.functional.pad(rollout.sampler_logprob_sl, columns),
        sampling_mask=mask,
    )


def _pack(rollout: Rollout, kept: bool) -> list[torch.Tensor]:
    """Ids and numbers, logprobs, and the number and ids of what was kept."""
    numbers_sn = torch.stack([getattr(rollout, name).long() for name in _NUMBERS], dim=1)
    tensors = [torch.cat([rollout.ids_sl, numbers_sn], dim=1), rollout.sampler_logprob_sl]
    if kept:
        mask = rollout.sampling_mask
        assert mask is not None, "check_completions has seen the kept ids"
        tensors += [mask.offsets.diff().int(), mask.token_ids.int()]
    return tensors


def _filled(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor with zeros up to the shape; only lists of kept ids are shorter."""
    if tuple(tensor.shape) == shape:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(shape[0] - tensor.shape[0])])


def _unpack_rollout(received: Sequence[torch.Tensor], length: int) -> Rollout:
    """The rollout, with as many columns as its own longest row."""
    ids_sl, numbers_sn = received[0].split([length, len(_NUMBERS)], dim=1)
    numbers = dict(zip(_NUMBERS, numbers_sn.unbind(dim=1), strict=True))
    width = int(numbers["length_s"].max())
    mask = None
    if len(received) > 2:
        count_t = received[2].cpu().long()
        offsets = torch.cat([count_t.new_zeros(1), count_t.cumsum(dim=0)])
        whole = SamplingMask(received[3][: int(offsets[-1])], offsets)
        row_sl = torch.arange(ids_sl.shape[0] * length).reshape(-1, length)
        mask = whole.select(row_sl[:, :width].flatten())
    return Rollout(
        ids_sl=ids_sl[:, :width].contiguous(),
        prompt_length_s=numbers["prompt_length_s"],
        length_s=numbers["length_s"],
        sampler_logprob_sl=received[1][:, :width].contiguous(),
        finished_s=numbers["finished_s"].bool(),
        group_id_s=numbers["group_id_s"],
        version_s=numbers["version_s"],
        sampling_mask=mask,
    )
