"""The only door to torch.distributed. Every collective of this project passes here, so tests can count them.

A group of None means "this process alone": nothing is sent and nothing is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from rlcore.transport_errors import is_transport_error

# torch.distributed.ProcessGroup | None; torch exports no public name for it on builds without distributed.
Group = Any
ReduceOp = Literal["sum", "max", "min"]

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True)
class CollectiveCall:
    """One collective as it was issued on this rank."""

    kind: str
    group_size: int
    num_bytes: int
    """Bytes of the tensor this rank handed in."""


class CollectiveError(RuntimeError):
    """A collective did not finish: a peer came too late, or ended. Says which call, which group, which rank.

    Not for nccl time-outs: its watchdog ends the process, with a message of its own.
    """


@contextmanager
def name_failure(call: str, group: Group) -> Iterator[None]:
    """Turns a transport's error, which knows sockets only, into a `CollectiveError`; others pass unchanged.

    `call`: what this rank was doing, for the message.
    """
    try:
        yield
    except CollectiveError:
        raise  # an inner call has said it more exactly
    except RuntimeError as error:
        if not is_transport_error(f"{type(error).__name__}: {error}"):
            raise
        raise CollectiveError(f"{call} over {_describe(group)} on rank {dist.get_rank()}: {error}") from error


def _describe(group: Group) -> str:
    """`TENSOR_MODEL_PARALLEL_GROUP (ranks 0, 1)`: Megatron's names; every rank of the run for None."""
    group = dist.group.WORLD if group is None else group
    ranks = dist.get_process_group_ranks(group)
    name = "all ranks" if len(ranks) == dist.get_world_size() else group.group_desc
    shown = ", ".join(map(str, ranks[:_MOST_SHOWN])) + (", ..." if len(ranks) > _MOST_SHOWN else "")
    return f"{name} (ranks {shown})"


# Ranks of a group that a message lists.
_MOST_SHOWN = 16

_recorders: list[list[CollectiveCall]] = []


@contextmanager
def record_collectives() -> Iterator[list[CollectiveCall]]:
    """Collects the `CollectiveCall`s issued in this process while the context is open."""
    calls: list[CollectiveCall] = []
    _recorders.append(calls)
    try:
        yield calls
    finally:
        _recorders.remove(calls)


def _record(kind: str, tensor: torch.Tensor, group: Group) -> None:
    for calls in _recorders:
        calls.append(CollectiveCall(kind, dist.get_world_size(group), tensor.numel() * tensor.element_size()))


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def group_size(group: Group) -> int:
    """Number of ranks in the group; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: Group) -> int:
    """This process's rank inside the group; 0 for None."""
    return 0 if group is None else dist.get_rank(group)


def all_reduce_(tensor: torch.Tensor, op: ReduceOp, group: Group) -> torch.Tensor:
    """Reduces `tensor` over the group in place and returns it."""
    if group_size(group) > 1:
        _record("all_reduce", tensor, group)
        # Waits for every rank of `group`; all of them call it whatever their data.
        with name_failure(f"all_reduce ({op}) of {_shape(tensor)}", group):
            dist.all_reduce(tensor, op=_OPS[op], group=group)
    return tensor


def all_gather(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Stacks the ranks' equally shaped tensors: returns `[group size, *tensor.shape]`, in group-rank
    order.
    """
    size = group_size(group)
    if size == 1:
        return tensor.unsqueeze(0)
    _record("all_gather", tensor, group)
    tensor = tensor.contiguous()
    out = torch.empty((size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
    # Waits for every rank of `group`; shapes are equal on all of them by contract.
    with name_failure(f"all_gather of {_shape(tensor)}", group):
        dist.all_gather(list(out.unbind(0)), tensor, group=group)
    return out


def reduce_scatter(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Sums the ranks' `[n * group size, ...]` and returns this rank's n rows, in group-rank order."""
    size = group_size(group)
    if size == 1:
        return tensor
    _record("reduce_scatter", tensor, group)
    out = tensor.new_empty((tensor.shape[0] // size, *tensor.shape[1:]))
    # Waits for every rank of `group`; shapes are equal on all of them by contract.
    with name_failure(f"reduce_scatter of {_shape(tensor)}", group):
        dist.reduce_scatter_tensor(out, tensor.contiguous(), group=group)
    return out


def broadcast_(tensor: torch.Tensor, group_src: int, group: Group) -> torch.Tensor:
    """Overwrites `tensor` with that of rank `group_src` of the group and returns it."""
    if group_size(group) > 1:
        _record("broadcast", tensor, group)
        # Receivers wait for the source; the source waits for nobody but the transport.
        source = dist.get_global_rank(group, group_src)
        with name_failure(f"broadcast of {_shape(tensor)} from rank {source}", group):
            dist.broadcast(tensor, src=source, group=group)
    return tensor


def scatter(parts: torch.Tensor | None, out: torch.Tensor, group_src: int, group: Group) -> torch.Tensor:
    """Overwrites `out` with this rank's row of the source's `parts [group size, *out.shape]`, and returns it.

    `parts` is read on rank `group_src` of the group alone.
    """
    if group_size(group) == 1:
        assert parts is not None, "the only rank is the source"
        return out.copy_(parts[0])
    _record("scatter", out, group)
    rows = None if parts is None else [row.contiguous() for row in parts.unbind(0)]
    # Receivers wait for the source; the source waits for nobody but the transport.
    source = dist.get_global_rank(group, group_src)
    with name_failure(f"scatter of {_shape(out)} from rank {source}", group):
        dist.scatter(out, rows, src=source, group=group)
    return out


def raise_together(error: BaseException | None, group: Group, device: torch.device | str = "cpu") -> None:
    """Raises on every rank of the group when any rank failed; returns silently when none did.

    Ranks hand in their own exception or None. The failing rank re-raises its own exception; the others raise
    a `ValueError` that carries the first failing rank's message. One all-reduce of one number; only on
    failure also one all-gather of a fixed-size message.
    """
    failed = torch.tensor([0 if error is None else 1], dtype=torch.int32, device=device)
    if bool(all_reduce_(failed, "max", group)[0]):
        reasons = all_gather_text("" if error is None else f"{type(error).__name__}: {error}", group, device)
        if error is not None:
            raise error
        rank = next(rank for rank, reason in enumerate(reasons) if reason)
        raise ValueError(f"rank {rank} of {len(reasons)} failed: {reasons[rank]}")


def all_gather_text(text: str, group: Group, device: torch.device | str = "cpu") -> list[str]:
    """Every rank's text, in group-rank order, of each what fits into `_MESSAGE_BYTES`. One all-gather."""
    written = text.encode(errors="replace").replace(b"\0", b"")[:_MESSAGE_BYTES]
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    message[: len(written)] = torch.tensor(list(written), dtype=torch.uint8)
    gathered = all_gather(message.to(device), group).cpu()
    return [bytes(row[row != 0].tolist()).decode(errors="replace") for row in gathered]


# Room for one message that a rank sends to its peers.
_MESSAGE_BYTES = 1024
