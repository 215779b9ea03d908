"""`rlcore plot RUN`: draws the pictures of a run again from its metrics file."""

from __future__ import annotations

from pathlib import Path


def plot(run: str) -> None:
    """Writes the pictures into the run folder and says where."""
    from rlcore.cli.report import PICTURE_FILE, draw_reward
    from rlcore.run_log import read_metrics

    folder = Path(run)
    print(draw_reward(read_metrics(folder), folder / PICTURE_FILE))
