"""Weights from GPU to GPU through vLLM's own weight transfer: `nccl` to engines anywhere, `ipc` on one GPU.

Written against vLLM 0.32's trainer-side engines; tested with recorded calls. It has not run on a GPU.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator
from typing import Any, Literal

import torch

from rlcore.collectives import Group, group_rank, raise_together
from rlcore.weight_sync.sender import Export, agree, check_serving
from rlcore.weight_sync.wire import EngineLink, Manifest, TensorEntry


class GpuSender:
    """`WeightSender` through vLLM's trainer-side transfer engine: every rank gathers, rank 0 sends."""

    def __init__(self, backend: Literal["nccl", "ipc"], world: Group, device: torch.device) -> None:
        self.run = uuid.uuid4().hex
        self._backend: Literal["nccl", "ipc"] = backend
        self._world, self._device = world, device
        self._source: PolicySource | None = None
        self._transfer: Any = None
        """vLLM's trainer-side engine; None before the first update."""

    def write(self, export: Export, version: int, link: EngineLink | None) -> None:
        """Sends the weights: names and shapes are checked before, and until `deliver` the engines count as
        broken. See `WeightSender`.
        """
        if self._source is None:
            self._source = PolicySource(export, self._device)
        manifest, error = self._manifest(version), None
        if link is not None:
            try:
                agree(link.rpc("check_weights", manifest=manifest.plain()), "refused")
                link.rpc("begin_weights")
            except Exception as cause:
                error = cause
        raise_together(error, self._world, self._device)
        transfer = self._transfer = self._transfer or self._start(self._source, link)
        error = None
        try:
            # Every rank gathers here; rank 0 also sends, while the engines receive.
            transfer.send_weights()
        except Exception as cause:
            error = cause
            self._source.drain()
        raise_together(error, self._world, self._device)

    def _start(self, source: PolicySource, link: EngineLink | None) -> Any:
        transfer, error = None, None
        try:
            num_workers = 0 if link is None else len(link.rpc("weights_state"))
            rank, client = group_rank(self._world), LinkClient(link)
            transfer = start_transfer(self._backend, rank, client, source, num_workers)
        except Exception as cause:
            error = cause
        raise_together(error, self._world, self._device)
        return transfer

    def deliver(self, link: EngineLink, version: int) -> None:
        """See `WeightSender`."""
        agree(link.rpc("end_weights", manifest=self._manifest(version).plain()), "did not load")
        check_serving(link, self.run, version)
        link.reset_prefix_cache()

    def close(self) -> None:
        """Leaves the transfer's process group."""
        shutdown = getattr(self._transfer, "shutdown", None)
        if shutdown is not None:
            shutdown()

    def _manifest(self, version: int) -> Manifest:
        assert self._source is not None
        return Manifest(run=self.run, version=version, tensors=self._source.entries())


class LinkClient:
    """What vLLM's trainer-side engines call on the inference side, over an `EngineLink`. None on ranks that
    do not send.
    """

    def __init__(self, link: EngineLink | None) -> None:
        self._link = link

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """The engines join."""
        self._call("init_weight_transfer_engine", init_info=init_info)

    def shutdown_weight_transfer_engine(self) -> None:
        """The engines leave."""
        self._call("shutdown_weight_transfer_engine")

    def start_weight_update(self) -> None:
        """The engines make ready to receive."""
        self._call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """The engines receive."""
        self._call("update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The engines have received everything."""
        self._call("finish_weight_update")

    def _call(self, method: str, **kwargs: Any) -> None:
        assert self._link is not None, "only the sending rank talks to the engines"
        self._link.rpc(method, **kwargs)


class PolicySource:
    """The policy as vLLM's `WeightSource`: names, dtypes and shapes once, tensors anew at each pass. Both are
    collective over the run.
    """

    def __init__(self, export: Export, device: torch.device) -> None:
        self._export, self._device = export, device
        self._entries: tuple[TensorEntry, ...] | None = None
        self._under_way: Iterator[tuple[str, torch.Tensor]] | None = None

    def entries(self) -> tuple[TensorEntry, ...]:
        """What an update holds. The first call passes over all weights."""
        if self._entries is None:
            self._entries = tuple(
                TensorEntry(
                    name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch.")
                )
                for name, tensor in self._export()
            )
        return self._entries

    def metadata(self) -> list[Any]:
        """vLLM's `ParamMeta`s."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [
            ParamMeta(entry.name, getattr(torch, entry.dtype), tuple(entry.shape)) for entry in self.entries()
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._under_way = self._export()
        for name, tensor in self._under_way:
            yield name, tensor.to(self._device)
        self._under_way = None

    def drain(self) -> None:
        """Takes part in the rest of a pass that broke off here, or in all of one that did not begin: the
        other ranks gather on.
        """
        for _ in self._under_way or self._export():
            pass
        self._under_way = None

    def held_names(self) -> None:
        """Every rank yields every tensor."""

    def groups(self) -> list[list[str]]:
        """One group: tensors are gathered one at a time."""
        return [[entry.name for entry in self.entries()]]


def start_transfer(
    backend: Literal["nccl", "ipc"], rank: int, client: LinkClient, source: PolicySource, num_workers: int
) -> Any:
    """vLLM's trainer-side engine of this rank, joined with the engines' workers."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    if backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        # Packed: chunk by chunk, where whole tensors would all be held at once.
        info: Any = IPCTrainerInitInfo(rank=rank, packed=True)
    else:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        # Only the sender's address and group size count; the other ranks do not join.
        info = NCCLTrainerInitInfo(
            master_address=socket.gethostbyname(socket.gethostname()),
            master_port=_free_port(),
            world_size=1 + num_workers,
            rank=rank,
        )
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)  # type: ignore[arg-type]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
