"""What a run leaves for a person: a table, printed and in `report.txt`, and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rlcore.cli.pictures import WINDOW, draw_pictures
from rlcore.run_log import read_metrics

REPORT_FILE = "report.txt"


def write_report(folder: Path, seconds: float, console: Console | None = None) -> None:
    """Prints the table, writes it and the picture to the run folder. `seconds`: the run's wall time."""
    records = read_metrics(folder)
    table = summary_table(records, seconds)
    (console or Console()).print(table)
    pictures = draw_pictures(records, folder)
    with folder.joinpath(REPORT_FILE).open("w", encoding="utf-8") as file:
        Console(file=file, width=100).print(table)
    print(f"run folder {folder}, pictures {', '.join(path.name for path in pictures)}")


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
            f"{max(r.get('mismatch/out_of_support', 0.0) for r in records):.2%} at most",
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
