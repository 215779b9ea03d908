"""Process groups of a job with context parallelism, and of whole model replicas, which Megatron lacks."""

from __future__ import annotations

import pytest

from tests.rank_pool import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]


def _groups(rank, world_size, tp, pp, cp_size, ep=1):
    """Members of each of this rank's groups, before and after Megatron's state was set up a second time."""
    import torch.distributed as dist

    from megatron_worker.cpu_backend import cpu_backend
    from megatron_worker.groups import destroy_parallel, initialize_parallel
    from rlcore.config import ParallelConfig

    seen = []
    with cpu_backend("cpu"):
        for _ in range(2):
            parallel = ParallelConfig(tp=tp, pp=pp, cp=cp_size, ep=ep, backend="cpu")
            groups = initialize_parallel(parallel, "cpu")
            names = ("tp", "pp", "cp", "dp", "dp_cp", "model", "ep", "expert_dp")
            handles = {name: getattr(groups, name) for name in names}
            ranks = {
                name: [rank] if group is None else dist.get_process_group_ranks(group)
                for name, group in handles.items()
            }
            seen.append((ranks, groups.cp_rank, groups.cp_size, groups.is_model_leader))
            destroy_parallel()
    return seen


@pytest.mark.parametrize(
    ("tp", "pp", "expected_of_last"),
    [
        (1, 1, {"cp": [2, 3], "dp": [1, 3], "dp_cp": [0, 1, 2, 3], "model": [2, 3], "tp": [3], "pp": [3]}),
        (2, 1, {"cp": [1, 3], "dp": [3], "dp_cp": [1, 3], "model": [0, 1, 2, 3], "tp": [2, 3], "pp": [3]}),
        (1, 2, {"cp": [2, 3], "dp": [3], "dp_cp": [2, 3], "model": [0, 1, 2, 3], "tp": [3], "pp": [1, 3]}),
    ],
)
def test_groups_with_context_parallelism(tp, pp, expected_of_last):
    """Four ranks, CP 2: a model replica spans TP x PP x CP and has one leader."""
    results = run_ranks(_groups, 4, tp, pp, 2)
    for first, second in results:
        assert first == second and first[2] == 2
    without_experts = {"ep": [3], "expert_dp": expected_of_last["dp_cp"]}
    assert results[3][0][0] == expected_of_last | without_experts and results[3][0][1] == 1
    assert sum(result[0][3] for result in results) == 4 // (tp * pp * 2)


@pytest.mark.parametrize(
    ("tp", "cp", "ep", "expected_of_last"),
    [
        (1, 1, 2, {"ep": [2, 3], "expert_dp": [1, 3]}),
        (1, 2, 2, {"ep": [2, 3], "expert_dp": [1, 3]}),
        (1, 2, 4, {"ep": [0, 1, 2, 3], "expert_dp": [3]}),
        (2, 1, 2, {"ep": [1, 3], "expert_dp": [3]}),
    ],
)
def test_groups_with_expert_parallelism(tp, cp, ep, expected_of_last):
    """They lie inside data x context parallel, and TP ranks have EP groups of their own."""
    first, second = run_ranks(_groups, 4, tp, 1, cp, ep)[3]
    assert first == second
    ranks = first[0]
    assert {name: ranks[name] for name in expected_of_last} == expected_of_last
    assert set(ranks["ep"]) <= set(ranks["dp_cp"]) and set(ranks["expert_dp"]) <= set(ranks["dp_cp"])


def _refused(rank, world_size):
    from megatron_worker.cpu_backend import cpu_backend
    from megatron_worker.groups import initialize_parallel
    from rlcore.config import ParallelConfig

    with cpu_backend("cpu"), pytest.raises(ValueError) as caught:
        initialize_parallel(ParallelConfig(cp=3, backend="cpu"), "cpu")
    return str(caught.value)


def test_a_world_that_context_parallelism_does_not_divide_is_refused():
    for message in run_ranks(_refused, 2):
        assert "2 processes do not factor" in message and "parallel.cp=3 = 3" in message
