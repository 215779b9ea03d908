"""Starts the ranks of a run through torchrun's agent, and turns a failed rank into one message."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import MutableMapping, Sequence
from typing import Any, Literal

from rlcore.cli.main import INTERRUPTED, OTHER_ERROR, USER_ERROR
from rlcore.transport_errors import is_gone, is_late

Environment = MutableMapping[str, str]

_SLURM_NAMES = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}


def is_rank(env: Environment) -> bool:
    """Is this process already one rank of a run?"""
    return "RANK" in env


def world_size(env: Environment) -> int:
    """Number of ranks of the run that this rank belongs to."""
    if "WORLD_SIZE" not in env:
        raise ValueError("RANK is set but WORLD_SIZE is not: start through torchrun or srun, or unset RANK.")
    return int(env["WORLD_SIZE"])


def join_slurm(env: Environment) -> None:
    """Gives a task that srun started (not the batch script around it) torchrun's names for its place."""
    if is_rank(env) or "SLURM_STEP_ID" not in env or "SLURM_PROCID" not in env:
        return
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in env:
            raise ValueError(
                f"started by srun, but {name} is not set. Export MASTER_ADDR (the first node's name) and "
                "MASTER_PORT (a free port) before srun."
            )
    env.update({ours: env[slurm] for ours, slurm in _SLURM_NAMES.items()})


def silence_dependencies() -> None:
    """Hides what a user cannot act on and is told a dozen times a rank: Megatron-core on import, that
    Transformer Engine and Apex are optional; torch, that it will rename collectives that Megatron and vLLM
    call.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch\.distributed|vllm)")


def record_error(error: BaseException) -> None:
    """Leaves the error where torchrun's agent looks for it. The first error of a rank counts, not later ones.

    A rank calls this before it drops its connections: what its peers then see is younger than the cause.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    record = {
        "message": f"{type(error).__name__}: {error}",
        "errorCode": exit_code(error),
        "extraInfo": {
            "py_callstack": "".join(traceback.format_exception(error)),
            "timestamp": str(int(time.time())),
        },
    }
    # The agent may end this process at any moment, and cannot read half a file.
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump({"message": record}, file)
    os.replace(f"{path}.part", path)


def exit_code(error: BaseException) -> int:
    """What a rank with this error leaves with."""
    return USER_ERROR if isinstance(error, ValueError) else OTHER_ERROR


def report_rank_error(error: Exception | SystemExit, launched: bool) -> int:
    """Hands a rank's error to whoever started it; returns this rank's exit code.

    A rank of `rlcore train` says nothing itself, its launcher does. Under a foreign torchrun or srun rank 0
    speaks for all; another rank speaks when its own code broke, of which rank 0 only sees a lost connection.
    """
    record_error(error)
    is_user_error = isinstance(error, ValueError)
    text = f"{type(error).__name__}: {error}"
    own_fault = not is_user_error and find_cause(text) == "own"
    if not launched and (os.environ["RANK"] == "0" or own_fault):
        if is_user_error:
            print(f"rlcore: error: {error}", file=sys.stderr)
        else:
            traceback.print_exception(error)
            print(f"rlcore: rank {os.environ['RANK']} failed: {explain(text)}", file=sys.stderr)
    return exit_code(error)


def start_ranks(words: Sequence[str], num_processes: int) -> int:
    """Runs `rlcore WORDS` on `num_processes` ranks of this machine and waits. Returns the exit code."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # What torchrun would set anyway, after a page of warning.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # This process only waits; what its agent would log about a dead rank is ours to say.
    logging.disable(logging.CRITICAL)
    options = ["--standalone", "--nproc-per-node", str(num_processes), "-m", "rlcore.cli"]
    try:
        args = torchrun.parse_args(options)
        # Set past its parser, which would read our own options as abbreviations of its own.
        args.training_script_args = [*words, "--as-rank"]
        torchrun.run(args)
    except ChildFailedError as failed:
        return print_first_failure(failed)
    except (SignalException, KeyboardInterrupt):
        return INTERRUPTED
    return 0


def print_first_failure(failed) -> int:
    """Says what went wrong first, on the rank where it did; returns its kind of exit code.

    In the order of `_PRECEDENCE`: the later causes are what the peers of an earlier one see.
    """
    rank, failure = min(failed.failures.items(), key=lambda item: _precedence(item[1]))
    said = _recorded(failure)
    if said is None:
        print(f"rlcore: rank {rank} {_describe_death(failure.exitcode)}", file=sys.stderr)
        return OTHER_ERROR
    text = said["message"]
    # Not the exit code: the agent may have ended the rank before it could leave by itself.
    if said["errorCode"] == USER_ERROR:
        print(f"rlcore: error: {text.partition(': ')[2] or text}", file=sys.stderr)
        return USER_ERROR
    stack = said["extraInfo"]["py_callstack"]
    print(
        f"{stack}rlcore: rank {rank} failed (exit code {said['errorCode']}): {explain(text)}", file=sys.stderr
    )
    return OTHER_ERROR


Cause = Literal["own", "relayed", "died", "timeout", "connection", "ended"]
"""Own code; a message that `raise_together` brought from another rank; no message at all; a peer too late; a
peer gone; stopped by the agent because another rank had failed."""
_PRECEDENCE: tuple[Cause, ...] = ("own", "relayed", "died", "timeout", "connection", "ended")

_RELAYED = re.compile(r"^ValueError: rank \d+ of \d+ failed: ")


def find_cause(text: str) -> Cause:
    """Whether an error (`Class: message`) is of the rank's own code, or what it saw of another rank's."""
    if _RELAYED.search(text):
        return "relayed"
    if is_late(text):
        return "timeout"
    return "connection" if is_gone(text) else "own"


def explain(text: str) -> str:
    """The error's text, and what to do about it where another rank is at fault."""
    advice = {
        "timeout": "\nAnother rank is slow or hangs. Raise parallel.timeout_s if its work takes that long.",
        "connection": "\nAnother rank ended first: look for what it said.",
    }
    return text + advice.get(find_cause(text), "")


def _recorded(failure) -> dict[str, Any] | None:
    """What `record_error` left. None for a rank that died without a word."""
    message = (failure.error_file_data or {}).get("message")
    return message if isinstance(message, dict) else None


def _precedence(failure) -> tuple[int, float]:
    """Sorts failures: likelier causes first, among equals the earlier one."""
    said = _recorded(failure)
    if said is None:
        # The agent ends the ranks that still run with SIGTERM.
        cause = "ended" if failure.exitcode == -signal.SIGTERM else "died"
        return _PRECEDENCE.index(cause), failure.timestamp
    # The record's own time stamp counts whole seconds.
    return _PRECEDENCE.index(find_cause(said["message"])), os.stat(failure.error_file).st_mtime


def _describe_death(exit_code: int) -> str:
    """`was killed by SIGKILL (exit code -9)`, or that it left with a code and no message."""
    if exit_code >= 0:
        return f"ended without a message (exit code {exit_code})."
    known = {number.value: number.name for number in signal.Signals}
    name = known.get(-exit_code, f"signal {-exit_code}")
    hint = " The system does that when memory runs out." if -exit_code == signal.SIGKILL else ""
    return f"was killed by {name} (exit code {exit_code}).{hint}"
