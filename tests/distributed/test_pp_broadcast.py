"""One broadcast carries every field from the last stage to all; nobody can be left waiting."""

import math

import pytest
import torch
import torch.distributed as dist

from rlcore.collectives import record_collectives
from rlcore.groups import ParallelGroups
from rlcore.layout.pp_broadcast import Field, broadcast_from_last_stage, score_fields
from tests.rank_pool import RankError, run_ranks

pytestmark = pytest.mark.distributed


def make_values(shape):
    generator = torch.Generator().manual_seed(3)
    logprob = torch.randn(shape, generator=generator)
    logprob.view(-1)[:1] = -math.inf
    return {
        "logprob": logprob,
        "keep": torch.rand(shape, generator=generator) < 0.5,
        "log_mass": -torch.rand(shape, generator=generator),
    }


def _send(rank, world_size, shape, truncates):
    groups = ParallelGroups(pp=dist.group.WORLD if world_size > 1 else None)
    fields = score_fields(truncates=truncates)
    values = {f.name: make_values(shape)[f.name] for f in fields} if groups.is_last_stage else None
    with record_collectives() as calls:
        received = broadcast_from_last_stage(fields, values, shape, groups, "cpu")
    return received, [(call.kind, call.num_bytes) for call in calls]


@pytest.mark.parametrize("world_size", [1, 2, 4])
# odd sizes leave the packed bits and the float fields unaligned; an empty batch sends the status byte alone
@pytest.mark.parametrize("shape", [(3, 7), (1, 8), (5,), (0, 4)])
@pytest.mark.parametrize("truncates", [True, False])
def test_every_stage_receives_what_the_last_one_sent(world_size, shape, truncates):
    expected = make_values(shape)
    num_tokens = math.prod(shape)
    num_bytes = 1 + (2 * 4 * num_tokens + (num_tokens + 7) // 8 if truncates else 4 * num_tokens)
    for received, calls in run_ranks(_send, world_size, shape, truncates):
        assert sorted(received) == (["keep", "log_mass", "logprob"] if truncates else ["logprob"])
        for name, value in received.items():
            assert value.dtype == expected[name].dtype and torch.equal(value, expected[name])
        assert calls == ([("broadcast", num_bytes)] if world_size > 1 else [])


# Every dtype that travels, with what a detour through float32 or another width would lose.
MIXED = {
    "old": torch.tensor([[-math.inf, -0.0, math.nan], [1e-45, 3.0, -1.5]]),
    "mass": torch.tensor([[1 + 2.0**-50, 0.1, 0.2], [0.3, 0.4, 0.5]], dtype=torch.float64),
    "token_mask": torch.tensor([[True, False, True], [True, True, False]]),
    "count": torch.tensor([[2**62 + 1, -1, 0], [1, 2, 3]]),
    "int_mask": torch.tensor([[1, 0, 1], [0, 1, 1]], dtype=torch.int32),
    "half": torch.tensor([[1.5, 2.5, -3.5], [0.0, 1.0, 2.0]], dtype=torch.bfloat16),
}


def _send_mixed(rank, world_size):
    groups = ParallelGroups(pp=dist.group.WORLD)
    fields = [Field(name, value.dtype) for name, value in MIXED.items()]
    values = MIXED if groups.is_last_stage else None
    with record_collectives() as calls:
        received = broadcast_from_last_stage(fields, values, (2, 3), groups, "cpu")
    return received, [(call.kind, call.num_bytes) for call in calls]


def test_masks_counts_and_floats_keep_their_dtype_and_their_bits():
    for received, calls in run_ranks(_send_mixed, 3):
        for name, value in MIXED.items():
            assert received[name].dtype == value.dtype
            as_bytes = [item.contiguous().view(torch.uint8) for item in (received[name], value)]
            assert torch.equal(*as_bytes), name
        assert calls == [("broadcast", 1 + 6 * (4 + 8 + 8 + 4 + 2) + 1)]


def _send_wrong(rank, world_size, fault):
    groups = ParallelGroups(pp=dist.group.WORLD)
    values = make_values((2, 3)) if groups.is_last_stage else None
    if values is not None and fault == "missing":
        del values["keep"]
    elif values is not None and fault == "dtype":
        values["keep"] = values["keep"].float()
    elif values is not None and fault == "shape":
        values["keep"] = values["keep"][:1]
    elif fault == "none":
        values = None
    broadcast_from_last_stage(score_fields(truncates=True), values, (2, 3), groups, "cpu")


@pytest.mark.parametrize("fault", ["missing", "dtype", "shape", "none"])
def test_a_stage_without_valid_values_is_an_error_everywhere_and_no_hang(fault):
    with pytest.raises(RankError) as caught:
        run_ranks(_send_wrong, 2, fault, timeout_s=20)
    assert [(rank, kind) for rank, kind, _, _ in caught.value.errors] == [
        (0, "ValueError"),
        (1, "ValueError"),
    ]


def test_the_fields_follow_from_the_config_alone():
    assert score_fields(truncates=False) == (Field("logprob", torch.float32),)
    assert [field.name for field in score_fields(truncates=True)] == ["logprob", "keep", "log_mass"]
