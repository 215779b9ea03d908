"""How far vLLM's logprobs and the trainer's are apart on the same weights, setting by setting.

`python -m tools.agreement [--config-name smollm2_tp3] [--dtype bfloat16] [key=value ...]`: one process, no
update. Prints a Markdown table. What its columns mean stands in docs/agreement.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import socket
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from rlcore.batch import Prompt, Rollout, TrainBatch
from rlcore.cli.launch import silence_dependencies
from rlcore.config import RunConfig
from rlcore.rollout.completions import Expected, check_completions, join_rollout
from rlcore.rollout.vllm_engine import LocalEngine
from rlcore.rollout.vllm_settings import engine_arguments, engine_settings, expected_of
from rlcore.sampling import SamplingSpec
from rlcore.trainer import build_batch

SETTINGS = {
    "temperature 1": {},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1.3": {"temperature": 1.3},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "min_p 0.1": {"min_p": 0.1},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "temperature 0.7, top_k 50, top_p 0.9": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    "temperature 1.3, min_p 0.05, top_k 50, top_p 0.95": {
        **{"temperature": 1.3, "min_p": 0.05, "top_k": 50, "top_p": 0.95}
    },
    "repetition 1.2": {"repetition_penalty": 1.2},
    "presence 0.5, frequency 0.5": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "all penalties, top_k 50, top_p 0.9": {
        **{"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2},
        **{"top_k": 50, "top_p": 0.9},
    },
}
"""Fields of `SamplingSpec` by row of the table."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """One row: differences over the response tokens that both supports hold, in nats."""

    num_tokens: int
    abs_mean: float
    """Mean of |sampler - trainer|."""
    abs_max: float
    out_of_support: float
    """Share of sampled tokens that the trainer's support lacks."""
    log_mass: float
    """Mean log S, of the trainer."""
    ignored_mean: float
    """Mean of trainer - sampler where the trainer ignores truncation: its bias."""
    mass_error: float | None
    """Largest |log S of the engine - log S of the trainer|; None where the engine cannot say (temperature,
    penalties: its raw logprobs have neither).
    """


def measure(
    worker: Any,
    engine: LocalEngine,
    expected: Expected,
    spec: SamplingSpec,
    prompts: Sequence[Prompt],
    seed: int,
) -> Agreement:
    """Draws two responses a prompt with the engine and scores them with the worker, under `spec`."""
    requests = [
        dataclasses.replace(expected.request(prompt, 2, seed + 2 * index), sampling=spec.to_vllm())
        for index, prompt in enumerate(prompts)
    ]
    completions = engine.generate(requests)
    check_completions(requests, completions, expected)
    rollout = join_rollout(prompts, completions, version=0, kept=False)
    batch = batch_of(rollout)
    filtered, whole = score(worker, batch, spec), score(worker, batch, spec.unfiltered())
    mask_sl = rollout.token_mask_sl & filtered.keep_sl
    difference_n = (rollout.sampler_logprob_sl - filtered.logprob_sl)[mask_sl].double()
    bias_n = (whole.logprob_sl - rollout.sampler_logprob_sl)[rollout.token_mask_sl].double()
    mass_error = None
    if spec.effective_temperature == 1.0 and not spec.penalises:
        raw_sl = raw_logprobs(engine, rollout)
        mass_sl = raw_sl - rollout.sampler_logprob_sl
        mass_error = float((mass_sl - filtered.log_mass_sl)[mask_sl].abs().max())
    return Agreement(
        num_tokens=int(rollout.token_mask_sl.sum()),
        abs_mean=float(difference_n.abs().mean()),
        abs_max=float(difference_n.abs().max()),
        out_of_support=float((~filtered.keep_sl)[rollout.token_mask_sl].double().mean()),
        log_mass=float(filtered.log_mass_sl[rollout.token_mask_sl].double().mean()),
        ignored_mean=float(bias_n.mean()),
        mass_error=mass_error,
    )


def batch_of(rollout: Rollout) -> TrainBatch:
    """The rollout as a batch to score; every sample counts."""
    return build_batch(rollout, torch.ones_like(rollout.finished_s))


def score(worker: Any, batch: TrainBatch, spec: SamplingSpec) -> Any:
    """The worker's scores under another distribution than its run's."""
    own = worker.spec
    worker.spec = spec
    try:
        return worker.logprobs(batch)
    finally:
        worker.spec = own


def raw_logprobs(engine: LocalEngine, rollout: Rollout) -> torch.Tensor:
    """`[S, L]` raw logprobs by the engine: those of prompt tokens pass no sampling processor, so each
    response is put to it again as a prompt.
    """
    raw_sl = torch.zeros_like(rollout.sampler_logprob_sl)
    rows = [
        ids[:length] for ids, length in zip(rollout.ids_sl.tolist(), rollout.length_s.tolist(), strict=True)
    ]
    for row, (ids, entries) in enumerate(zip(rows, engine.prompt_logprobs(rows), strict=True)):
        raw_sl[row, 1 : len(ids)] = torch.tensor(entries)
    return raw_sl


def table(rows: Iterable[tuple[str, Agreement]]) -> str:
    """The Markdown table."""
    lines = [
        "| setting | tokens | mean abs difference | max abs difference | out of support | max log S error | "
        "mean log S | trainer - sampler, truncation ignored |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows:
        error = "" if row.mass_error is None else f"{row.mass_error:.1e}"
        lines.append(
            f"| {name} | {row.num_tokens} | {row.abs_mean:.1e} | {row.abs_max:.1e} | "
            f"{row.out_of_support:.2%} | {error} | {row.log_mass:.4f} | {row.ignored_mean:.4f} |"
        )
    return "\n".join(lines)


def main(config: RunConfig, engine_dtype: str | None, num_prompts: int) -> None:
    """Measures every setting on the run's model and prompts."""
    silence_dependencies()
    from megatron_worker.worker import MegatronWorker
    from rlcore.rollout.tasks import make_task

    join_alone()
    task = make_task(config.task, config.model.hf_path, config.seed)
    assert config.model.hf_path is not None, "a model folder: set model.hf_path"
    prompts = task.prompts(0, num_prompts)
    with ExitStack() as stack:
        worker = MegatronWorker(config, task.vocab_size)
        stack.callback(worker.close)
        expected = expected_of(config, worker.decoder.vocab_size, worker.num_positions, task.eos_id)
        settings = engine_settings(config, expected, torch.cuda.is_available())
        arguments = engine_arguments(config, expected, settings, torch.cuda.is_available())
        if engine_dtype is not None:
            arguments["dtype"] = engine_dtype
        engine = LocalEngine(config.model.hf_path, arguments, settings)
        stack.callback(engine.close)
        rows = []
        for index, (name, fields) in enumerate(SETTINGS.items()):
            spec = SamplingSpec(**fields)  # type: ignore[arg-type]
            rows.append((name, measure(worker, engine, expected, spec, prompts, seed=1000 * index)))
            print(name, rows[-1][1], file=sys.stderr, flush=True)
    print(table(rows))


def join_alone() -> None:
    """Makes this process the only rank of a run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update({**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})


if __name__ == "__main__":
    from rlcore.cli.compose import compose_run_config

    parser = argparse.ArgumentParser(prog="python -m tools.agreement")
    parser.add_argument("--config-name", default="smollm2_tp3")
    parser.add_argument("--dtype", help="of the engine (the run's model.dtype)")
    parser.add_argument("--prompts", type=int, default=8)
    args, words = parser.parse_known_args()
    alone = ["nproc=1", "parallel.tp=1", "parallel.pp=1", "rollout.engine=vllm", *words]
    main(compose_run_config(args.config_name, alone), args.dtype, args.prompts)
