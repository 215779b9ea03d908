"""What both ends of a weight update share: the manifest, a tensor's checksum, what an engine answers.

The receiver runs inside the engine's own processes, so this module imports nothing of the run.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

MANIFEST_FILE = "manifest.json"
TIED_HEAD = "lm_head.weight"
"""Not sent where the head is the embedding, and filled by it."""


class EngineLink(Protocol):
    """What a sender may do to an engine, or to several at once."""

    def rpc(self, method: str, **kwargs: Any) -> list[Any]:
        """Calls a method of `WeightReceiver` in every worker process of every engine."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix."""
        ...


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of an update."""

    name: str
    """Hugging Face name."""
    shape: Sequence[int]
    dtype: str
    """torch's name, such as `float32`."""
    file: str = ""
    """File of the update's folder; empty where the tensor does not travel in a file."""
    checksum: int = 0
    """`checksum_of`."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What an update holds, in the order it was sent."""

    run: str
    """Identity of the run that sent it: two runs' versions have nothing to do with each other."""
    version: int
    tensors: Sequence[TensorEntry]

    def write(self, folder: Path) -> None:
        """Into the folder, whole or not at all."""
        draft = folder / f".{MANIFEST_FILE}"
        draft.write_text(json.dumps(self.plain()), encoding="utf-8")
        draft.rename(folder / MANIFEST_FILE)

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @staticmethod
    def of(values: dict[str, Any]) -> Manifest:
        """From `plain`'s result."""
        return Manifest(
            run=values["run"],
            version=values["version"],
            tensors=tuple(TensorEntry(**entry) for entry in values["tensors"]),
        )

    @staticmethod
    def read(folder: Path) -> Manifest:
        """From the folder. `OSError` or `ValueError` where there is none that can be read."""
        return Manifest.of(json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8")))


@dataclass(frozen=True, kw_only=True)
class WeightsState:
    """What a worker process of an engine serves."""

    run: str | None = None
    """The run whose weights these are; None: those that the engine started with."""
    version: int | None = None
    problem: str | None = None
    """Why the last call did not do what it was asked for."""
    broken: bool = False
    """The weights are a mixture: nothing may be drawn from them."""


def checksum_of(tensor: torch.Tensor) -> int:
    """CRC-32 of the tensor's bytes, in row-major order."""
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
