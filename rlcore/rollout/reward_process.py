"""One reward process as its rank sees it: started, given responses, timed, ended with all it has started."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from rlcore.batch import Prompt
from rlcore.rollout.reward_wire import receive_bytes, send_bytes
from rlcore.rollout.reward_worker import LEAVE

START_TIMEOUT_S = 300.0
"""Room for a task that loads something large on a busy machine; below the default `parallel.timeout_s`."""
END_TIMEOUT_S = 5.0
"""A process that survives SIGKILL so long is stuck in the kernel; nobody waits for it."""
ENDING_TIMEOUT_S = 1.0
"""A process that has closed its connection is given so long to say by its exit code why."""

# `channel` and `lifeline` are variables of the program's own: both stay open until the interpreter has ended.
_PROGRAM = """
import json, socket, sys
sys.path[:] = json.loads(sys.argv[1])
channel, lifeline = socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])
from rlcore.rollout.reward_worker import serve
serve(channel, lifeline)
"""
# What torchrun tells a rank about its place. A reward function that joins a process group by them would hang.
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_PLACE += ("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT")


class ProcessLost(Exception):
    """The process ended, or was ended because it was late. Says how."""


class RewardProcess:
    """A process that is started, idle, or has one response (`job`) to grade. Never forked from the rank,
    which holds threads and connections.
    """

    def __init__(self, setup: bytes, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.job: int | None = None
        """Index of the response it grades."""
        self.is_ready = False
        """Has it built the task?"""
        self.deadline = time.monotonic() + START_TIMEOUT_S
        """Of its start or its job, on the clock of `time.monotonic`."""
        self.channel, theirs = socket.socketpair()
        read_end, self._lifeline = os.pipe()
        words = ["-W", "ignore", "-c", _PROGRAM, json.dumps(sys.path), str(theirs.fileno()), str(read_end)]
        with theirs, os.fdopen(read_end, closefd=True):
            self._process = _start(words, (theirs.fileno(), read_end))
        with contextlib.suppress(OSError):  # one that is gone already is seen when it does not get ready
            send_bytes(self.channel, setup, self.deadline)

    @property
    def is_idle(self) -> bool:
        """Can it take a response?"""
        return self.is_ready and self.job is None

    def start(self, job: int, prompt: Prompt, response_ids: Sequence[int]) -> None:
        """Hands over a response; its time runs from now. Raises `ProcessLost`, or what pickling raises."""
        payload = pickle.dumps((prompt, list(response_ids)))
        self.job, self.deadline = job, time.monotonic() + self._timeout_s
        try:
            send_bytes(self.channel, payload, self.deadline)
        except OSError as error:
            raise ProcessLost(self._how_it_ended(late=isinstance(error, TimeoutError))) from error

    def finish(self) -> tuple[float | None, str]:
        """Reward and reason of its job, when `channel` is readable or the deadline over. Raises
        `ProcessLost`.
        """
        reply = self._receive()
        self.job = None
        return reply

    def finish_start(self) -> None:
        """The same for its start. Raises `ValueError` with the reason why it cannot grade."""
        try:
            reason = self._receive()
        except ProcessLost as error:
            raise ValueError(
                f"a reward process {error} while it built the task. Set task.reward_workers=0 to see more."
            ) from error
        if reason:
            raise ValueError(f"a reward process cannot build the task: {reason}")
        self.is_ready = True

    def _receive(self):
        try:
            return pickle.loads(receive_bytes(self.channel, self.deadline))
        except (OSError, EOFError) as error:
            raise ProcessLost(self._how_it_ended(late=isinstance(error, TimeoutError))) from error

    def _how_it_ended(self, late: bool) -> str:
        """Ends the process where it has not ended by itself."""
        if not late:
            self._wait_for_end(ENDING_TIMEOUT_S)
        code = self.kill()
        if late:
            limit = self._timeout_s if self.is_ready else START_TIMEOUT_S
            return f"took more than {limit:g} s"
        if code is None or code >= 0:
            return f"left with exit code {code}"
        return f"was killed by {_signal_name(-code)}"

    def _wait_for_end(self, seconds: float) -> None:
        """Until the process has ended by itself, without taking its exit code: `kill` needs its number."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
                return
            time.sleep(0.005)

    def ask_to_leave(self) -> None:
        """Lets an idle process run what it does at its end; any other is killed by `kill`."""
        if self.is_idle:
            with contextlib.suppress(OSError):
                send_bytes(self.channel, LEAVE, time.monotonic() + 0.1)

    def kill(self, deadline: float = 0.0) -> int | None:
        """Ends the process and those it has started, at the deadline where it has not left by then. Returns
        its exit code; None where it does not end.
        """
        with contextlib.suppress(OSError, EOFError):
            if deadline:
                receive_bytes(self.channel, deadline)
        self.channel.close()
        # Not waited for yet, so the number still is this group's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        return self._process.returncode


def _start(words: Sequence[str], fds: tuple[int, ...]) -> subprocess.Popen:
    try:
        return subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            # A group of its own: a kill reaches the programs that a reward function started.
            start_new_session=True,
            env=_environment(),
        )
    except OSError as error:
        raise ValueError(
            f"a reward process cannot be started: {error}. Lower task.reward_workers, or set it to 0."
        ) from error


def _environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _PLACE and not name.startswith("TORCHELASTIC_")
    }
    return {**kept, "OMP_NUM_THREADS": "1"}


def _signal_name(number: int) -> str:
    known = {one.value: one.name for one in signal.Signals}
    return known.get(number, f"signal {number}")
