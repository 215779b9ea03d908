"""Starts the ranks of a run through torchrun's agent, and turns a failed rank into one message."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import MutableMapping, Sequence

from rlcore.cli.main import INTERRUPTED, OTHER_ERROR, USER_ERROR

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


def report_rank_error(error: Exception, launched: bool) -> int:
    """Hands a rank's error to whoever started it; returns this rank's exit code.

    A rank of `rlcore train` says nothing itself, its launcher does. Under a foreign torchrun or srun rank 0
    speaks for all.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
    handler.initialize()
    handler.record_exception(error)
    if not launched and os.environ["RANK"] == "0":
        if isinstance(error, ValueError):
            print(f"rlcore: error: {error}", file=sys.stderr)
        else:
            traceback.print_exception(error)
    return USER_ERROR if isinstance(error, ValueError) else OTHER_ERROR


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
    """Says what the first rank that failed had to say; returns its kind of exit code."""
    rank, failure = failed.get_first_failure()
    said = failure.error_file_data.get("message", {}) if failure.error_file_data else {}
    text = said.get("message", failure.message) if isinstance(said, dict) else str(said)
    if failure.exitcode == USER_ERROR:
        print(f"rlcore: error: {text.partition(': ')[2] or text}", file=sys.stderr)
        return USER_ERROR
    stack = said.get("extraInfo", {}).get("py_callstack", "") if isinstance(said, dict) else ""
    print(f"{stack}rlcore: rank {rank} failed (exit code {failure.exitcode}): {text}", file=sys.stderr)
    return OTHER_ERROR
