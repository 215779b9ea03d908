"""Clocks and counters: alternating times, traffic through `rlcore.collectives`, peak extra memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rlcore.collectives import CollectiveCall, Group, all_reduce_, record_collectives

# A fast method runs this often around each run of a slow one: the medians of both then span the same minutes.
FAST_RUNS = 3


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to the same result, as two calls so that both can be timed."""

    forward: Callable[[], torch.Tensor]
    """Returns the tensor that `backward` starts from."""
    backward: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    """Returns the gradients."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of each run, the slowest rank's."""

    forward: list[float]
    backward: list[float]

    @property
    def total(self) -> list[float]:
        """Forward plus backward, run by run."""
        return [a + b for a, b in zip(self.forward, self.backward, strict=True)]

    @property
    def median(self) -> float:
        """Of the total."""
        return statistics.median(self.total)

    @property
    def spread(self) -> tuple[float, float]:
        """Lower and upper quartile of the total."""
        ordered = sorted(self.total)
        last = len(ordered) - 1
        return ordered[round(last * 0.25)], ordered[round(last * 0.75)]


def time_alternately(
    fast: Mapping[str, Method], slow: Mapping[str, Method], repeats: int, group: Group, device: str
) -> dict[str, Times]:
    """Times of every method, interleaved: the fast ones in turn, a slow one, the fast ones again, the next.

    All methods must have run before: nothing here is a warm-up. Whatever else the machine does falls on all
    of them alike. The garbage collector is off.
    """
    times = {name: Times(forward=[], backward=[]) for name in (*fast, *slow)}
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            for slow_name in slow or [None]:
                for name in list(fast) * FAST_RUNS + ([] if slow_name is None else [slow_name]):
                    forward, backward = _time_once(fast.get(name) or slow[name], group, device)
                    times[name].forward.append(forward)
                    times[name].backward.append(backward)
    finally:
        gc.enable()
    return times


def _time_once(method: Method, group: Group, device: str) -> tuple[float, float]:
    # A barrier: every rank waits here for the slowest, so nobody's clock runs while another rank is busy.
    all_reduce_(torch.zeros(1, device=device), "sum", group)
    started = _now(device)
    result = method.forward()
    half = _now(device)
    grads = method.backward(result)
    ended = _now(device)
    del result, grads
    seconds = torch.tensor([half - started, ended - half], dtype=torch.float64, device=device)
    forward, backward = all_reduce_(seconds, "max", group).tolist()
    return forward, backward


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What this rank handed to collectives and got from them, in one forward and backward."""

    sent_bytes: int
    received_bytes: int
    """All-gather: the other ranks' tensors. All-reduce and broadcast: one tensor of the same size."""
    forward_calls: int
    backward_calls: int


def count_traffic(method: Method) -> Traffic:
    """Counted at the door all collectives of ours go through, so exact."""
    with record_collectives() as calls:
        result = method.forward()
        num_forward = len(calls)
        method.backward(result)
    return Traffic(
        sent_bytes=sum(call.num_bytes for call in calls),
        received_bytes=sum(_received(call) for call in calls),
        forward_calls=num_forward,
        backward_calls=len(calls) - num_forward,
    )


def _received(call: CollectiveCall) -> int:
    return call.num_bytes * (call.group_size - 1 if call.kind == "all_gather" else 1)


@dataclass(frozen=True, kw_only=True)
class Counted:
    """One forward and backward with its memory."""

    result: torch.Tensor
    grads: tuple[torch.Tensor, ...]
    extra_peak_bytes: int
    """See `count_memory`."""


def count_memory(method: Method, device: str) -> Counted:
    """One run; its extra peak is the largest number of bytes alive at once beyond what existed before and the
    gradients that are returned.

    A gradient's own allocation is left out from the moment it exists. CPU: every allocation and release of
    torch's CPU allocator as the profiler records it: buffers of compiled kernels, tensors saved for backward,
    intermediates of eager ops; scratch that a kernel takes from malloc itself, and gloo's own buffers, are
    not seen. CUDA: the caching allocator's peak less the gradients.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = method.forward()
        grads = method.backward(result)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before - sum(_num_bytes(grad) for grad in grads)
        return Counted(result=result.detach(), grads=grads, extra_peak_bytes=peak)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as run:
        result = method.forward()
        grads = method.backward(result)
    peak = peak_beyond(_allocations(run), [_num_bytes(grad) for grad in grads])
    return Counted(result=result.detach(), grads=grads, extra_peak_bytes=peak)


def warm_and_count(method: Method, device: str) -> Counted:
    """One run so that everything is compiled, then one under the memory count."""
    method.backward(method.forward())
    return count_memory(method, device)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def peak_beyond(events: Iterable[tuple[int, int]], result_bytes: Iterable[int]) -> int:
    """Peak of the live bytes of `(address, signed bytes)` events in order, the results left out.

    A result is the last allocation of its size that is never released. Releases of what was allocated before
    the first event are ignored.
    """
    events = list(events)
    kept: dict[int, int] = {}
    for index, (address, num_bytes) in enumerate(events):
        if num_bytes > 0:
            kept[address] = index
        else:
            kept.pop(address, None)
    left_out = set()
    for size in result_bytes:
        candidates = [i for i in kept.values() if events[i][1] == size and i not in left_out]
        if not candidates:
            raise RuntimeError(
                f"no allocation of {size} bytes outlived the call: its memory cannot be judged"
            )
        left_out.add(max(candidates))
    alive: dict[int, int] = {}
    total = peak = 0
    for index, (address, num_bytes) in enumerate(events):
        if num_bytes > 0:
            alive[address] = 0 if index in left_out else num_bytes
            total += alive[address]
            peak = max(peak, total)
        else:
            total -= alive.pop(address, 0)
    return peak


def _allocations(run: torch.profiler.profile) -> list[tuple[int, int]]:
    """`(address, signed bytes)` of every allocation and release of a profile, in order."""
    from torch._C._profiler import _EventType

    assert run.profiler is not None and run.profiler.kineto_results is not None
    found, open_events = [], list(run.profiler.kineto_results.experimental_event_tree())
    while open_events:
        event = open_events.pop()
        open_events.extend(event.children)
        if event.tag == _EventType.Allocation:
            fields: Any = event.extra_fields
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return [(address, num_bytes) for _, address, num_bytes in sorted(found)]
