"""Prompts of all replicas to rank 0, and each replica's responses back to its ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rlcore.batch import Prompt
from rlcore.collectives import record_collectives
from rlcore.groups import ParallelGroups
from rlcore.rollout.completions import Completion, join_rollout
from rlcore.rollout.rollout_wire import gather_prompts, share_rollouts
from tests.rank_pool import run_ranks

pytestmark = pytest.mark.distributed
CPU = torch.device("cpu")


def groups_of(rank, world_size, model_size):
    """Replicas of `model_size` ranks next to each other, first ranks first."""
    starts = range(0, world_size, model_size)
    replicas = [dist.new_group(list(range(start, start + model_size))) for start in starts]
    columns = [dist.new_group(list(range(place, world_size, model_size))) for place in range(model_size)]
    return ParallelGroups(
        model=replicas[rank // model_size], dp=columns[rank % model_size], world=dist.group.WORLD
    )


def prompts_of(dp_rank):
    """Replica 1 has longer prompts than replica 0, and its own groups."""
    return [
        Prompt(ids=[10 * dp_rank + index + 1] * (1 + index + 2 * dp_rank), group_id=100 * dp_rank + index)
        for index in range(2)
    ]


def rollout_of(dp_rank, kept):
    """Two samples a prompt; lengths, logprobs and kept ids differ between replicas, rows and positions."""
    completions = [
        [
            Completion(
                ids=[3 + dp_rank] * (1 + sample + 3 * dp_rank),
                logprobs=[-0.5 - position - 10 * dp_rank for position in range(1 + sample + 3 * dp_rank)],
                finished=sample == 0,
                kept=[
                    list(range(1 + (position + index) % 3)) for position in range(1 + sample + 3 * dp_rank)
                ],
            )
            for sample in range(2)
        ]
        for index in range(2)
    ]
    return join_rollout(prompts_of(dp_rank), completions, version=4, kept=kept)


def share_on_rank(rank, world_size, model_size, kept):
    groups = groups_of(rank, world_size, model_size)
    with record_collectives() as calls:
        gathered = gather_prompts(prompts_of(groups.dp_rank), 5 + groups.dp_rank, groups, CPU)
        drawn = [rollout_of(dp_rank, kept) for dp_rank in range(groups.dp_size)] if rank == 0 else None
        own = share_rollouts(drawn, kept, groups, CPU)
    assert [(list(prompts), seed) for prompts, seed in gathered] == [
        (prompts_of(dp_rank), 5 + dp_rank) for dp_rank in range(groups.dp_size)
    ]
    expected = rollout_of(groups.dp_rank, kept)
    for name in ("ids_sl", "prompt_length_s", "length_s", "sampler_logprob_sl", "finished_s", "group_id_s"):
        assert torch.equal(getattr(own, name), getattr(expected, name)), name
    assert torch.equal(own.version_s, expected.version_s)
    assert (own.sampling_mask is None) == (not kept)
    if kept:
        assert torch.equal(own.sampling_mask.offsets, expected.sampling_mask.offsets)
        assert torch.equal(own.sampling_mask.token_ids, expected.sampling_mask.token_ids)
    return [call.kind for call in calls]


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("world_size", "model_size"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_every_rank_gets_its_replicas_rollout(world_size, model_size, kept):
    kinds = run_ranks(share_on_rank, world_size, model_size, kept)
    fields = 4 if kept else 2
    assert kinds[0].count("scatter") == (fields if world_size > model_size else 0)
    assert kinds[0].count("broadcast") == (world_size > 1) + (fields if model_size > 1 else 0)
