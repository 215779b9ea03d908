"""The run folder: resolved config (YAML), metrics (JSONL and TensorBoard). Only global rank 0 writes one.

Files: `config.yaml`; `metrics.jsonl`, one line a step; `updates.jsonl`, one line an optimizer step, only
where a step has several; `samples.jsonl`, a few responses a step; `tensorboard/`. The folder appears with
the first finished step, so a run that fails before leaves nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlcore.batch import StepResult
from rlcore.config import RunConfig, to_plain
from rlcore.config_parse import ConfigError

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
UPDATES_FILE = "updates.jsonl"
SAMPLES_FILE = "samples.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


class StepDisplay(Protocol):
    """Shows progress to a person."""

    def step(self, record: Mapping[str, float]) -> None:
        """A step is finished; `record` is its line of the metrics file."""
        ...

    def note(self, text: str) -> None:
        """Something a person should know now."""
        ...


class SilentLog:
    """The log of every rank but the first."""

    def step(
        self,
        step: int,
        metrics: Mapping[str, float],
        updates: Sequence[StepResult],
        notes: Sequence[str] = (),
        samples: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Does nothing."""


class RunLog:
    """Writes the run folder and feeds the display. A context: closes its files on the way out."""

    def __init__(self, config: RunConfig, display: StepDisplay) -> None:
        self.folder = Path(config.run_dir)
        self._config = config
        self._display = display
        self._files: dict[str, Any] = {}
        self._board: Any = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        if self._board is not None:
            self._board.close()

    def step(
        self,
        step: int,
        metrics: Mapping[str, float],
        updates: Sequence[StepResult],
        notes: Sequence[str] = (),
        samples: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Writes one whole line (of the last optimizer step, where there are several) and one a sample, and
        flushes them; shows the notes, which no file keeps.
        """
        board = self._board = self._board or self._open()
        skipped = [update for update in updates if not update.stepped]
        record = {
            "step": step,
            **metrics,
            **(updates[-1].metrics if updates else {}),
            "update/count": len(updates),
            "update/skipped": len(skipped),
        }
        self._append(METRICS_FILE, record)
        if len(updates) > 1:
            for index, update in enumerate(updates):
                line = {"step": step, "update": index, "stepped": update.stepped, **update.metrics}
                self._append(UPDATES_FILE, line)
        for sample in samples:
            self._append(SAMPLES_FILE, sample)
        for name, value in record.items():
            if name != "step":
                board.add_scalar(name, value, step)
        self._display.step(record)
        for note in notes:
            self._display.note(f"step {step}: {note}")
        for update in skipped:
            self._display.note(f"step {step}: the update was skipped: {update.reason}")

    def _open(self) -> Any:
        from omegaconf import OmegaConf
        from torch.utils.tensorboard.writer import SummaryWriter

        clear_run_folder(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.joinpath(CONFIG_FILE).write_text(
            OmegaConf.to_yaml(to_plain(self._config)), encoding="utf-8"
        )
        return SummaryWriter(str(self.folder / TENSORBOARD_FOLDER))

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = self.folder.joinpath(name).open("w", encoding="utf-8")
        file.write(json.dumps(record) + "\n")
        file.flush()


def check_run_folder(config: RunConfig, overwrite: bool) -> None:
    """`run_dir` can be written, and an earlier run is only replaced when asked for, or `ConfigError`."""
    check_writable(config.run_dir)
    if not overwrite and Path(config.run_dir, METRICS_FILE).exists():
        raise ConfigError(
            f"run_dir={config.run_dir} already holds a run. Set run_dir to another folder, or pass "
            "--overwrite to replace that run."
        )


def check_writable(run_dir: str) -> None:
    """The folder can be made and a file written in it, or `ConfigError`. Leaves nothing.

    Tried beside the real place, in the nearest folder that exists: ranks that check at the same time do not
    remove each other's folders.
    """
    if not run_dir.strip():
        raise ConfigError("run_dir is empty: expected a folder for the run, such as run_dir=runs/mine.")
    folder = Path(run_dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryDirectory(prefix=".rlcore_", dir=existing) as probe:
            inside = Path(probe) / folder.relative_to(existing)
            inside.mkdir(parents=True, exist_ok=True)
            inside.joinpath(CONFIG_FILE).write_text("run_dir can be written\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"run_dir={run_dir} cannot be written: {existing}: {reason}. Set run_dir to a folder that can."
        ) from error


def clear_run_folder(folder: Path) -> None:
    """Removes the files of an earlier run; saved policies and files that are not ours stay."""
    for name in (
        CONFIG_FILE,
        METRICS_FILE,
        UPDATES_FILE,
        SAMPLES_FILE,
        "report.txt",
        "reward.png",
        "tokens.png",
    ):
        folder.joinpath(name).unlink(missing_ok=True)
    shutil.rmtree(folder / TENSORBOARD_FOLDER, ignore_errors=True)


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The steps of a finished or interrupted run. Raises `ValueError` where there are none."""
    path = folder / METRICS_FILE
    if not path.exists():
        raise ValueError(f"{path} does not exist: {folder} is not the folder of a run with a finished step.")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
