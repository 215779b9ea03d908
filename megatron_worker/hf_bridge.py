"""Moves weights between Hugging Face folders and the sharded model; also draws initial weights by name."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_worker.architecture import Architecture, hf_config
from megatron_worker.chunks import Model, chunks_of, num_stages, parameters_of, stage_of, unwrap
from megatron_worker.parameter_layouts import (
    ParameterLayout,
    ReadSlice,
    hf_shapes,
    is_expert,
    local_layer_name,
    stage_layouts,
)
from rlcore.collectives import all_gather, broadcast_, group_rank, raise_together
from rlcore.groups import ParallelGroups

INIT_STD = 0.02
"""Standard deviation of drawn weights; projections that end a block get it over sqrt(2 * layers)."""
MAX_FILE_BYTES = 4 * 2**30
"""Weights are written in files of about this size: no rank ever holds a large model as a whole."""
_TIED_HEAD = "lm_head.weight"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "generation_config.json",
    "vocab.*",
    "merges.txt",
)


def initialize_from_seed(model: Model, arch: Architecture, seed: int, groups: ParallelGroups) -> None:
    """Draws this rank's weights. Each is a shard of a full tensor that depends on the seed and its name only,
    so every layout holds the same model. Norms are 1, biases 0. No collective.
    """
    shapes = hf_shapes(arch)

    def read(hf_name: str, axis: int, start: int, stop: int) -> torch.Tensor:
        return _drawn_tensor(hf_name, shapes[hf_name], arch.num_layers, seed).narrow(
            axis, start, stop - start
        )

    _fill(model, arch, groups, read)


def _drawn_tensor(hf_name: str, shape: tuple[int, ...], num_layers: int, seed: int) -> torch.Tensor:
    if hf_name.endswith("norm.weight"):
        return torch.ones(shape)
    if hf_name.endswith("bias"):
        return torch.zeros(shape)
    ends_block = hf_name.endswith(("o_proj.weight", "down_proj.weight", ".w2.weight"))
    std = INIT_STD / math.sqrt(2 * num_layers) if ends_block else INIT_STD
    digest = hashlib.sha256(f"{seed} {hf_name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def load_hf_weights(model: Model, arch: Architecture, path: str | Path, groups: ParallelGroups) -> None:
    """Fills this rank's chunks from a Hugging Face folder's safetensors, reading only the slices it needs.

    Raises `ValueError`, on every rank, when a tensor is missing, left over, or of another shape than `arch`
    says. Load before the optimizer is built: it copies the weights. One collective over the world.
    """
    error: Exception | None = None
    try:
        folder = _WeightFolder(Path(path))
        folder.check(arch)
        _fill(model, arch, groups, folder.read)
    except (ValueError, OSError, SafetensorError) as caught:
        error = caught if isinstance(caught, ValueError) else ValueError(f"{path}: {caught}")
    device = next(parameters_of(model)).device
    raise_together(error, groups.world, device)


def _fill(model: Model, arch: Architecture, groups: ParallelGroups, read: ReadSlice) -> None:
    """Copies what `read` returns into every parameter; `ValueError` naming those that do not fit."""
    chunks = chunks_of(model)
    total = num_stages(len(chunks), groups)
    for index, chunk in enumerate(chunks):
        stage = stage_of(index, groups)
        layouts = stage_layouts(arch, total, stage, groups.ep_size, groups.ep_rank)
        _fill_chunk(chunk, layouts, groups, read)


def _fill_chunk(
    chunk: torch.nn.Module,
    layouts: Mapping[str, ParameterLayout],
    groups: ParallelGroups,
    read: ReadSlice,
) -> None:
    parameters = _named_parameters(chunk)
    if parameters.keys() != layouts.keys():
        raise ValueError(
            "The model does not fit the architecture. Parameters without a Hugging Face source: "
            f"{sorted(parameters.keys() - layouts.keys())}; expected but absent: "
            f"{sorted(layouts.keys() - parameters.keys())}."
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            shard = layouts[name].shard(read, groups.tp_rank, groups.tp_size)
            if shard.shape != parameter.shape:
                raise ValueError(
                    f"{name}: the model holds {tuple(parameter.shape)}, the weights {tuple(shard.shape)}."
                )
            parameter.copy_(shard)


def _named_parameters(chunk: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """By the names of Megatron's local layers."""
    return {local_layer_name(name): parameter for name, parameter in unwrap(chunk).named_parameters()}


class _WeightFolder:
    """The safetensors of one folder. Files are memory-mapped: reading a slice touches only its pages."""

    def __init__(self, path: Path) -> None:
        self._path = path
        index = path / _INDEX
        if index.is_file():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        elif (path / _WEIGHTS).is_file():
            names = [_WEIGHTS]
        else:
            raise ValueError(f"{path}: expected {_WEIGHTS} or {_INDEX}. Convert the weights to safetensors.")
        files = [safe_open(str(path / name), framework="pt") for name in names]
        self._slices = {key: file.get_slice(key) for file in files for key in file.keys()}  # noqa: SIM118 (no mapping)

    def check(self, arch: Architecture) -> None:
        """`ValueError` unless the folder holds exactly the tensors of the architecture, in its shapes."""
        expected = hf_shapes(arch)
        found = {
            name
            for name in self._slices
            # Old folders also store the rotary frequencies, which follow from the config.
            if not name.endswith("rotary_emb.inv_freq")
            and not (arch.tie_word_embeddings and name == _TIED_HEAD)
        }
        missing, unused = sorted(expected.keys() - found), sorted(found - expected.keys())
        if missing or unused:
            raise ValueError(
                f"{self._path}: the weights do not fit config.json. Missing: {_shorten(missing)}; "
                f"not used by the model: {_shorten(unused)}."
            )
        for name, shape in expected.items():
            if tuple(self._slices[name].get_shape()) != shape:
                raise ValueError(
                    f"{self._path}: {name} has shape {tuple(self._slices[name].get_shape())}, "
                    f"config.json says {shape}."
                )

    def read(self, hf_name: str, axis: int, start: int, stop: int) -> torch.Tensor:
        """One slice of one tensor."""
        tensor_slice = self._slices[hf_name]
        return tensor_slice[start:stop] if axis == 0 else tensor_slice[:, start:stop]


def _shorten(names: list[str]) -> str:
    if not names:
        return "none"
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def export_hf_tensors(
    model: Model, arch: Architecture, groups: ParallelGroups
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (HF name, full tensor on the CPU) for every weight, on every rank, in model order.

    Padding rows of the vocabulary are cut and a tied head is left out; experts come in the order of their
    index on their EP rank. Collectives, per Megatron parameter: one broadcast of a TP shard over the pipeline
    group, one all-gather over the tensor group, and for experts one over the expert group, so every rank must
    exhaust the iterator. At most one parameter, or one expert of each EP rank, is held in full at a time.
    """
    held = [_named_parameters(chunk) for chunk in chunks_of(model)]
    like = next(parameters_of(model))
    total = num_stages(len(held), groups)
    for stage in range(total):
        index, owner = divmod(stage, groups.pp_size)
        layouts_of_ep = [
            stage_layouts(arch, total, stage, groups.ep_size, rank) for rank in range(groups.ep_size)
        ]
        for name, layout in layouts_of_ep[0].items():
            if name == "output_layer.weight" and arch.tie_word_embeddings:
                continue
            if owner == groups.pp_rank:
                shard = held[index][name].detach().clone()
            else:
                shard = torch.empty(layout.shard_shape(groups.tp_size), dtype=like.dtype, device=like.device)
            # The other ranks of the pipeline wait for the owner; then the ranks of one stage for each other.
            broadcast_(shard, owner, groups.pp)
            shards = all_gather(shard, groups.tp)
            # The EP ranks of a stage have as many experts each, and the same names for them.
            of_ep = all_gather(shards, groups.ep).cpu() if is_expert(name) else shards.cpu()[None]
            for rank, own in enumerate(of_ep.unbind(0)):
                for hf_name, tensor in layouts_of_ep[rank][name].unshard(own.unbind(0)).items():
                    yield hf_name, tensor.contiguous()


def save_hf(
    model: Model,
    arch: Architecture,
    path: str | Path,
    groups: ParallelGroups,
    source: str | Path | None = None,
) -> None:
    """Writes the policy as a Hugging Face folder, with the tokenizer of folder `source`.

    The first rank writes into a temporary folder beside `path` and renames it, replacing an older folder; no
    rank returns before it is in place. Raises `ValueError` on every rank when writing fails. Collective over
    the world.
    """
    target = Path(path)
    draft = target.with_name(f".{target.name}.incomplete")
    writes = group_rank(groups.world) == 0
    tensors = export_hf_tensors(model, arch, groups)
    error: Exception | None = None
    try:
        if writes:
            _write_folder(tensors, arch, draft, source)
            _replace(draft, target)
    except Exception as caught:
        error = ValueError(f"{target}: the policy could not be written: {caught}")
        shutil.rmtree(draft, ignore_errors=True)
    for _ in tensors:  # ranks that do not write, or failed to, still take part in the collectives
        pass
    raise_together(error, groups.world, next(parameters_of(model)).device)


def _write_folder(
    tensors: Iterator[tuple[str, torch.Tensor]], arch: Architecture, draft: Path, source: str | Path | None
) -> None:
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    file_of: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}
    dtype, num_bytes = "float32", 0

    def flush() -> None:
        nonlocal num_bytes
        name = f"model-{len(set(file_of.values())) + 1:05d}.safetensors"
        save_file(pending, str(draft / name), metadata={"format": "pt"})
        file_of.update(dict.fromkeys(pending, name))
        pending.clear()
        num_bytes = 0

    for hf_name, tensor in tensors:
        pending[hf_name] = tensor
        num_bytes += tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        if num_bytes >= MAX_FILE_BYTES:
            flush()
    if pending:
        flush()
    files = sorted(set(file_of.values()))
    if len(files) == 1:
        os.rename(draft / files[0], draft / _WEIGHTS)
    else:
        (draft / _INDEX).write_text(
            json.dumps({"metadata": {}, "weight_map": file_of}, indent=1), encoding="utf-8"
        )
    config = hf_config(arch, dtype)
    if source is not None:
        config = _copy_companions(Path(source), draft) | config
    (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _copy_companions(source: Path, draft: Path) -> dict[str, object]:
    """Copies the tokenizer and its like; returns the special token ids of the source's config."""
    for pattern in _COMPANIONS:
        for file in source.glob(pattern):
            shutil.copy(file, draft / file.name)
    values = json.loads((source / "config.json").read_text(encoding="utf-8"))
    return {key: value for key, value in values.items() if key.endswith("_token_id")}


def _replace(draft: Path, target: Path) -> None:
    """Puts the finished folder in place: a reader sees the old one, none, or the new one, no mixture."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(draft, target)
    shutil.rmtree(old, ignore_errors=True)
