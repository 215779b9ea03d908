"""A rank that never comes: its peers learn which call, which group, which rank, and in time."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rlcore.collectives import (
    CollectiveError,
    all_gather,
    all_reduce_,
    broadcast_,
    name_failure,
    raise_together,
    reduce_scatter,
)
from rlcore.groups import ParallelGroups
from rlcore.layout.pp_broadcast import broadcast_from_last_stage, score_fields
from tests.rank_pool import run_ranks

pytestmark = pytest.mark.distributed

TIMEOUT_S = 1.0

CALLS = {
    "all_reduce (max) of float32 [3]": lambda group: all_reduce_(torch.zeros(3), "max", group),
    "all_gather of int64 [2, 1]": lambda group: all_gather(torch.zeros(2, 1, dtype=torch.int64), group),
    "reduce_scatter of float32 [4]": lambda group: reduce_scatter(torch.zeros(4), group),
    "broadcast of bool [2] from rank 1": lambda group: broadcast_(torch.zeros(2).bool(), 0, group),
    "all_reduce (max) of int32 [1]": lambda group: raise_together(None, group),
    # 1 status byte, two floats and one bit for each of six tokens
    "broadcast of uint8 [50] from rank 2": lambda group: broadcast_from_last_stage(
        score_fields(truncates=True), None, (2, 3), ParallelGroups(pp=group), "cpu"
    ),
}


def _wait_in_vain(rank, world_size, call):
    """Ranks 1 and 2 of three are a group, and one of them never comes. Returns the other's message."""
    group = dist.new_group([1, 2], timeout=timedelta(seconds=TIMEOUT_S), group_desc="PAIR")
    # Of a broadcast the source does not wait.
    absent = 1 if call.startswith("broadcast of bool") else 2
    if rank in (0, absent):
        dist.barrier()
        return None
    started = time.monotonic()
    try:
        CALLS[call](group)
    except CollectiveError as error:
        return str(error), time.monotonic() - started
    finally:
        dist.barrier()
    return "no error", 0.0


@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_never_comes_is_an_error_that_says_where(call):
    messages = [message for message in run_ranks(_wait_in_vain, 3, call) if message is not None]
    assert len(messages) == 1
    text, seconds = messages[0]
    rank = 2 if call.startswith("broadcast of bool") else 1
    assert text.startswith(f"{call} over PAIR (ranks 1, 2) on rank {rank}: ")
    assert "Timed out" in text and seconds < 10 * TIMEOUT_S


def _fail(rank, world_size, error):
    try:
        with name_failure("the schedule", None):
            raise error
    except RuntimeError as caught:
        return type(caught).__name__, str(caught)


def test_only_errors_of_the_transport_are_renamed():
    late = RuntimeError("[/src/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv")
    for rank, (kind, text) in enumerate(run_ranks(_fail, 2, late)):
        assert kind == "CollectiveError"
        assert text == f"the schedule over all ranks (ranks 0, 1) on rank {rank}: {late}"
    for own in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), torch.OutOfMemoryError("20 GiB")):
        assert run_ranks(_fail, 2, own) == [(type(own).__name__, str(own))] * 2


def test_an_inner_call_is_not_renamed_by_an_outer_one():
    inner = CollectiveError("all_reduce over TP on rank 0: gloo: Timed out")
    assert run_ranks(_fail, 1, inner) == [("CollectiveError", str(inner))]
