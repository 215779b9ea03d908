"""A rank's chunks of the model: one, or several where virtual stages cut its share once more.

Chunk i of pipeline rank r is stage i x PP + r of the model: Megatron's order, in which stages follow each
other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from rlcore.groups import ParallelGroups

Model = torch.nn.Module | Sequence[torch.nn.Module]
"""A rank's only chunk, or all its chunks in order; wrapped or not."""


def chunks_of(model: Model) -> list[Any]:
    """The chunks in order."""
    return [model] if isinstance(model, torch.nn.Module) else list(model)


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The bare chunk inside Megatron's wrappers (DDP, float16)."""
    while isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module  # pyright: ignore[reportAssignmentType]
    return model


def let_go(model: Model) -> None:
    """Cuts what would keep the chunks of a closed worker and their process groups, with threads each, for
    ever. Autograd hooks hold a chunk unseen by the garbage collector, so the chunk must not hold what holds
    those: the optimizer, nor the tensors that experts' dispatchers keep of the last forward. And rotary
    embeddings cache their frequencies by context-parallel group.
    """
    clear = getattr(RotaryEmbedding.forward, "cache_clear", None)
    if clear is not None:
        clear()
    for chunk in chunks_of(model):
        chunk.config.grad_scale_func = None
        for module in chunk.modules():
            dispatcher = getattr(module, "token_dispatcher", None)
            for name, value in list(vars(dispatcher).items()) if dispatcher is not None else ():
                if torch.is_tensor(value):
                    setattr(dispatcher, name, None)


def parameters_of(model: Model) -> Iterator[torch.nn.Parameter]:
    """The parameters of every chunk."""
    for chunk in chunks_of(model):
        yield from chunk.parameters()


def num_stages(num_chunks: int, groups: ParallelGroups) -> int:
    """Stages of the whole model, virtual ones counted."""
    return num_chunks * groups.pp_size


def stage_of(index: int, groups: ParallelGroups) -> int:
    """Which stage of the whole model this rank's chunk `index` is."""
    return index * groups.pp_size + groups.pp_rank
