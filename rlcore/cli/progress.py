"""Progress of a run: a live bar on a terminal, one plain line a step elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_FIELDS = (
    ("reward", "reward/mean", ".3f"),
    ("loss", "loss/total", ".4f"),
    ("tokens/s", "time/tokens_per_s", ",.0f"),
)


def describe(record: Mapping[str, float]) -> str:
    """`reward 0.512  loss 0.0031  tokens/s 812`, leaving out what the step does not report."""
    return "  ".join(f"{label} {record[name]:{form}}" for label, name, form in _FIELDS if name in record)


def make_display(num_steps: int, console: Console | None = None) -> TerminalDisplay | LineDisplay:
    """The display that suits where the output goes."""
    console = console or Console()
    return TerminalDisplay(num_steps, console) if console.is_terminal else LineDisplay(num_steps, console)


class LineDisplay:
    """One line a step, for files and pipes."""

    def __init__(self, num_steps: int, console: Console) -> None:
        self._num_steps = num_steps
        self._console = console

    def __enter__(self) -> LineDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self, record: Mapping[str, float]) -> None:
        """Prints the step."""
        self.note(f"step {record['step'] + 1:>4.0f}/{self._num_steps}  {describe(record)}")

    def note(self, text: str) -> None:
        """Prints the text on a line of its own."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class TerminalDisplay:
    """A live bar with the latest figures."""

    def __init__(self, num_steps: int, console: Console) -> None:
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeRemainingColumn(),
            console=console,
        )
        self._bar = self._progress.add_task("train", total=num_steps, figures="first step")

    def __enter__(self) -> TerminalDisplay:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.__exit__(*error)  # type: ignore[arg-type]

    def step(self, record: Mapping[str, float]) -> None:
        """Moves the bar on."""
        self._progress.update(self._bar, advance=1, figures=describe(record))

    def note(self, text: str) -> None:
        """Prints the text above the bar."""
        self._progress.console.print(text, markup=False, highlight=False)
