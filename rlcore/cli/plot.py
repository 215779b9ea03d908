"""`rlcore plot RUN`: draws the pictures of a run again from its metrics file."""

from __future__ import annotations

from pathlib import Path


def plot(run: str) -> None:
    """Writes the pictures into the run folder and says where."""
    from rlcore.cli.pictures import draw_pictures
    from rlcore.run_log import read_metrics

    folder = Path(run)
    for path in draw_pictures(read_metrics(folder), folder):
        print(path)
