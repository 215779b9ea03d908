"""The op against the two sorting methods and the floor: `--case op`, `--case real`, `--case scaling`."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlcore.collectives import Group
from rlcore.ops.logprob import vocab_parallel_logprob
from rlcore.ops.passes import select_passes
from rlcore.sampling import SamplingSpec
from tools.bench.baselines import gather_sort, resharding_sort
from tools.bench.checks import Outcome, check_all, check_floor
from tools.bench.exchange import Exchange
from tools.bench.floor import plain_logprob
from tools.bench.measure import Method, count_memory, count_traffic, time_alternately, warm_and_count
from tools.bench.options import BenchOptions
from tools.bench.problem import (
    Problem,
    draw_targets,
    make_rows,
    spec_name,
    take_shard,
    with_spec,
)
from tools.bench.ranks import run_ranks

Row = dict[str, Any]

# Name, kind of rows, truncation. The names are those of the targets.
OP_ROWS = (
    ("k50_p95", "flat", SamplingSpec(top_k=50, top_p=0.95)),
    ("p95_peaked", "peaked", SamplingSpec(top_p=0.95)),
    ("p95_flat", "flat", SamplingSpec(top_p=0.95)),
    ("k50", "flat", SamplingSpec(top_k=50)),
)
REAL_SPECS = (
    SamplingSpec(top_k=50, top_p=0.95),
    SamplingSpec(top_p=0.95),
    SamplingSpec(top_k=50),
    SamplingSpec(temperature=0.7, top_p=0.95),
)
BASELINES = {"resharding_sort": resharding_sort, "gather_sort": gather_sort}

SCALING_VOCABS = (32_768, 151_936, 262_144)
SCALING_TPS = (1, 2, 4)
SCALING_SPECS = (
    *(SamplingSpec(top_k=k) for k in (1, 50, 1000, 20_000)),
    SamplingSpec(top_p=0.95),
)
# Rows of the scaling case that the sorting baseline confirms.
SCALING_CHECKED = 8


def run_op(options: BenchOptions) -> list[Row]:
    """The four rows of the targets."""
    return run_ranks(_op_rank, options.tp, options.device, options)[0]


def run_real(options: BenchOptions, model_path: Path) -> list[Row]:
    """Logits of SmolLM2 at tokens it drew itself, after reasoning-gym prompts."""
    from tools.bench.real_logits import real_logits

    # On disk, not in a pipe: every rank maps the file and copies its own columns.
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        file = Path(folder) / "rows.pt"
        torch.save(real_logits(model_path, options.tokens), file)
        return run_ranks(_real_rank, options.tp, options.device, options, str(file))[0]


def run_scaling(options: BenchOptions) -> list[Row]:
    """Ours and the floor over V, TP, dtype, kind of rows and truncation; one launch of ranks a TP."""
    rows: list[Row] = []
    for tp in SCALING_TPS:
        rows += run_ranks(_scaling_rank, tp, options.device, options)[0]
    return rows


def _op_rank(group: Group, options: BenchOptions) -> list[Row]:
    rows = []
    for name, kind, spec in OP_ROWS:
        whole = make_rows(kind, options.tokens, options.vocab)
        shard = take_shard(whole, draw_targets(whole), group, options.dtype, options.device)
        del whole
        measured = measure_op(with_spec(shard, spec, options.backend), options)
        rows.append({"name": name, "rows": kind} | measured)
    return rows


def _real_rank(group: Group, options: BenchOptions, file: str) -> list[Row]:
    whole, target_t = torch.load(file, mmap=True)
    shard = take_shard(whole, target_t, group, options.dtype, options.device)
    rows = []
    for spec in REAL_SPECS:
        suffix = "" if spec.temperature == 1.0 else f"_t{round(spec.temperature * 10):02d}"
        name = {"name": f"real_{spec_name(spec)}{suffix}", "rows": "real"}
        rows.append(name | measure_op(with_spec(shard, spec, options.backend), options))
    return rows


def _scaling_rank(group: Group, options: BenchOptions) -> list[Row]:
    rows: list[Row] = []
    for vocab_size in SCALING_VOCABS:
        for kind in ("flat", "peaked"):
            whole = make_rows(kind, options.tokens, vocab_size)
            target_t = draw_targets(whole)
            for dtype in (torch.float32, torch.bfloat16):
                shard = take_shard(whole, target_t, group, dtype, options.device)
                for spec in SCALING_SPECS:
                    row = _scaling_row(with_spec(shard, spec, options.backend), options)
                    place = {"V": vocab_size, "tp": 1 if group is None else group.size(), "rows": kind}
                    rows.append(
                        {"name": spec_name(spec), **place, "dtype": str(dtype).removeprefix("torch.")} | row
                    )
    return rows


def measure_op(problem: Problem, options: BenchOptions) -> Row:
    """Checks, memory, traffic and times of one problem; the same on every rank but for its own memory."""
    method, floor = ours(problem), _method(problem, plain_logprob)
    counted = warm_and_count(method, options.device)
    floor_counted = warm_and_count(floor, options.device)
    others, row = [], {}
    for name, baseline in BASELINES.items():
        exchange = Exchange(problem.vocab.vocab_size, problem.tp_group)
        run = count_memory(_method(problem, baseline, exchange), options.device)
        others.append(Outcome(name=name, logprob_t=run.result, grad_tv=run.grads[0]))
        row[f"{name}_extra_memory_ratio"] = run.extra_peak_bytes / problem.shard_bytes
        row[f"{name}_comm_bytes_per_token"] = exchange.sent_bytes / problem.num_tokens
    check_all(problem, others)
    others.clear()
    if problem.spec.effective_temperature == 1.0:
        plain = Outcome(name="floor", logprob_t=floor_counted.result, grad_tv=floor_counted.grads[0])
        check_floor(plain, problem)
    slow = {
        name: _method(problem, baseline, Exchange(problem.vocab.vocab_size, problem.tp_group))
        for name, baseline in BASELINES.items()
    }
    fast = {"ours": method, "floor": floor, "copy": _copy(problem)}
    times = time_alternately(fast, slow, options.repeats, problem.tp_group, options.device)
    row |= _traffic(method, problem) | _kept(problem)
    for name, measured in times.items():
        row[f"{name}_s"], row[f"{name}_quartiles_s"] = measured.median, measured.spread
    own = times["ours"]
    return {
        "fwd_bwd_s": own.median,
        "forward_s": sorted(own.forward)[len(own.forward) // 2],
        "backward_s": sorted(own.backward)[len(own.backward) // 2],
        "vs_resharding_sort": row["resharding_sort_s"] / own.median,
        "vs_gather_sort": row["gather_sort_s"] / own.median,
        "vs_floor": own.median / row["floor_s"],
        # Logits read in forward and in backward, a gradient written; a copy reads and writes.
        "gb_per_s": 3 * problem.shard_bytes / own.median / 1e9,
        "copy_gb_per_s": 2 * problem.shard_bytes / row["copy_s"] / 1e9,
        "extra_memory_ratio": counted.extra_peak_bytes / problem.shard_bytes,
        "floor_extra_memory_ratio": floor_counted.extra_peak_bytes / problem.shard_bytes,
        "backend": select_passes(problem.backend, problem.logits_tv).name,
    } | row


def _scaling_row(problem: Problem, options: BenchOptions) -> Row:
    method, floor = ours(problem), _method(problem, plain_logprob)
    counted = warm_and_count(method, options.device)
    few = problem.first(SCALING_CHECKED)
    exchange = Exchange(few.vocab.vocab_size, few.tp_group)
    other = _method(few, resharding_sort, exchange)
    result = other.forward()
    check_all(
        few, [Outcome(name="resharding_sort", logprob_t=result.detach(), grad_tv=other.backward(result)[0])]
    )
    floor.backward(floor.forward())
    times = time_alternately(
        {"ours": method, "floor": floor}, {}, options.repeats, problem.tp_group, options.device
    )
    return (
        {
            "fwd_bwd_s": times["ours"].median,
            "floor_s": times["floor"].median,
            "vs_floor": times["ours"].median / times["floor"].median,
            "ours_quartiles_s": times["ours"].spread,
            "extra_memory_ratio": counted.extra_peak_bytes / problem.shard_bytes,
        }
        | _traffic(method, problem)
        | _kept(problem)
    )


def ours(problem: Problem) -> Method:
    """The op as a user calls it."""

    def forward() -> torch.Tensor:
        return vocab_parallel_logprob(
            problem.logits_tv,
            problem.target_t,
            problem.spec,
            problem.tp_group,
            problem.vocab,
            backend=problem.backend,
        ).logprob_t

    return Method(forward=forward, backward=partial(backward, problem))


def _method(problem: Problem, function: Any, *args: Any) -> Method:
    return Method(forward=partial(function, problem, *args), backward=partial(backward, problem))


def _copy(problem: Problem) -> Method:
    """A copy of the shard into new memory: what the machine's memory can do."""
    logits_tv = problem.logits_tv.detach()
    return Method(forward=logits_tv.clone, backward=lambda copied: ())


def backward(problem: Problem, logprob_t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradient in the logits under the problem's upstream gradient."""
    return torch.autograd.grad(logprob_t, problem.logits_tv, problem.upstream_t)


def _traffic(method: Method, problem: Problem) -> Row:
    traffic = count_traffic(method)
    return {
        "comm_bytes_per_token": traffic.sent_bytes / problem.num_tokens,
        "comm_received_bytes_per_token": traffic.received_bytes / problem.num_tokens,
        "comm_calls_forward": traffic.forward_calls,
        "comm_calls_backward": traffic.backward_calls,
    }


@torch.no_grad()
def _kept(problem: Problem) -> Row:
    """How much the truncation keeps, to know what kind of rows these are."""
    result = vocab_parallel_logprob(
        problem.logits_tv, problem.target_t, problem.spec, problem.tp_group, problem.vocab
    )
    kept_t = result.num_kept_t.float()
    return {
        "kept_median": float(kept_t.median()),
        "kept_max": float(kept_t.max()),
        "targets_in_support": float(result.keep_t.float().mean()),
    }
