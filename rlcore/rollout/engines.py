"""Picks the rollout engine of a run and starts it."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlcore.collectives import group_rank, raise_together
from rlcore.config import RunConfig
from rlcore.interfaces import RolloutEngine
from rlcore.rollout.policy_sampler import PolicySampler
from rlcore.rollout.vllm_engine import LocalEngine
from rlcore.rollout.vllm_rollout import VllmRollout
from rlcore.rollout.vllm_server import ServerPool
from rlcore.rollout.vllm_settings import engine_arguments, engine_settings, expected_of, transfer_of
from rlcore.weight_sync.gpu_transfer import GpuSender
from rlcore.weight_sync.sender import FolderSender, WeightSender, own_folder


def start_engine(config: RunConfig, worker: Any, eos_id: int, stack: ExitStack) -> RolloutEngine:
    """The engine that `rollout.engine` names, drawing from the policy of `worker` (a `MegatronWorker`).

    What it holds is given back when `stack` closes. Raises on every rank when it does not start. Collective.
    """
    if config.rollout.engine == "policy":
        return PolicySampler(
            worker.decoder,
            config.sampling.spec(),
            eos_id,
            config.rollout.max_new_tokens,
            worker.num_positions,
        )
    expected = expected_of(config, worker.decoder.vocab_size, worker.num_positions, eos_id)
    has_accelerator = torch.cuda.is_available()
    settings = engine_settings(config, expected, has_accelerator)
    if config.rollout.vllm.urls:
        start = partial(ServerPool, config.rollout.vllm.urls, settings, expected.max_length)
    else:
        arguments = engine_arguments(config, expected, settings, has_accelerator)
        start = partial(LocalEngine, _start_folder(config, worker, stack), arguments, settings)
    sender = make_sender(config, worker, has_accelerator)
    stack.callback(sender.close)
    rollout = VllmRollout(config, worker, start, expected, sender)
    stack.callback(rollout.close)
    return rollout


def make_sender(config: RunConfig, worker: Any, has_accelerator: bool) -> WeightSender:
    """How weights reach the engine: `rollout.vllm.transfer`."""
    backend = transfer_of(config, has_accelerator)
    if backend == "folder":
        return FolderSender(config.rollout.vllm.transfer_folder, worker.groups.world, worker.device)
    return GpuSender(backend, worker.groups.world, worker.device)


def _start_folder(config: RunConfig, worker: Any, stack: ExitStack) -> str:
    """The folder that an engine starts from: the run's own model, or the weights it was given at random.
    Collective.
    """
    if config.model.hf_path is not None:
        return config.model.hf_path
    folder, error = "not written by this rank", None
    if group_rank(worker.groups.world) == 0:
        try:
            folder = str(own_folder(Path(config.rollout.vllm.transfer_folder)))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        except OSError as cause:
            error = ValueError(
                f"rollout.vllm.transfer_folder={config.rollout.vllm.transfer_folder}: {cause}. Set it to a "
                "folder that can be written, best in memory."
            )
    raise_together(error, worker.groups.world, worker.device)
    worker.save(str(Path(folder, "policy")))
    return str(Path(folder, "policy"))
