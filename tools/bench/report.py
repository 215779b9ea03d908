"""What a run leaves: a table on the terminal, JSON, and a dated markdown file."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from tools.bench.options import BenchOptions

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"

# Columns of the tables by case, in order; JSON holds every number. Name, heading, format.
COLUMNS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "op": (
        ("name", "case", ""),
        ("fwd_bwd_s", "fwd+bwd ms", "ms"),
        ("ours_quartiles_s", "quartiles ms", "ms"),
        ("resharding_sort_s", "resharding ms", "ms"),
        ("gather_sort_s", "gather ms", "ms"),
        ("floor_s", "floor ms", "ms"),
        ("vs_resharding_sort", "vs resharding", ".1f"),
        ("vs_gather_sort", "vs gather", ".1f"),
        ("vs_floor", "vs floor", ".2f"),
        ("gb_per_s", "GB/s", ".1f"),
        ("copy_gb_per_s", "copy GB/s", ".1f"),
        ("extra_memory_ratio", "extra memory", ".1%"),
        ("comm_bytes_per_token", "sent B/token", ".0f"),
        ("kept_median", "kept", ".0f"),
    ),
    "scaling": (
        ("V", "V", ","),
        ("tp", "TP", ""),
        ("rows", "rows", ""),
        ("dtype", "dtype", ""),
        ("name", "truncation", ""),
        ("fwd_bwd_s", "fwd+bwd ms", "ms"),
        ("floor_s", "floor ms", "ms"),
        ("vs_floor", "vs floor", ".2f"),
        ("extra_memory_ratio", "extra memory", ".1%"),
        ("comm_bytes_per_token", "sent B/token", ".0f"),
        ("comm_calls_forward", "calls", ""),
        ("kept_median", "kept", ".0f"),
    ),
    "fused": (
        ("name", "case", ""),
        ("fwd_bwd_s", "fwd+bwd ms", "ms"),
        ("ours_quartiles_s", "quartiles ms", "ms"),
        ("vs_matmul_op", "vs matmul + op", ".2f"),
        ("peak_bytes", "peak MB", "MB"),
        ("peak_bytes_twice_the_tokens", "peak MB, 2x tokens", "MB"),
        ("peak_growth_bytes_per_token", "growth B/token", ".0f"),
        ("logits_bytes_per_token", "logits B/token", ".0f"),
        ("comm_bytes_per_token", "sent B/token", ".0f"),
    ),
    "replay": (
        ("name", "case", ""),
        ("fwd_bwd_s", "fwd+bwd ms", "ms"),
        ("ours_quartiles_s", "quartiles ms", "ms"),
        ("vs_search", "vs search", ".2f"),
        ("vs_floor", "vs floor", ".2f"),
        ("vs_dense_mask", "vs dense mask", ".1f"),
        ("extra_memory_ratio", "extra memory", ".1%"),
        ("dense_mask_extra_memory_ratio", "dense mask's", ".1%"),
        ("comm_bytes_per_token", "sent B/token", ".0f"),
    ),
    "loss": (
        ("name", "case", ""),
        ("fwd_bwd_s", "fwd+bwd ms", "ms"),
        ("ours_quartiles_s", "quartiles ms", "ms"),
        ("ns_per_token", "ns/token", ".1f"),
        ("floor_s", "floor ms", "ms"),
        ("vs_floor", "vs floor", ".2f"),
        ("vs_autograd_floor", "vs floor in autograd", ".2f"),
    ),
    "transport": (
        ("name", "case", ""),
        ("fwd_bwd_s", "ms", "ms"),
        ("ours_quartiles_s", "quartiles ms", "ms"),
        ("vs_pickled", "vs pickled", ".2f"),
        ("vs_floor", "vs floor", ".2f"),
        ("comm_bytes_per_token", "sent B/token", ".3f"),
        ("total_bytes", "bytes", ","),
    ),
    "train_step": (
        ("name", "case", ""),
        ("fwd_bwd_s", "step ms", "ms"),
        ("op_forward_s", "op forward ms", "ms"),
        ("op_backward_s", "op backward ms", "ms"),
        ("loss_s", "loss ms", "ms"),
        ("batch_s", "batch ms", "ms"),
        ("metrics_s", "metrics ms", "ms"),
        ("safety_s", "NaN check ms", "ms"),
        ("megatron_s", "Megatron fwd+bwd ms", "ms"),
        ("optimizer_s", "optimizer ms", "ms"),
        ("adds", "added to fwd+bwd", ".1%"),
        ("tokens_per_s", "real tokens/s", ".0f"),
        ("vs_padded", "vs padded", ".2f"),
    ),
}
COLUMNS["real"] = COLUMNS["op"]


def table(case: str, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells."""
    columns = COLUMNS[case]
    return [heading for _, heading, _ in columns], [
        [render(row[name], shape) for name, _, shape in columns] for row in rows
    ]


def render(value: Any, shape: str) -> str:
    """One number: `ms` takes seconds, `MB` bytes; a pair becomes a range."""
    if isinstance(value, list | tuple):
        return " to ".join(render(part, shape) for part in value)
    if shape == "ms":
        return f"{value * 1e3:.3g}" if value < 0.1 else f"{value * 1e3:.0f}"
    if shape == "MB":
        return f"{value / 1e6:.1f}"
    return format(value, shape)


def verdicts(rows: Sequence[Row]) -> list[str]:
    """One line per target: the row, the bound, what was measured, met or missed."""
    lines = []
    for row in rows:
        place = " ".join(str(row[key]) for key in ("V", "tp", "rows", "dtype") if "V" in row and key in row)
        for target in row["targets"]:
            value = f"{target['value']:.4g}"
            word = "met" if target["met"] else "MISSED"
            label = " ".join(filter(None, (place, row["name"])))
            lines.append(f"{word}: {label}: {target['key']} {target['target']}, measured {value}")
    return lines


def summary(rows: Sequence[Row]) -> list[str]:
    """The verdicts; where there are too many to read, the missed ones and a count."""
    lines = verdicts(rows)
    if len(lines) <= 24:
        return lines
    missed = [line for line in lines if line.startswith("MISSED")]
    return [*missed, f"{len(lines) - len(missed)} of {len(lines)} targets met"]


def print_report(rows: Sequence[Row], options: BenchOptions) -> None:
    """The table and the targets."""
    from rich.console import Console
    from rich.table import Table

    headings, cells = table(options.case, rows)
    grid = Table(title=title(options), title_justify="left")
    for index, heading in enumerate(headings):
        grid.add_column(heading, justify="left" if index == 0 else "right")
    for line in cells:
        grid.add_row(*line)
    console = Console()
    # A pipe has no width of its own: wide enough for the widest table.
    Console(width=None if console.is_terminal else 200).print(grid)
    for line in summary(rows):
        print(line)


def title(options: BenchOptions) -> str:
    """The sizes of the run."""
    sizes = {
        "scaling": f"{options.tokens} tokens",
        "loss": f"{options.tokens} tokens",
        "transport": f"{options.tokens} tokens, 2 stages",
        "real": f"SmolLM2-135M-Instruct, {options.tokens} tokens, TP {options.tp}, {_dtype(options)}",
        "train_step": f"{options.tokens} tokens, TP {options.tp}",
    }
    default = f"{options.tokens} tokens, V {options.vocab}, TP {options.tp}, {_dtype(options)}"
    return f"{options.case}: {sizes.get(options.case, default)}, {options.device}, {options.repeats} repeats"


def make_meta(options: BenchOptions, words: Sequence[str], load_before: float) -> dict[str, Any]:
    """What a reader needs to judge the numbers: where from, how, on what, and how busy it was."""
    return {
        "commit": _commit(),
        "command": " ".join(("rlcore", *words)),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "cpu": f"{_cpu_name()}, {os.cpu_count()} cores",
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "threads_per_rank": 1,
        "load_average": {"before": load_before, "after": round(os.getloadavg()[0], 2)},
    }


def write_json(path: str, rows: Sequence[Row], meta: dict[str, Any]) -> None:
    """Rows and meta, every number."""
    Path(path).write_text(json.dumps({"rows": rows, "meta": meta}, indent=1) + "\n", encoding="utf-8")


def write_markdown(rows: Sequence[Row], meta: dict[str, Any], options: BenchOptions, folder: Path) -> Path:
    """`DATE_case.md`, with the time of day so that no earlier result is replaced. Returns the file."""
    headings, cells = table(options.case, rows)
    lines = [f"# {title(options)}", ""]
    lines += [f"- {key}: {_plain(value)}" for key, value in meta.items()]
    lines += ["", _line(headings), _line(["---"] * len(headings)), *map(_line, cells), ""]
    lines += [f"- {line}" for line in summary(rows)]
    stamp = datetime.fromisoformat(meta["date"]).strftime("%Y-%m-%d_%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stamp}_{options.case}.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def _dtype(options: BenchOptions) -> str:
    return str(options.dtype).removeprefix("torch.")


def _commit() -> str:
    """Commit of this checkout, and whether tracked files differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no")
    return (commit or "unknown") + (" with uncommitted changes" if changed else "")


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()
