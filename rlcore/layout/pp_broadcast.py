"""Per-token results from the last pipeline stage to every stage, in one broadcast of one buffer.

Which fields exist is decided from the config by `score_fields` on every stage; names, shapes and dtypes are
static. No pickled objects, no gather that asks who has what. Bools travel as bits.

The buffer: one status byte (0 good, 1 the last stage has nothing valid to send), then the fields in order.
    The last stage always sends, so the others can never be left waiting for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rlcore.collectives import broadcast_
from rlcore.groups import ParallelGroups

_SENT_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.bool,
)


@dataclass(frozen=True)
class Field:
    """One per-token result that travels: its name and dtype. It arrives with the same bits."""

    name: str
    dtype: torch.dtype


def score_fields(*, truncates: bool, unfiltered: bool = False) -> tuple[Field, ...]:
    """What a scoring pass sends, from the config alone: the same tuple on every stage.

    `unfiltered`: the logprob of the whole distribution too.
    """
    logprob = Field("logprob", torch.float32)
    if not truncates:
        # Every token is kept, the log mass is 0 and both logprobs are one: receivers fill these in.
        return (logprob,)
    fields = (logprob, Field("keep", torch.bool), Field("log_mass", torch.float32))
    return (*fields, Field("unfiltered_logprob", torch.float32)) if unfiltered else fields


def broadcast_from_last_stage(
    fields: Sequence[Field],
    values: Mapping[str, torch.Tensor] | None,
    shape: tuple[int, ...],
    groups: ParallelGroups,
    device: torch.device | str,
) -> dict[str, torch.Tensor]:
    """The fields on every stage, each of `shape`.

    `values` holds exactly the fields on the last stage and is None elsewhere.
    Collectives: one broadcast over PP, 1 byte and, a token, each dtype's size (1/8 for bool); none with one
    stage.
    Raises `ValueError` on every stage when the last one had missing, extra, misshapen or mistyped values.
    """
    problem = _problem(fields, values, shape) if groups.is_last_stage else ""
    num_tokens = int(torch.Size(shape).numel())
    buffer = torch.zeros(
        1 + sum(_num_bytes(field, num_tokens) for field in fields), dtype=torch.uint8, device=device
    )
    if groups.is_last_stage:
        buffer[0] = 1 if problem else 0
        if not problem:
            assert values is not None
            parts = [_pack(values[field.name].to(device)) for field in fields]
            buffer[1:] = torch.cat(parts) if parts else buffer[1:]
    broadcast_(buffer, groups.pp_size - 1, groups.pp)
    if problem:
        raise ValueError(f"the last pipeline stage cannot send its scores: {problem}")
    if bool(buffer[0]):
        raise ValueError("the last pipeline stage had no valid scores to send; its own error says why.")
    received, offset = {}, 1
    for field in fields:
        size = _num_bytes(field, num_tokens)
        received[field.name] = _unpack(buffer[offset : offset + size], field, num_tokens).reshape(shape)
        offset += size
    return received


def _problem(
    fields: Sequence[Field], values: Mapping[str, torch.Tensor] | None, shape: tuple[int, ...]
) -> str:
    """What is wrong with the values, or an empty string."""
    names = [field.name for field in fields]
    if values is None or sorted(values) != sorted(names):
        return f"expected the fields {names}, got {None if values is None else sorted(values)}."
    for field in fields:
        value = values[field.name]
        if (
            field.dtype not in _SENT_DTYPES
            or value.dtype != field.dtype
            or tuple(value.shape) != tuple(shape)
        ):
            return (
                f"{field.name} is {value.dtype} {tuple(value.shape)}, expected {field.dtype} {tuple(shape)}."
            )
    return ""


def _num_bytes(field: Field, num_tokens: int) -> int:
    return (num_tokens + 7) // 8 if field.dtype == torch.bool else field.dtype.itemsize * num_tokens


def _pack(value: torch.Tensor) -> torch.Tensor:
    """The value's bytes; eight bools a byte, least significant bit first."""
    flat = value.reshape(-1).contiguous()
    if value.dtype != torch.bool:
        return flat.view(torch.uint8)
    padded = torch.zeros((flat.numel() + 7) // 8 * 8, dtype=torch.uint8, device=flat.device)
    padded[: flat.numel()] = flat
    return (padded.view(-1, 8) << _bit_positions(flat.device)).sum(dim=1, dtype=torch.uint8)


def _unpack(raw: torch.Tensor, field: Field, num_tokens: int) -> torch.Tensor:
    if field.dtype != torch.bool:
        # A copy: the slice of the buffer starts at an odd byte, which no wider type may.
        return raw.clone().view(field.dtype)
    bits = (raw[:, None] >> _bit_positions(raw.device)) & 1
    return bits.reshape(-1)[:num_tokens].bool()


def _bit_positions(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
