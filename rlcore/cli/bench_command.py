"""`rlcore bench`: its options, and the way to the benchmark, which stands in the checkout's tools/bench/."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def add_bench_parser(commands: Any) -> None:
    """Registers the command. Choices are checked by the benchmark itself, which names what there is."""
    bench = commands.add_parser(
        "bench", help="measure the op against sorting baselines and the floor, results checked first"
    )
    bench.add_argument(
        "--case", default="op", help="op, scaling, fused, replay, loss, transport, train_step or real (op)"
    )
    bench.add_argument("--json", metavar="FILE", help="also write every number to this file")
    bench.add_argument("--tokens", type=int, help="tokens a call (256 for op; the case's own number)")
    bench.add_argument("--vocab", type=int, default=151_936, help="vocabulary size (151936)")
    bench.add_argument("--tp", type=int, default=2, help="ranks the vocabulary is cut over (2)")
    bench.add_argument("--dtype", default="float32", help="of the logits: float32 or bfloat16 (float32)")
    bench.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    bench.add_argument("--repeats", type=int, help="rounds over all methods (the case's own number)")
    bench.add_argument("--backend", default="auto", help="of the op, as `vocab_parallel_logprob` takes it")
    bench.add_argument("--no-results", action="store_true", help="write no markdown to tools/bench/results/")


def run_bench(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Measures and reports; returns the exit code. `ValueError` for bad options, or without a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not root.joinpath("tools", "bench", "run.py").is_file():
        raise ValueError(
            "the benchmark is part of a checkout, not of the installed package. Clone the repository and "
            "run `pip install -e .` there."
        )
    # An editable install maps the packages, not the folder they stand in. Ranks inherit the path.
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    bench = importlib.import_module("tools.bench.run")
    options = bench.BenchOptions.of(
        case=args.case,
        tokens=args.tokens,
        vocab=args.vocab,
        tp=args.tp,
        repeats=args.repeats,
        dtype=args.dtype,
        device=args.device,
        backend=args.backend,
    )
    return bench.run(options, words, args.json, None if args.no_results else bench.report.RESULTS)
