"""Ranks that wait for others' calls, longer than the transport waits; an error of one is everyone's."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from rlcore import waiting
from rlcore.waiting import in_background, in_foreground, wait_together
from tests.rank_pool import refusals, run_ranks

pytestmark = pytest.mark.distributed


def wait_on_rank(rank, world_size, kind):
    """Ranks 0 and 1 have calls of different lengths, the others none."""
    waiting.HEARTBEAT_S = 0.1
    group = dist.new_group(timeout=timedelta(seconds=2.0))

    def call():
        time.sleep(3.0 if rank == 0 else 0.1)
        if kind == "raises" and rank == 1:
            raise ValueError("no luck")
        return 10 + rank

    begin = in_foreground if kind == "foreground" and rank == 1 else in_background
    future = begin(call) if rank < 2 else None
    started = time.monotonic()

    def given_up():
        late = kind == "late" and time.monotonic() > started + 0.5
        return ValueError("given up") if late else None

    result = wait_together(future, group, given_up=given_up)
    return result, time.monotonic() - started


@pytest.mark.parametrize("kind", ["both", "foreground"])
def test_nobody_takes_a_long_call_for_a_hang(kind):
    """Three seconds, where the transport waits two."""
    results = run_ranks(wait_on_rank, 4, kind)
    assert [result for result, _ in results] == [10, 11, None, None]
    assert all(2.5 < seconds < 6.0 for _, seconds in results)


@pytest.mark.parametrize(("kind", "message"), [("raises", "no luck"), ("late", "given up")])
def test_an_error_of_one_is_an_error_of_all(kind, message):
    assert all(message in said for said in refusals(wait_on_rank, 4, kind))
