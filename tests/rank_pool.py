"""A persistent pool of gloo ranks that runs test functions: about 20 ms a case instead of seconds for a fresh
spawn.

`run_ranks(fn, world_size, *args)` calls the module-level `fn(rank, world_size, *args)` on every rank and
returns the ranks' return values. When any rank raises or the time is up, the whole pool is killed, so a
broken case cannot desynchronise the next one.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

DEFAULT_TIMEOUT_S = 120.0
# A rank has about ten by itself and about fifty while a Megatron worker is open.
MOST_THREADS = 64


class RankError(AssertionError):
    """A rank raised. `errors` holds `(rank, exception class name, message, traceback)` of every rank that
    did.
    """

    def __init__(self, errors: list[tuple[int, str, str, str]]) -> None:
        self.errors = errors
        rank, _, _, trace = errors[0]
        super().__init__(f"{len(errors)} rank(s) raised; rank {rank}:\n{trace}")


def _serve(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
    )
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    pipe.send(("ready", None))
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            break
        if job is None:
            break
        fn, args = job
        try:
            pipe.send(("ok", fn(rank, world_size, *args)))
        except BaseException as error:
            pipe.send(("error", (type(error).__name__, str(error), traceback.format_exc())))
        del job, fn, args
        _end_lost_groups()
    dist.destroy_process_group()


def _end_lost_groups() -> None:
    """Frees process groups that only reference cycles hold. Each has threads that wake a hundred times a
    second: a few hundred tests with a dozen groups each would leave the cores with nothing else to do.
    """
    if len(os.listdir("/proc/self/task")) > MOST_THREADS:
        gc.collect()


class RankPool:
    """`world_size` processes joined in one gloo group."""

    def __init__(self, world_size: int) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="rank_pool_")
        store = os.path.join(self._folder.name, "store")
        self.world_size = world_size
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._collect(DEFAULT_TIMEOUT_S)

    def run(self, fn: Callable[..., Any], args: tuple, timeout_s: float) -> list[Any]:
        """One call on every rank. Raises `RankError`, or `TimeoutError` after `timeout_s` seconds."""
        for pipe in self._pipes:
            pipe.send((fn, args))
        return self._collect(timeout_s)

    def _collect(self, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        results: list[Any] = [None] * self.world_size
        errors: list[tuple[int, str, str, str]] = []
        waiting = set(range(self.world_size))
        while waiting:
            for rank in sorted(waiting):
                if self._pipes[rank].poll(0.002):
                    try:
                        status, value = self._pipes[rank].recv()
                    except EOFError:
                        status, value = "error", ("RankDied", f"rank {rank} died", f"rank {rank} died")
                    waiting.discard(rank)
                    if status == "error":
                        errors.append((rank, *value))
                        # The other ranks may wait for this one in a collective: give them a moment to raise
                        # too.
                        deadline = min(deadline, time.monotonic() + 3.0)
                    else:
                        results[rank] = value
            if waiting and time.monotonic() > deadline:
                if errors:
                    break
                raise TimeoutError(f"ranks {sorted(waiting)} of {self.world_size} did not finish in time")
        if errors:
            raise RankError(sorted(errors))
        return results

    def kill(self) -> None:
        """Ends every process of the pool at once."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def close(self) -> None:
        """Lets every process leave its process group and end."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(5)
        self.kill()


_pools: dict[int, RankPool] = {}


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[Any]:
    """Return values of `fn(rank, world_size, *args)` on every rank of a pool of that size, in rank order."""
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = RankPool(world_size)
    try:
        return pool.run(fn, args, timeout_s)
    except BaseException:
        del _pools[world_size]
        pool.kill()
        raise


@atexit.register
def _close_pools() -> None:
    for pool in list(_pools.values()):
        pool.close()
    _pools.clear()


def refusals(fn: Callable, world_size: int, *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[str]:
    """`Class: message` of the error that `fn` raises on each rank, for errors that all ranks raise together:
    the pool lives on, where `run_ranks` would start another. `AssertionError` where a rank does not raise.
    """
    return run_ranks(_refusal_on_rank, world_size, fn, args, timeout_s=timeout_s)


def _refusal_on_rank(rank: int, world_size: int, fn: Callable, args: tuple) -> str:
    try:
        result = fn(rank, world_size, *args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"rank {rank} went through: {result!r}")
