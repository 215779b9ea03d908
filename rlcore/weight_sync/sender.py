"""The sending end: the policy's weights into a folder in memory, from which the engine loads them.

The first step of an update changes nothing in any engine; a failure there leaves the old version serving
everywhere. A failure in the second stops the run: the engine says that it is broken, and nothing is drawn.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from rlcore.collectives import Group, group_rank, raise_together
from rlcore.weight_sync.wire import EngineLink, Manifest, TensorEntry, WeightsState, checksum_of

Export = Callable[[], Iterator[tuple[str, torch.Tensor]]]
"""Names and whole tensors, anew at each call; every rank exhausts them (`PolicyWorker.export_weights`)."""
BUCKET_BYTES = 2**30
"""Tensors are gathered in host memory up to this size before they are written."""


class WeightSyncError(RuntimeError):
    """An update did not arrive."""


class WeightSender(Protocol):
    """How a run's weights reach its engine. Built on every rank."""

    run: str
    """Identity of this run, as engines know it."""

    def write(self, export: Export, version: int, link: EngineLink | None) -> None:
        """What every rank has to do for an update; `link` on world rank 0 alone. Collective: an error is
        raised on every rank.
        """
        ...

    def deliver(self, link: EngineLink, version: int) -> None:
        """The rest, on world rank 0 alone: afterwards every worker of every engine serves the version."""
        ...

    def close(self) -> None:
        """Gives back what the sender holds."""
        ...


class FolderSender:
    """`WeightSender` through a folder, in memory or on a disk that the engines share."""

    def __init__(
        self, folder: str, world: Group, device: torch.device, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """`folder`: where the updates go, each into a folder of its own that goes again."""
        self.run = uuid.uuid4().hex
        self._parent, self._world, self._device = Path(folder), world, device
        self._bucket_bytes = bucket_bytes
        self._root: Path | None = None

    def write(self, export: Export, version: int, link: EngineLink | None) -> None:
        """See `WeightSender`. `ValueError` on every rank where the folder cannot hold the weights."""
        tensors, error = export(), None
        if group_rank(self._world) == 0:
            try:
                self._write(tensors, version)
            except Exception as cause:
                self._drop(version)
                error = ValueError(
                    f"version {version} of the weights could not be written: {type(cause).__name__}: "
                    f"{cause}. Free memory in, or change, rollout.vllm.transfer_folder={self._parent}."
                )
        for _ in tensors:  # ranks that do not write, or failed to, still take part in the collectives
            pass
        raise_together(error, self._world, self._device)

    def deliver(self, link: EngineLink, version: int) -> None:
        """See `WeightSender`."""
        folder = str(self._folder(version))
        try:
            agree(link.rpc("check_weights", folder=folder), "refused")
            agree(link.rpc("load_weights_of", folder=folder), "did not load")
            check_serving(link, self.run, version)
            # Cached prefixes are states of the old weights.
            link.reset_prefix_cache()
        finally:
            self._drop(version)

    def close(self) -> None:
        """Removes what is left in the folder."""
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root = None

    def _write(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        folder = self._folder(version)
        folder.mkdir()
        entries: list[TensorEntry] = []
        bucket: dict[str, torch.Tensor] = {}
        size, num_files = 0, 0
        for name, tensor in tensors:
            file = f"bucket_{num_files:05d}.safetensors"
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries.append(
                TensorEntry(
                    **{"name": name, "shape": tuple(tensor.shape), "dtype": dtype, "file": file},
                    checksum=checksum_of(tensor),
                )
            )
            bucket[name] = tensor
            size += tensor.numel() * tensor.element_size()
            if size >= self._bucket_bytes:
                self._flush(bucket, folder / file, size)
                size, num_files = 0, num_files + 1
        if bucket:
            self._flush(bucket, folder / f"bucket_{num_files:05d}.safetensors", size)
        Manifest(run=self.run, version=version, tensors=entries).write(folder)

    def _flush(self, bucket: dict[str, torch.Tensor], file: Path, size: int) -> None:
        from safetensors.torch import save_file

        free = shutil.disk_usage(file.parent).free
        if free < size:
            raise ValueError(f"{size} bytes more are needed, and {file.parent} has {free}")
        save_file(bucket, str(file))
        bucket.clear()

    def _folder(self, version: int) -> Path:
        if self._root is None:
            self._root = own_folder(self._parent)
        return self._root / f"version_{version}"

    def _drop(self, version: int) -> None:
        if self._root is not None:
            shutil.rmtree(self._root / f"version_{version}", ignore_errors=True)


_PREFIX = "rlcore_weights_"


def own_folder(parent: Path) -> Path:
    """A new folder in memory that says whose it is; those of runs that were killed go. `OSError`."""
    remove_orphans(parent)
    prefix = f"{_PREFIX}{socket.gethostname()}_{os.getpid()}_"
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))


def remove_orphans(parent: Path) -> None:
    """Removes what runs of this machine left that were killed: memory is small."""
    own = f"{_PREFIX}{socket.gethostname()}_"
    for folder in parent.glob(f"{own}*"):
        pid = folder.name.removeprefix(own).partition("_")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(folder, ignore_errors=True)


def agree(answers: list[Any], verb: str) -> None:
    """`WeightSyncError` with the first worker's problem, where one has any."""
    if not answers:
        raise WeightSyncError("no worker of the engine answered.")
    for number, answer in enumerate(answers):
        state = state_of(answer)
        if state.problem is not None:
            served = "nothing that may be drawn from" if state.broken else f"version {state.version}"
            raise WeightSyncError(
                f"worker {number} of the engine {verb} the weights: {state.problem}. It serves {served}."
            )


def check_serving(link: EngineLink, run: str, version: int) -> None:
    """`WeightSyncError` unless every worker of every engine serves this version of this run's weights."""
    answers = link.rpc("weights_state")
    agree(answers, "no longer serves")
    for number, answer in enumerate(answers):
        state = state_of(answer)
        if (state.run, state.version) != (run, version):
            raise WeightSyncError(
                f"worker {number} of the engine serves version {state.version} of "
                f"{'this' if state.run == run else 'another'} run, expected version {version} of this one: "
                "it was restarted, or is somebody else's too."
            )


def state_of(answer: Any) -> WeightsState:
    """From what `WeightReceiver` returns."""
    if not isinstance(answer, Mapping):
        raise WeightSyncError(
            f"a worker of the engine answered {answer!r}: is it started with the weight receiver?"
        )
    return WeightsState(**answer)
