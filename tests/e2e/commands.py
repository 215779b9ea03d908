"""Runs a command of this project as a user's shell would, outside any run of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 200
# torchrun's names for a rank's place.
_RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def run_python(*words: str) -> subprocess.CompletedProcess:
    """`python words...` from the project root, with its output as text; never raises for an exit code."""
    env = {name: value for name, value in os.environ.items() if name not in _RANK_NAMES}
    env["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=env,
    )
