"""A whole `train_step` on Megatron: what our code adds to its forward and backward. Here the demo's model;
`case_packing` has one of SmolLM2's size."""

from __future__ import annotations

import dataclasses
import importlib
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from rlcore.batch import Prompt, TrainBatch
from rlcore.cli.launch import silence_dependencies
from rlcore.collectives import Group, all_reduce_
from rlcore.config import RunConfig, load_run_config
from tools.bench.options import BenchOptions
from tools.bench.ranks import CheckFailed, run_ranks

Row = dict[str, Any]
# The demo's own vocabulary, where Megatron does nearly everything, and `--vocab`, where the head does.
DEMO_VOCAB = 14
SEQUENCE_LENGTH = 32
MICROBATCH_SEQUENCES = 8
# Where our code is entered during a step: module, function, part of the report. What a checkout lacks is
# skipped. A call inside another one belongs to the outer part.
ENTRANCES = (
    ("megatron_worker.forward_step", "score_logits", "op_forward"),
    ("megatron_worker.forward_step", "microbatch_loss", "loss"),
    ("rlcore.ops.linear_head", "score_rows", "op_forward"),
    ("rlcore.ops.linear_head", "rows_gradient", "op_backward"),
    ("rlcore.ops.logprob", "rows_gradient", "op_backward"),
    ("megatron_worker.worker", "split_batch", "batch"),
    ("megatron_worker.worker", "pack_batch", "batch"),
    ("megatron_worker.worker", "weigh_step", "batch"),
    ("megatron_worker.worker", "reduce_metrics", "metrics"),
    ("megatron_worker.worker", "refuse_broken_step", "safety"),
)
PARTS = ("op_forward", "op_backward", "loss", "batch", "metrics", "safety")
# Megatron's, and neither forward nor backward.
OPTIMIZER = "optimizer"


@dataclass
class Spans:
    """Seconds inside our code since the last `take`, by part."""

    seconds: dict[str, float] = field(default_factory=dict)
    inside: bool = False

    def timed(self, function: Any, part: str) -> Any:
        """The function, its time added to the part unless a timed one called it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return function(*args, **kwargs)
            self.inside, started = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.inside = False
                self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - started

        return run

    def take(self) -> dict[str, float]:
        """What came together; starts again from nothing."""
        taken, self.seconds = self.seconds, {}
        return taken


@contextmanager
def timed_entrances(spans: Spans) -> Iterator[None]:
    """Wraps every entrance of this checkout while the context is open."""
    with ExitStack() as stack:
        for module_name, name, part in ENTRANCES:
            try:
                module = importlib.import_module(module_name)
            except ModuleNotFoundError:
                continue
            if hasattr(module, name):
                wrapped = spans.timed(getattr(module, name), part)
                stack.enter_context(mock.patch.object(module, name, wrapped))
        yield


def run_train_step(options: BenchOptions) -> list[Row]:
    """TP as asked, one stage; then SmolLM2's size on one rank. `ValueError` without Megatron-core."""
    from tools.bench.case_packing import packing_rank

    try:
        importlib.import_module("megatron.core")
    except ModuleNotFoundError as error:
        raise ValueError("--case train_step needs megatron-core: pip install -e '.[megatron]'.") from error
    rows = []
    for vocab_size in (DEMO_VOCAB, options.vocab):
        # A launch each: Megatron's parallel state is global.
        rows += run_ranks(train_rank, options.tp, options.device, options, vocab_size)[0]
    return rows + run_ranks(packing_rank, 1, options.device, options)[0]


def train_rank(group: Group, options: BenchOptions, vocab_size: int) -> list[Row]:
    """The row of one vocabulary, from one rank."""
    with open_worker(_config(options, vocab_size)) as worker:
        batch = _batch(worker, options.tokens, vocab_size)
        steps, metrics = timed_steps(worker, batch, options.repeats, group)
    _check_ratio(metrics)
    return [make_row(f"train_step_v{vocab_size}", steps, options.tokens)]


@contextmanager
def open_worker(config: RunConfig) -> Iterator[Any]:
    """A Megatron worker, closed afterwards."""
    silence_dependencies()
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        yield worker
    finally:
        worker.close()


def timed_steps(
    worker: Any, batch: TrainBatch, repeats: int, group: Group
) -> tuple[list[tuple[float, dict[str, float]]], Mapping[str, float]]:
    """Seconds of each step and of its parts, the first step left out (it compiles and allocates); the last
    one's metrics. `CheckFailed` where no step is taken or the loss is not finite.
    """
    spans, steps, metrics = Spans(), [], {}
    with timed_entrances(spans):
        optimizer_step = spans.timed(worker.optimizer.step, OPTIMIZER)
        with mock.patch.object(worker.optimizer, "step", optimizer_step):
            for _ in range(repeats + 1):
                spans.take()
                all_reduce_(torch.zeros(1), "sum", group)
                started = time.perf_counter()
                result = worker.train_step(batch)
                seconds = time.perf_counter() - started
                if not result.stepped:
                    raise CheckFailed(f"train_step: no step was taken: {result.reason}")
                metrics = result.metrics
                _check_finite(metrics)
                steps.append((seconds, spans.take()))
    return steps[1:], metrics


def _config(options: BenchOptions, vocab_size: int) -> RunConfig:
    """The demo's model in one stage; `configs/model/tiny.yaml` has the same numbers."""
    return load_run_config(
        {
            "model": {
                "vocab_size": vocab_size,
                "num_layers": 2,
                "hidden_size": 64,
                "num_attention_heads": 4,
                "ffn_hidden_size": 128,
                "max_position_embeddings": 64,
                "tie_word_embeddings": False,
            },
            "parallel": {"tp": options.tp, "backend": "cuda" if options.device == "cuda" else "cpu"},
            "sampling": {"top_k": 50, "top_p": 0.95},
            # The update runs and moves nothing, so that every step is the same and its ratios are 1.
            "optimizer": {"lr": 0.0},
            "train": {"microbatch_size": MICROBATCH_SEQUENCES},
        }
    )


def _batch(worker: Any, num_tokens: int, vocab_size: int) -> TrainBatch:
    """Random prompts and responses that the worker's own policy drew, each half a sequence; scored."""
    from rlcore.rollout.policy_sampler import PolicySampler

    generator = torch.Generator().manual_seed(0)
    half, num_rows = SEQUENCE_LENGTH // 2, max(1, num_tokens // SEQUENCE_LENGTH)
    prompts = [
        Prompt(ids=torch.randint(0, vocab_size, (half,), generator=generator).tolist(), group_id=row)
        for row in range(num_rows)
    ]
    sampler = PolicySampler(worker.decoder, worker.spec, 0, half, SEQUENCE_LENGTH)
    rollout = sampler.generate(prompts, 1, seed=0)
    noise_sl = torch.randn(rollout.ids_sl.shape, generator=generator).to(worker.device)
    batch = TrainBatch(
        ids_sl=rollout.ids_sl,
        length_s=rollout.length_s,
        token_mask_sl=rollout.token_mask_sl,
        sample_mask_s=torch.ones_like(rollout.finished_s),
        advantage_sl=torch.where(rollout.token_mask_sl, noise_sl, 0.0),
        sampler_logprob_sl=rollout.sampler_logprob_sl,
    )
    old = worker.logprobs(batch)
    return dataclasses.replace(batch, old_logprob_sl=old.logprob_sl, keep_old_sl=old.keep_sl)


def _check_finite(metrics: Mapping[str, float]) -> None:
    grad_norm = metrics["optimizer/grad_norm"]
    if not (math.isfinite(metrics["loss/total"]) and math.isfinite(grad_norm) and grad_norm > 0):
        raise CheckFailed(f"train_step: loss {metrics['loss/total']}, gradient norm {grad_norm}")


def _check_ratio(metrics: Mapping[str, float]) -> None:
    """The old logprobs are those of the same weights: the ratio of every trained token is 1."""
    if abs(metrics["ratio/mean"] - 1) > 1e-5:
        raise CheckFailed(f"train_step: a mean ratio of {metrics['ratio/mean']}, expected 1")


def make_row(name: str, steps: list[tuple[float, dict[str, float]]], num_tokens: int) -> Row:
    """Medians of the steps; `num_tokens`: real tokens of one step."""
    total = statistics.median(seconds for seconds, _ in steps)
    parts = {
        part: statistics.median(spans.get(part, 0.0) for _, spans in steps) for part in (*PARTS, OPTIMIZER)
    }
    if not (parts["op_forward"] > 0 and parts["op_backward"] > 0):
        raise CheckFailed("train_step: the op was not seen; its entrances have moved, see ENTRANCES")
    ours, megatron = sum(parts[part] for part in PARTS), total - sum(parts.values())
    return {
        "name": name,
        "fwd_bwd_s": total,
        **{f"{part}_s": seconds for part, seconds in parts.items()},
        "megatron_s": megatron,
        "adds": ours / megatron,
        "tokens_per_s": num_tokens / total,
        "vs_padded": 1.0,
    }
