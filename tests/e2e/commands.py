"""Runs a command of this project as a user's shell would, outside any run of ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 200
# torchrun's names for a rank's place.
_RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def outside_of_ranks() -> dict[str, str]:
    """This process's environment without a place in a run, and with the project to import."""
    env = {name: value for name, value in os.environ.items() if name not in _RANK_NAMES}
    return {**env, "PYTHONPATH": str(ROOT)}


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_python(*words: str) -> subprocess.CompletedProcess:
    """`python words...` from the project root, with its output as text; never raises for an exit code."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=outside_of_ranks(),
    )
