"""The receiving end, inside vLLM's worker processes (`worker_extension_cls`).

An update comes in two steps. `check_weights` looks at all of it and changes nothing; `load_weights_of` loads.
Whatever goes wrong in the second step leaves the worker broken, and it says so from then on.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from rlcore.weight_sync.wire import TIED_HEAD, Manifest, TensorEntry, WeightsState, checksum_of

_ROTARY = "rotary_emb.inv_freq"
"""Old folders also store the rotary frequencies, which follow from the config."""


class WeightReceiver:
    """Methods that vLLM mixes into its worker; a sender calls them through `EngineLink.rpc`. Each returns
    a `WeightsState` as a plain mapping, and never raises for an update that cannot be taken.
    """

    _state = WeightsState()
    _shapes: Mapping[str, tuple[int, ...]] | None = None

    def weights_state(self) -> dict[str, Any]:
        """What this worker serves."""
        return asdict(self._state)

    def end_with(self, pid: int) -> dict[str, Any]:
        """From now on the end of that process of this machine, which started the engine, ends it: vLLM
        itself would wait for it forever, and hold its memory.
        """
        if hasattr(os, "pidfd_open"):
            threading.Thread(target=end_after, args=(pid, os.getppid()), daemon=True).start()
        return asdict(self._state)

    def check_weights(self, folder: str | None = None, manifest: Any = None) -> dict[str, Any]:
        """Would the update of `folder` (or of a manifest alone) fill every parameter, and nothing else? Reads
        all of it, changes nothing.
        """
        try:
            found = Manifest.of(manifest) if folder is None else Manifest.read(Path(folder))
            problem = self._problem(found) or (None if folder is None else _file_problem(Path(folder), found))
        except (OSError, ValueError, TypeError, KeyError) as error:
            problem = f"{'' if folder is None else f'{folder}: '}{type(error).__name__}: {error}"
        return asdict(replace(self._state, problem=problem))

    def load_weights_of(self, folder: str) -> dict[str, Any]:
        """Loads an update that `check_weights` has passed."""
        manifest = Manifest.read(Path(folder))
        with self._unless_it_fails(manifest):
            loaded = self._reload(_tensors_of(Path(folder), manifest))
            self._after_load(loaded)
        return asdict(self._state)

    def begin_weights(self) -> dict[str, Any]:
        """An update on another way has begun: until `end_weights` nothing may be drawn."""
        self._state = replace(self._state, broken=True, problem="a weight update has begun and not ended")
        return asdict(self._state)

    def end_weights(self, manifest: Any) -> dict[str, Any]:
        """The update that came on another way, vLLM's own weight transfer, is complete. Its names were
        compared by `check_weights`; which parameters vLLM filled from them is not seen here.
        """
        with self._unless_it_fails(Manifest.of(manifest)):
            self._after_load(None)
        return asdict(self._state)

    def _unless_it_fails(self, manifest: Manifest) -> _Loading:
        return _Loading(self, manifest)

    def _problem(self, manifest: Manifest) -> str | None:
        """Why the update does not fit this model, or None."""
        state = self._state
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        replicas = config.parallel_config.data_parallel_size
        if replicas > 1:
            return (
                f"this engine runs {replicas} data-parallel replicas, of which one alone answers for its "
                "weights. Start one engine for each, and name all of them in rollout.vllm.urls"
            )
        if state.broken:
            return f"an earlier update failed half-way: {state.problem}. Restart the engine"
        if state.run == manifest.run and state.version is not None and manifest.version <= state.version:
            return f"version {manifest.version} is not newer than version {state.version}, which is served"
        shapes = self._checkpoint_shapes()
        sent = {entry.name: tuple(entry.shape) for entry in manifest.tensors}
        if len(sent) != len(manifest.tensors):
            return "a tensor was sent twice"
        unknown, missing = sorted(sent.keys() - shapes.keys()), sorted(shapes.keys() - sent.keys())
        if unknown:
            return f"tensors that match no parameter of the engine's model: {_shorten(unknown)}"
        if missing:
            return f"parameters of the engine's model that would receive nothing: {_shorten(missing)}"
        for name, shape in sent.items():
            if shape != shapes[name]:
                return f"{name} was sent as {list(shape)}, the engine's model has {list(shapes[name])}"
        for entry in manifest.tensors:
            if not getattr(torch, entry.dtype, torch.int64).is_floating_point:
                return f"{entry.name} is {entry.dtype}: expected floating point numbers"
        return None

    def _checkpoint_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of every tensor of the folder that the engine started from, without a tied head."""
        if self._shapes is None:
            from safetensors import safe_open

            config: Any = self.vllm_config.model_config  # type: ignore[attr-defined]
            files = sorted(Path(config.model).glob("*.safetensors"))
            if not files:
                raise ValueError(
                    f"the engine was started on {config.model}, which is no folder with safetensors to "
                    "compare with: start it on a folder, such as the run's own model.hf_path"
                )
            shapes: dict[str, tuple[int, ...]] = {}
            for file in files:
                with safe_open(str(file), framework="pt") as opened:
                    names = list(opened.keys())
                    shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in names}
            tied = bool(getattr(config.hf_config, "tie_word_embeddings", False))
            self._shapes = {
                name: shape
                for name, shape in shapes.items()
                if not name.endswith(_ROTARY) and not (tied and name == TIED_HEAD)
            }
        return self._shapes

    def _reload(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        """vLLM's own `reload_weights`; returns the names of the parameters it filled."""
        model, filled = self._model(), set()
        load = model.load_weights

        def load_and_note(weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
            loaded = load(weights)
            filled.update(loaded)
            return loaded

        model.load_weights = load_and_note
        try:
            self.reload_weights(weights_iterator=tensors)  # type: ignore[attr-defined]
        finally:
            del model.load_weights
        return filled

    def _after_load(self, filled: set[str] | None) -> None:
        """Every parameter has the new values, the tied head too. Raises `ValueError` where one has not."""
        model = self._model()
        if filled is not None:
            empty = sorted({name for name, _ in model.named_parameters()} - filled)
            if empty:
                raise ValueError(f"parameters that received nothing: {_shorten(empty)}")
        refresh_shared(model)

    def _model(self) -> Any:
        return self.model_runner.get_model()  # type: ignore[attr-defined]


class _Loading:
    """A context: the worker is broken from its start until its end without an exception."""

    def __init__(self, receiver: WeightReceiver, manifest: Manifest) -> None:
        self._receiver, self._manifest = receiver, manifest

    def __enter__(self) -> None:
        self._receiver._state = replace(self._receiver._state, broken=True, problem="the update is under way")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        manifest = self._manifest
        if error is None:
            self._receiver._state = WeightsState(run=manifest.run, version=manifest.version)
            return False
        problem = f"loading version {manifest.version} failed: {type(error).__name__}: {error}"
        self._receiver._state = replace(self._receiver._state, broken=True, problem=problem)
        # Not raised: the sender hears of it in the state, and the engine lives to say so again.
        return isinstance(error, Exception)


def end_after(pid: int, parent: int) -> None:
    """Waits for the end of the process, then kills this one; and its `parent`, where that is vLLM's engine
    above several workers and not the process itself. Linux.
    """
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        ended = select.poll()
        ended.register(os.pidfd_open(pid), select.POLLIN)
        ended.poll()
    if parent not in (pid, 1) and os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


@torch.no_grad()
def refresh_shared(model: torch.nn.Module) -> None:
    """Prepares layers anew whose weight is another layer's: vLLM's reload prepares the layer that a tensor
    names, and on a CPU a tied head keeps a packed copy of the embedding for its products, the old one.

    `ValueError` where such a layer still computes with other numbers than its weight's.
    """
    owners: dict[int, list[torch.nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    for modules in owners.values():
        for module in modules if len(modules) > 1 else ():
            # What vLLM puts beside the weight of a layer on a CPU.
            if hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr]
                _check_product(module)


def _check_product(module: Any) -> None:
    """The layer's own product is that of its weight."""
    weight = module.weight
    probe = torch.linspace(-1.0, 1.0, weight.shape[1], dtype=weight.dtype)[None]
    said, right = module.cpu_linear(probe, weight, None), torch.nn.functional.linear(probe, weight)
    scale = max(float(right.abs().max()), 1e-6)
    if float((said - right).abs().max()) > _PRODUCT_TOLERANCE[weight.dtype] * scale:
        raise ValueError(f"{type(module).__name__} computes with other numbers than its weight's")


# Relative to the largest product: what rounding and the order of sums make.
_PRODUCT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


def _file_problem(folder: Path, manifest: Manifest) -> str | None:
    """What of the files is not what the manifest says, or None."""
    entries = {entry.name: entry for entry in manifest.tensors}
    for name, tensor in _tensors_of(folder, manifest):
        entry = entries[name]
        found = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if found != (tuple(entry.shape), entry.dtype):
            return f"{name} is {found[1]} {list(found[0])} in {entry.file}, not what was announced"
        if checksum_of(tensor) != entry.checksum:
            return f"{name} in {entry.file} does not have the checksum that was announced"
    return None


def _tensors_of(folder: Path, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in the manifest's order. Files are memory-mapped, one open at a time."""
    from safetensors import safe_open

    by_file: dict[str, list[TensorEntry]] = {}
    for entry in manifest.tensors:
        by_file.setdefault(entry.file, []).append(entry)
    for file, entries in by_file.items():
        with safe_open(str(folder / file), framework="pt") as opened:
            for entry in entries:
                yield entry.name, opened.get_tensor(entry.name)


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
