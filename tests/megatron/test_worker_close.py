"""A closed worker leaves nothing behind: a process that opens several (a notebook, a sweep, these tests)
keeps neither their weights nor their process groups, each of which has threads of its own.
"""

from __future__ import annotations

import gc
import os

import pytest

from tests.megatron.expert_cases import EXPERT_LAYOUTS, expert_config
from tests.megatron.layout_cases import make_batch, make_config
from tests.rank_pool import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]

CONFIGS = {
    "dense, cp2": (2, make_config("cp2", 2)),
    "distributed optimizer": (2, make_config("dp2+distopt", 2)),
    "experts, ep2": (EXPERT_LAYOUTS["ep2"][0], expert_config("ep2", 2)),
}


def _threads_after_each(rank, world_size, config, batch, num_workers):
    from megatron_worker.worker import MegatronWorker
    from tests.megatron.layout_cases import perturbed, share

    threads = []
    for _ in range(num_workers):
        worker = MegatronWorker(config)
        own = share(batch, worker.groups.dp_rank, worker.groups.dp_size)
        worker.train_step(perturbed(own, worker.logprobs(own)))
        worker.close()
        del worker
        gc.collect()
        threads.append(len(os.listdir("/proc/self/task")))
    return threads


@pytest.mark.parametrize("name", CONFIGS)
def test_threads_do_not_pile_up(name):
    """The first worker may leave threads that a process has once (autograd's, OpenMP's)."""
    world_size, config = CONFIGS[name]
    for first, *later in run_ranks(_threads_after_each, world_size, config, make_batch(), 4, timeout_s=120):
        assert max(later) <= first, (first, later)
