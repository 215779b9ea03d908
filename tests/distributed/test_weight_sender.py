"""Both senders over ranks: what fails on the rank that sends is an error on all, and nobody gathers alone."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from rlcore.collectives import all_reduce_
from rlcore.weight_sync import gpu_transfer
from rlcore.weight_sync.gpu_transfer import GpuSender
from rlcore.weight_sync.sender import FolderSender
from tests.rank_pool import refusals, run_ranks
from tests.unit.test_gpu_transfer import Link

pytestmark = pytest.mark.distributed


def export():
    """Three tensors, each gathered by all ranks."""
    for name in ("a", "b", "c"):
        yield name, all_reduce_(torch.ones(4), "sum", dist.group.WORLD)


def write_on_rank(rank, world_size, folder, fault):
    """A write that fails at the second bucket, then, without the fault, one that does not."""
    sender = FolderSender(folder, dist.group.WORLD, torch.device("cpu"), bucket_bytes=16)
    save, calls = safetensors.torch.save_file, []

    def broken(*args):
        calls.append(args)
        if len(calls) == 2:
            raise fault("some tensors share memory")
        save(*args)

    safetensors.torch.save_file = broken
    try:
        sender.write(export, 1, None)
    except Exception as error:
        message = str(error)
    else:
        message = "went through"
    finally:
        safetensors.torch.save_file = save
    sender.write(export, 2, None)
    sender.close()
    return message


@pytest.mark.parametrize("fault", [RuntimeError, OSError, MemoryError])
def test_a_write_that_fails_is_an_error_on_every_rank(tmp_path, fault):
    for message in run_ranks(write_on_rank, 2, str(tmp_path), fault):
        assert "version 1 of the weights could not be written" in message
        assert f"{fault.__name__}: some tensors share memory" in message
    assert not list(tmp_path.iterdir())


class Transfer:
    """Gathers as vLLM's trainer-side engine does; the sending rank fails at `fault`."""

    def __init__(self, rank, source, fault):
        self.rank, self.source, self.fault = rank, source, fault

    def send_weights(self):
        if self.rank == 0 and self.fault == "before":
            raise RuntimeError("no endpoint")
        for index, _ in enumerate(self.source):
            if self.rank == 0 and self.fault == "between" and index == 1:
                raise RuntimeError("broken pipe")


def send_on_rank(rank, world_size, fault):
    def start(backend, rank, client, source, num_workers):
        if rank == 0 and fault == "start":
            raise RuntimeError("no rendezvous")
        return Transfer(rank, source, fault)

    gpu_transfer.start_transfer = start
    link = Link() if rank == 0 else None
    if link is not None:
        link.rpc = lambda method, **kwargs: [{}] * 2
    GpuSender("nccl", dist.group.WORLD, torch.device("cpu")).write(export, 1, link)


@pytest.mark.parametrize(
    ("fault", "message"),
    [("start", "no rendezvous"), ("before", "no endpoint"), ("between", "broken pipe")],
)
def test_a_transfer_that_fails_is_an_error_on_every_rank(fault, message):
    run_ranks(send_on_rank, 2, "none")
    assert all(message in said for said in refusals(send_on_rank, 2, fault, timeout_s=20.0))
