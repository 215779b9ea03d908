"""The reward process: builds the task again and grades one response after the other, until told to leave.

It ends with the process that started it, whatever the reward function is doing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import select
import signal
import socket
import threading

from rlcore.rollout.reward_wire import receive_bytes, send_bytes


def serve(channel: socket.socket, lifeline: int) -> None:
    """Grades what comes over `channel`. `lifeline`: its parent alone holds the pipe's other end."""
    # A terminal's Ctrl-C is for the rank, which then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Programs that a reward function starts must not hold these open.
    channel.set_inheritable(False)
    os.set_inheritable(lifeline, False)
    end_with_parent(lifeline)
    try:
        task = _build_task(receive_bytes(channel))
    except BaseException as error:  # a task of the user's own may call sys.exit
        send_bytes(channel, pickle.dumps(f"{type(error).__name__}: {error}"))
        return
    # Where the rank has gone, the end of this process is already on its way.
    with contextlib.suppress(EOFError, OSError):
        send_bytes(channel, pickle.dumps(""))
        while (payload := receive_bytes(channel)) != LEAVE:
            send_bytes(channel, pickle.dumps(_grade(task, payload)))


LEAVE = pickle.dumps(None)


def _build_task(payload: bytes):
    import torch

    from rlcore.rollout.tasks import make_task

    # Reward processes share the cores with the ranks.
    torch.set_num_threads(1)
    return make_task(*pickle.loads(payload), grades_only=True)


def _grade(task, payload: bytes) -> tuple[float | None, str]:
    from rlcore.rollout.reward import describe, grade_response, no_reward

    try:
        prompt, response_ids = pickle.loads(payload)
    except Exception as error:
        graded = no_reward(
            f"Prompt.answer cannot be read in a reward process ({describe(error)}); its class must come from "
            "a module that can be imported there, or set task.reward_workers=0"
        )
    else:
        graded = grade_response(task, prompt, response_ids)
    return graded.reward, graded.reason


def end_with_parent(lifeline: int) -> None:
    """From now on the end of the starting process kills this process and all those it has started.

    On Linux the kernel does it, so that it also works inside a regular expression or a big-integer power,
    which let no other Python thread run. Elsewhere a thread does.
    """
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        # The parent may have ended before the kernel was told to watch.
        # Not `select`, which takes no descriptor from 1024 on.
        ended = select.poll()
        ended.register(lifeline, select.POLLIN)
        if ended.poll(0):
            _end(lifeline)
    else:
        threading.Thread(target=_end, args=(lifeline,), daemon=True).start()


def _end(lifeline: int) -> None:
    """Waits for the end of the pipe, then kills the process group."""
    os.read(lifeline, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)
