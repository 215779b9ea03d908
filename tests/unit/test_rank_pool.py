"""The pool itself: order of results, errors of any rank, time-outs, and recovery after each."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.rank_pool import MOST_THREADS, RankError, run_ranks

pytestmark = pytest.mark.distributed


def _sum_of_ranks(rank: int, world_size: int, offset: int) -> tuple[int, float]:
    value = torch.tensor(float(rank + offset))
    dist.all_reduce(value)
    return rank, value.item()


def _fail_on_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("planted")
    dist.barrier()


def _sleep(rank: int, world_size: int) -> None:
    time.sleep(30)


def test_results_come_back_in_rank_order_and_the_pool_persists():
    assert run_ranks(_sum_of_ranks, 2, 10) == [(0, 21.0), (1, 21.0)]
    start = time.monotonic()
    assert run_ranks(_sum_of_ranks, 2, 0) == [(0, 1.0), (1, 1.0)]
    assert time.monotonic() - start < 2.0, "a second case must not start new processes"


def test_a_raising_rank_is_reported_and_the_next_case_runs():
    with pytest.raises(RankError, match="planted"):
        run_ranks(_fail_on_rank_one, 2)
    assert run_ranks(_sum_of_ranks, 2, 1) == [(0, 3.0), (1, 3.0)]


def test_a_hanging_rank_times_out():
    with pytest.raises(TimeoutError, match="did not finish"):
        run_ranks(_sleep, 2, timeout_s=0.5)


def _lose_groups(rank: int, world_size: int, num_groups: int) -> int:
    """Leaves groups behind in reference cycles, as a model that keeps its groups does. Threads before it."""
    threads = len(os.listdir("/proc/self/task"))
    for _ in range(num_groups):
        cycle = [dist.new_group()]
        cycle.append(cycle)
        dist.destroy_process_group(cycle[0])
    return threads


def test_groups_that_only_cycles_hold_do_not_pile_up():
    """They keep threads that wake all the time: the pool ends them between cases."""
    threads = max(max(run_ranks(_lose_groups, 2, 30)) for _ in range(4))
    assert threads <= MOST_THREADS
