"""Starts the benchmark's own ranks: one process each, one thread each, joined in one group."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

# Longest a benchmark may take, in seconds, and longest one rank waits for another.
TIMEOUT_S = 3600.0
COLLECTIVE_TIMEOUT_S = 600.0
# How long the others may take to say why they failed, once one has.
GRACE_S = 3.0


class CheckFailed(Exception):
    """Two methods that must agree do not: nothing is reported."""


def run_ranks(program: Callable[..., Any], world_size: int, device: str, *args: Any) -> list[Any]:
    """Return values of the module-level `program(group, *args)` on every rank, in rank order.

    The group is None for a world of one. A rank's `CheckFailed` or `ValueError` is raised here, anything else
    as `RuntimeError` with its traceback; the other ranks are ended.
    """
    # PyTorch then asks for huge pages behind large tensors. Without them the page faults of a new gradient
    # cost more than writing it, in every method alike, and come and go with the state of the heap: the floor
    # was seen to vary between 18 and 45 ms within one run.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    context = mp.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        store = os.path.join(folder, "store")
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                arguments = (theirs, store, rank, world_size, device, program, args)
                process = context.Process(target=_rank, args=arguments, daemon=True)
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            return _collect(pipes)
        finally:
            for process in processes:
                process.join(0 if any(pipe.closed for pipe in pipes) else 10)
                process.kill()
                process.join()


def _collect(pipes: list[Connection]) -> list[Any]:
    """What the ranks send, or the error of the rank that failed by itself; closes every pipe then."""
    results: list[Any] = [None] * len(pipes)
    errors: list[Exception] = []
    waiting = set(range(len(pipes)))
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while waiting and time.monotonic() < deadline:
            for rank in sorted(waiting):
                if not pipes[rank].poll(0.05):
                    continue
                try:
                    status, value = pipes[rank].recv()
                except EOFError:
                    status, value = RuntimeError, f"rank {rank} of the benchmark died"
                waiting.discard(rank)
                if status is None:
                    results[rank] = value
                    continue
                errors.append(status(value))
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if errors:
            # A rank whose peer is gone fails too, in a collective: what it says is not the reason.
            raise min(errors, key=lambda error: isinstance(error, RuntimeError))
        if waiting:
            raise RuntimeError(f"ranks {sorted(waiting)} of the benchmark did not end in {TIMEOUT_S} s")
    except BaseException:
        for pipe in pipes:
            pipe.close()
        raise
    return results


def _rank(
    pipe: Connection,
    store: str,
    rank: int,
    world_size: int,
    device: str,
    program: Callable[..., Any],
    args: tuple,
) -> None:
    """One rank: joins the group, runs the program, sends its value or its error."""
    # Compiled in this process, not in a pool of workers that would share the cores with the measurement.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    # The profiler that counts memory announces itself on stderr otherwise.
    os.environ["KINETO_LOG_LEVEL"] = "99"
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    try:
        group = None
        if world_size > 1:
            dist.init_process_group(
                "nccl" if device == "cuda" else "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            )
            group = dist.group.WORLD
        value = program(group, *args)
        pipe.send((None, value))
    except (CheckFailed, ValueError) as error:
        pipe.send((type(error) if isinstance(error, CheckFailed) else ValueError, str(error)))
    except Exception:
        pipe.send((RuntimeError, f"rank {rank}:\n{traceback.format_exc()}"))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
