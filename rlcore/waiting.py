"""Long calls on a few ranks while all others wait, in steps that no transport takes for a hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch

from rlcore.collectives import Group, all_reduce_, raise_together

T = TypeVar("T")
HEARTBEAT_S = 1.0
"""How often ranks that wait tell each other so: far below any transport's time-out."""


def in_background(call: Callable[..., T], *args: Any) -> Future[T]:
    """The call on a thread of its own: a daemon, which does not keep the process alive where it hangs."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=f"rlcore-{getattr(call, '__name__', 'call')}", daemon=True).start()
    return future


def in_foreground(call: Callable[[], T]) -> Future[T]:
    """The call, now; its future, which is done."""
    future: Future[T] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    return future


def wait_together(
    future: Future[T] | None,
    group: Group,
    device: torch.device | str = "cpu",
    given_up: Callable[[], BaseException | None] = lambda: None,
) -> T | None:
    """Every rank of the group waits until each rank's `future` is done; its result there, None on ranks
    without one. An error of any is raised on all.

    `given_up` is asked once a heartbeat where a call is under way: an error where it is not waited for any
    longer. Collectives: over `group`, one all-reduce of a number a heartbeat, and `raise_together`.
    """
    error: BaseException | None = None
    while True:
        if future is not None and error is None:
            wait([future], timeout=HEARTBEAT_S)
            error = future.exception() if future.done() else given_up()
        is_waiting = future is not None and error is None and not future.done()
        flag = torch.tensor([int(is_waiting)], device=device)
        if not bool(all_reduce_(flag, "max", group)[0]):
            break
    raise_together(error, group, device)
    return None if future is None else future.result()
