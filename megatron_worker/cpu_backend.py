"""Lets Megatron-core, which addresses CUDA by name, run on a CPU with gloo.

Nothing happens on import. While `cpu_backend()` is open, calls that name a CUDA device are answered on the
CPU and `torch.cuda`'s random generator is the CPU's; leaving the context puts every attribute back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.overrides import TorchFunctionMode

DeviceType = Literal["cpu", "cuda"]

_CPU = torch.device("cpu")


def resolve_device_type(backend: Literal["auto", "cpu", "cuda"]) -> DeviceType:
    """The device type that `parallel.backend` means on this machine. `ValueError` for `cuda` without a
    device.
    """
    has_cuda = torch.cuda.is_available()
    if backend == "cuda" and not has_cuda:
        raise ValueError(
            "parallel.backend='cuda', but there is no CUDA device here. Set parallel.backend='cpu'."
        )
    if backend == "auto":
        return "cuda" if has_cuda else "cpu"
    return backend


def cpu_backend_is_active() -> bool:
    """Is a `cpu_backend` context open in this process?"""
    return torch.cuda.current_device is _current_device


@contextmanager
def cpu_backend(backend: Literal["auto", "cpu", "cuda"] = "auto") -> Iterator[DeviceType]:
    """Redirects Megatron-core's CUDA calls to the CPU while open; yields the device type in use.

    `auto` does nothing where there is a CUDA device and `cuda` never does anything; `cpu` redirects
    everywhere. A nested request does nothing. The redirect of factory calls belongs to the thread that opened
    the context; it may stay open for the life of the process.
    """
    device_type = resolve_device_type(backend)
    if device_type == "cuda" or cpu_backend_is_active():
        yield device_type
        return
    with ExitStack() as stack:
        for owner, name, replacement in _replacements():
            stack.enter_context(mock.patch.object(owner, name, replacement))
        # Megatron's router reads the name even where Transformer Engine, whose GEMM it is, is not installed.
        stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        stack.enter_context(_CudaOnCpu())
        yield device_type


class _CudaOnCpu(TorchFunctionMode):
    """Answers torch functions that name a CUDA device on the CPU."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizer and gradient clipping compare this name with CUDA's.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.type or func is torch.Tensor.to:
            args = tuple(_on_cpu(value) for value in args)
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


def _on_cpu(value: Any) -> Any:
    """A device, its name or a tensor type's name, with CUDA replaced by the CPU; anything else as it is."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return _CPU
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return _CPU
    if isinstance(value, str) and value.startswith("torch.cuda."):
        return value.replace("torch.cuda.", "torch.", 1)
    return value


def _replacements() -> list[tuple[Any, str, Any]]:
    """What is replaced: (owner, attribute, replacement)."""
    stream = _CpuStream()
    return [
        (torch.cuda, "current_device", _current_device),
        (torch.cuda, "current_stream", lambda device=None: stream),
        (torch.cuda, "stream", lambda stream: nullcontext()),
        # Made by the first dispatcher of a process and kept: this one must not outlive the context.
        (MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", stream),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _to_host),
        (mappings, "_gather_along_first_dim", _gather_uneven),
        (mappings, "_reduce_scatter_along_first_dim", _reduce_scatter_uneven),
        (torch.cuda, "synchronize", _synchronize),
        (torch.cuda, "manual_seed", _manual_seed),
        (torch.cuda, "get_rng_state", _get_rng_state),
        (torch.cuda, "set_rng_state", _set_rng_state),
        (torch.cuda, "FloatTensor", _FloatTensorOnCpu),
        (torch.cuda, "IntTensor", _IntTensorOnCpu),
        (megatron_random, "_get_cuda_rng_state", _get_rng_state),
        (megatron_random, "_set_cuda_rng_state", _set_rng_state),
    ]


def _current_device() -> torch.device:
    return _CPU


def _synchronize(device: Any = None) -> None:
    return None


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _get_rng_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


class _FloatTensorOnCpu:
    """A class, because Megatron also uses the type it replaces in `isinstance`."""

    def __new__(cls, *args: Any) -> Any:
        return torch.FloatTensor(*args)


class _IntTensorOnCpu:
    """See `_FloatTensorOnCpu`."""

    def __new__(cls, *args: Any) -> Any:
        return torch.IntTensor(*args)


class _CpuStream:
    """The one stream of a CPU, and its event: what was asked for is done. The dispatcher of experts copies
    token counts to the host on a stream of its own and waits for it.
    """

    def record_event(self) -> _CpuStream:
        return self

    def synchronize(self) -> None:
        return None


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Token counts as collectives take them. Megatron's own converts only what comes from a GPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


_gather_even = mappings._gather_along_first_dim
_reduce_scatter_even = mappings._reduce_scatter_along_first_dim


def _gather_uneven(
    input_: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Megatron's all-gather along the first axis. gloo wants ranks to send equally much, which experts under
    TP do not: rows are padded to the longest share.
    """
    if output_split_sizes is None or group.size() == 1:
        return _gather_even(input_, group, output_split_sizes, *args, **kwargs)
    padded = input_.new_zeros((max(output_split_sizes), *input_.shape[1:]))
    padded[: input_.shape[0]] = input_
    shares = [torch.empty_like(padded) for _ in output_split_sizes]
    dist.all_gather(shares, padded, group=group)
    return torch.cat([share[:length] for share, length in zip(shares, output_split_sizes, strict=True)])


def _reduce_scatter_uneven(
    input_: torch.Tensor, group: Any, input_split_sizes: list[int] | None = None, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Megatron's reduce-scatter along the first axis, for shares of uneven lengths: see `_gather_uneven`."""
    if input_split_sizes is None or group.size() == 1:
        return _reduce_scatter_even(input_, group, input_split_sizes, *args, **kwargs)
    total = input_.clone()
    dist.all_reduce(total, group=group)
    return total.split(input_split_sizes)[group.rank()].contiguous()
