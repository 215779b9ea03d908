"""What a run leaves for a person: a table (printed and in `report.txt`) and a picture of the reward curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rlcore.run_log import read_metrics

REPORT_FILE = "report.txt"
PICTURE_FILE = "reward.png"
WINDOW = 10
"""Steps averaged at either end of a run, and along the curve."""


def write_report(folder: Path, seconds: float, console: Console | None = None) -> None:
    """Prints the table, writes it and the picture to the run folder. `seconds`: the run's wall time."""
    records = read_metrics(folder)
    table = summary_table(records, seconds)
    (console or Console()).print(table)
    picture = draw_reward(records, folder / PICTURE_FILE)
    with folder.joinpath(REPORT_FILE).open("w", encoding="utf-8") as file:
        Console(file=file, width=100).print(table)
    print(f"run folder {folder}, reward curve {picture}")


def first_and_last(values: Sequence[float]) -> tuple[float, float, int]:
    """Means of the first and the last steps, and how many steps each covers: 10, or half of a shorter run."""
    window = max(1, min(WINDOW, len(values) // 2))
    return sum(values[:window]) / window, sum(values[-window:]) / window, window


def summary_table(records: Sequence[dict[str, float]], seconds: float) -> Table:
    """First steps against last steps, and the figures that say whether trainer and sampler agree."""
    first, last, window = first_and_last([record["reward/mean"] for record in records])
    rate = sum(record["batch/tokens"] for record in records) / sum(
        record["time/step_s"] for record in records
    )
    rows = [
        ("steps", f"{len(records)}"),
        (f"reward, mean of first {window} steps", f"{first:.4f}"),
        (f"reward, mean of last {window} steps", f"{last:.4f}"),
        ("change", f"{last - first:+.4f}"),
        ("trainer/sampler gap, largest", f"{max(r.get('mismatch/abs_max', 0.0) for r in records):.2e}"),
        (
            "tokens out of the trainer's support",
            f"{max(r['mismatch/out_of_support'] for r in records):.2%} at most",
        ),
        ("updates skipped", f"{sum(record['update/skipped'] for record in records):.0f}"),
        ("tokens/s", f"{rate:,.0f}"),
        ("wall time", f"{seconds:.1f} s"),
    ]
    table = Table(show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def draw_reward(records: Sequence[dict[str, float]], path: Path) -> Path:
    """Draws mean reward by step, with its running mean, as a PNG; returns its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [record["step"] + 1 for record in records]
    rewards = [record["reward/mean"] for record in records]
    running = [
        sum(part) / len(part)
        for i in range(len(rewards))
        if (part := rewards[max(0, i + 1 - WINDOW) : i + 1])
    ]
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(steps, rewards, color="tab:blue", alpha=0.35, linewidth=1, label="step")
    axes.plot(steps, running, color="tab:blue", linewidth=2, label=f"mean of the last {WINDOW} steps")
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="best", frameon=False)
    figure.savefig(path, dpi=130)
    return path
