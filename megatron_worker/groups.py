"""Process groups of a Megatron job as explicit handles: the only reader of Megatron's global state."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_worker.cpu_backend import DeviceType, cpu_backend_is_active
from rlcore.collectives import Group, all_gather
from rlcore.config import ParallelConfig
from rlcore.config_rules_experts import check_expert_ranks
from rlcore.groups import ParallelGroups


def initialize_parallel(parallel: ParallelConfig, device_type: DeviceType, seed: int = 0) -> ParallelGroups:
    """Starts torch.distributed, unless it runs, and Megatron's parallel state; returns this rank's groups.

    Experts are cut by `parallel.ep` over data x context parallel ranks and, like every other weight, by
    `parallel.tp` (Megatron's default, an expert tensor parallel size of TP).

    Ranks come from torchrun's environment; without it the process is a world of one. On the CPU a
    `cpu_backend` context must be open. `seed` seeds Megatron's dropout generators. Collective over
    all ranks.

    Raises `ValueError`, on every rank, when the world size does not factor or a Megatron job exists already.
    """
    if device_type == "cpu" and not cpu_backend_is_active():
        raise ValueError(
            "parallel.backend='cpu' needs an open megatron_worker.cpu_backend.cpu_backend() context."
        )
    if parallel_state.model_parallel_is_initialized():
        raise ValueError(
            "Megatron's parallel state is already set up in this process. Use parallel_groups() to join that "
            "job, or destroy_parallel() first."
        )
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    _check_factors(parallel, world_size)
    if not dist.is_initialized():
        _start_torch_distributed(parallel, device_type, world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        # Megatron declares whole minutes and hands the number to timedelta, which takes fractions.
        distributed_timeout_minutes=parallel.timeout_s / 60,  # pyright: ignore[reportArgumentType]
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(seed)
    return parallel_groups(timedelta(seconds=parallel.timeout_s))


def parallel_groups(timeout: timedelta | None = None) -> ParallelGroups:
    """This rank's groups of an existing Megatron job. `ValueError` when there is none.

    With CP every rank of the job must call it, because it makes the groups of whole model replicas, whose
    collectives wait for `timeout` (None: torch's default).
    """
    if not parallel_state.model_parallel_is_initialized():
        raise ValueError(
            "Megatron's parallel state is not set up. Call initialize_parallel(), or "
            "megatron.core.parallel_state.initialize_model_parallel() in your own job."
        )
    cp = _none_if_alone(parallel_state.get_context_parallel_group())
    model = parallel_state.get_model_parallel_group() if cp is None else _replica_group(timeout)
    return ParallelGroups(
        tp=_none_if_alone(parallel_state.get_tensor_model_parallel_group()),
        pp=_none_if_alone(parallel_state.get_pipeline_model_parallel_group()),
        cp=cp,
        dp=_none_if_alone(parallel_state.get_data_parallel_group()),
        dp_cp=_none_if_alone(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        ep=_none_if_alone(parallel_state.get_expert_model_parallel_group()),
        expert_dp=_none_if_alone(parallel_state.get_expert_data_parallel_group()),
        model=_none_if_alone(model),
        world=_none_if_alone(dist.group.WORLD),
    )


def destroy_parallel(*, torch_distributed: bool = False) -> None:
    """Ends Megatron's parallel state and its process groups, so that another layout can be set up.

    With `torch_distributed` also leaves torch.distributed: a process that exits without doing so aborts.
    Waits for nobody, so a rank that failed alone ends at once and its launcher can stop the others.
    """
    if not dist.is_initialized():
        return
    subgroups = [group for group in parallel_state._global_process_group_list or [] if group is not None]
    parallel_state.destroy_model_parallel()
    if torch_distributed:
        dist.destroy_process_group()
        return
    for group in subgroups:
        dist.destroy_process_group(group)


def _replica_group(timeout: timedelta | None) -> Group:
    """TP x PP x CP: the ranks with this one's data-parallel index. Megatron keeps no such group.

    One all-gather of a number over all ranks, then one new group a replica, which every rank makes.
    """
    index = torch.tensor(parallel_state.get_data_parallel_rank(), device=torch.cuda.current_device())
    index_of_rank = all_gather(index, dist.group.WORLD).tolist()
    own = None
    for replica in range(max(index_of_rank) + 1):
        ranks = [rank for rank, other in enumerate(index_of_rank) if other == replica]
        # Through Megatron, so that `destroy_parallel` finds it.
        group = parallel_state.create_group(ranks, timeout=timeout, group_desc="MODEL_REPLICA_GROUP")
        own = group if dist.get_rank() in ranks else own
    return own


def _check_factors(parallel: ParallelConfig, world_size: int) -> None:
    replica = parallel.tp * parallel.pp * parallel.cp
    if world_size % replica:
        raise ValueError(
            f"{world_size} processes do not factor into model replicas of parallel.tp={parallel.tp} x "
            f"parallel.pp={parallel.pp} x parallel.cp={parallel.cp} = {replica}. Start a multiple of "
            f"{replica}, or change one of them."
        )
    check_expert_ranks(parallel.ep, world_size // replica, parallel.cp)


def _start_torch_distributed(parallel: ParallelConfig, device_type: DeviceType, world_size: int) -> None:
    backend = "gloo"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # gloo beside nccl, so that tensors on the host (weights on export, error messages) can travel too.
        backend = "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=parallel.timeout_s)
    if "MASTER_ADDR" in os.environ:
        rank = int(os.environ.get("RANK", "0"))
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout)
    else:
        dist.init_process_group(
            backend,
            store=dist.HashStore(),  # pyright: ignore[reportPrivateImportUsage]
            rank=0,
            world_size=1,
            timeout=timeout,
        )


def _none_if_alone(group: Group) -> Group:
    return None if dist.get_world_size(group) == 1 else group
