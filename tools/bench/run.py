"""Runs one case of the benchmark from start to report."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rlcore.ops.passes import select_passes
from tools.bench import report
from tools.bench.case_fused import run_fused
from tools.bench.case_loss import run_loss
from tools.bench.case_op import run_op, run_real, run_scaling
from tools.bench.case_replay import run_replay
from tools.bench.case_train_step import run_train_step
from tools.bench.case_transport import run_transport
from tools.bench.options import BenchOptions
from tools.bench.ranks import CheckFailed
from tools.bench.targets import judge

MODEL = Path(__file__).resolve().parents[2] / "models" / "SmolLM2-135M-Instruct"

RUNS: dict[str, Callable[[BenchOptions], list[dict[str, Any]]]] = {
    "op": run_op,
    "scaling": run_scaling,
    "fused": run_fused,
    "replay": run_replay,
    "loss": run_loss,
    "transport": run_transport,
    "train_step": run_train_step,
    "real": lambda options: run_real(options, MODEL),
}


def run(options: BenchOptions, words: Sequence[str], json_path: str | None, results: Path | None) -> int:
    """Measures, prints, writes; returns the exit code: 1 when methods that must agree do not.

    `words`: the command line, for the record. `results`: folder of the markdown, None for none. A missed
    target is reported, not an error.
    """
    if json_path and not Path(json_path).resolve().parent.is_dir():
        raise ValueError(f"--json {json_path}: the folder {Path(json_path).parent} does not exist.")
    if options.case == "real" and not (MODEL / "config.json").is_file():
        print("rlcore bench: --case real skipped: models/SmolLM2-135M-Instruct is not there; `make model`.")
        return 0
    load_before = round(os.getloadavg()[0], 2)
    select_passes(options.backend, torch.empty(0, device=options.device))
    try:
        rows = RUNS[options.case](options)
    except CheckFailed as failed:
        print(f"rlcore bench: check failed, nothing is reported: {failed}", file=sys.stderr)
        return 1
    for row in rows:
        row["targets"] = judge(row, options)
    meta = report.make_meta(options, words, load_before)
    report.print_report(rows, options)
    if json_path:
        report.write_json(json_path, rows, meta)
    if results is not None:
        print(f"wrote {os.path.relpath(report.write_markdown(rows, meta, options, results))}")
    return 0
