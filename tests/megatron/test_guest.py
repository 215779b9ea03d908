"""The worker as a guest: in a job whose model, data parallelism and loss contract are its own, gradients equal
those of our own worker on one rank for the same batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.batch import TrainBatch
from rlcore.batch_import import from_nemo_rl
from rlcore.config import load_run_config
from tests.megatron.layout_cases import (
    TOLERANCE,
    assert_same,
    gradients_by_name,
    train_on_rank,
    weights_by_name,
)
from tests.rank_pool import RankError, run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "plug_into_megatron"
NUM_SEQUENCES, LENGTH, VOCAB_SIZE, SEED = 8, 16, 64, 3

# The example's model, said to our own worker: the same weights are drawn from the seed.
MODEL = {
    "vocab_size": VOCAB_SIZE,
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 64,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
    "qkv_bias": False,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
}
OBJECTIVE = {
    "sampling": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    "loss": {"ratio_clip_max": 0.28},
    "importance": {"correction": "tis", "cap": 1.5},
}
OPTIMIZER = {"lr": 1e-2, "clip_grad": 0.0}

# name -> (world size, tp, pp, cp, what differs from a job with Megatron's defaults)
JOBS: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "tp2dp2": (4, 2, 1, 1, {}),
    "pp2dp2": (4, 1, 2, 1, {}),
    "dp2 three values": (2, 1, 1, 1, {"num_values": 3}),
    "pp2dp2 per token": (4, 1, 2, 1, {"per_token": True}),
    "dp2 exact": (2, 1, 1, 1, {"per_token": True, "exact": True}),
    "dp2 own mean": (2, 1, 1, 1, {"own": "mean"}),
    "dp2 own sum": (2, 1, 1, 1, {"own": "sum"}),
    "dp2cp2": (4, 1, 1, 2, {}),
    "dp2cp2 three values": (4, 1, 1, 2, {"num_values": 3}),
    "cp2 per token": (2, 1, 1, 2, {"per_token": True}),
}


def make_batch() -> TrainBatch:
    """Through the importer: old logprobs some of which are -inf, a masked sample, uneven lengths, garbage in
    masked slots.
    """
    generator = torch.Generator().manual_seed(5)
    shape = (NUM_SEQUENCES, LENGTH)
    length_s = torch.tensor([16, 5, 9, 16, 4, 7, 12, 8])
    position_l = torch.arange(LENGTH)
    prompt_s = torch.tensor([3, 2, 4, 6, 2, 1, 5, 2])
    token_mask_sl = (position_l >= prompt_s[:, None]) & (position_l < length_s[:, None])
    noise_sl = torch.randn(shape, generator=generator) * 0.4
    prev_sl = torch.where(torch.rand(shape, generator=generator) < 0.1, -math.inf, -3.6 + noise_sl)
    return from_nemo_rl(
        {
            "input_ids": torch.randint(0, VOCAB_SIZE, shape, generator=generator),
            "input_lengths": length_s,
            "token_mask": token_mask_sl.long(),
            "sample_mask": torch.tensor([1.0] * 6 + [0.0] + [1.0]),
            "generation_logprobs": torch.where(token_mask_sl, -3.6 - noise_sl, math.nan),
            "prev_logprobs": torch.where(token_mask_sl, prev_sl, math.nan),
            "advantages": torch.randn(NUM_SEQUENCES, 1, generator=generator).expand(shape),
        }
    )


def rows_of(batch: TrainBatch, dp_rank: int, dp_size: int) -> TrainBatch:
    """This data-parallel rank's rows; not equally many, where there are two."""
    cuts = [0, NUM_SEQUENCES] if dp_size == 1 else [0, 5, NUM_SEQUENCES]
    values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    rows = slice(cuts[dp_rank], cuts[dp_rank + 1])
    return TrainBatch(**{name: None if value is None else value[rows] for name, value in values.items()})


@contextlib.contextmanager
def foreign_job(tp: int, pp: int, cp: int, per_token: bool):
    """A job's own groups and its own bare stage, with the seed's weights: the stage, groups, architecture."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_worker.architecture import architecture_from_config
    from megatron_worker.cpu_backend import cpu_backend
    from megatron_worker.groups import destroy_parallel, parallel_groups
    from megatron_worker.hf_bridge import initialize_from_seed
    from megatron_worker.model_setup import build_model
    from rlcore.config import ModelConfig, ParallelConfig

    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    import plain_training

    arch = architecture_from_config(ModelConfig(**MODEL), VOCAB_SIZE)  # pyright: ignore[reportArgumentType]
    with cpu_backend("cpu"):
        parallel_state.initialize_model_parallel(
            tp, pp, context_parallel_size=cp, create_gloo_process_groups=False
        )
        try:
            model_parallel_cuda_manual_seed(0)
            groups = parallel_groups()
            if cp == 1:
                stage = plain_training.model_provider(tp, pp)
            else:
                # Megatron's own attention refuses context parallelism.
                stage = build_model(arch, ParallelConfig(tp=tp, pp=pp, cp=cp), "float32", groups)
                stage.config.finalize_model_grads_func = finalize_model_grads
            stage.config.calculate_per_token_loss = per_token
            initialize_from_seed(stage, arch, SEED, groups)
            yield stage, groups, arch
        finally:
            destroy_parallel()


def in_ddp(stage):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    return DistributedDataParallel(
        stage.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), stage
    )


def objective(cp: int, **loss: Any) -> dict[str, Any]:
    """What the guest is told."""
    train = {"microbatch_size": 2} if cp == 1 else {"token_budget": 48}
    return {**OBJECTIVE, "loss": {**OBJECTIVE["loss"], **loss}, "train": train}


def run_own_schedule(rank, world_size, name, batch):
    """One backward of the job's own schedule through the guest's step: metrics and gradients by HF name."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_worker.forward_step import LossContract
    from megatron_worker.guest import GuestWorker

    _, tp, pp, cp, differs = JOBS[name]
    per_token, own = bool(differs.get("per_token")), differs.get("own")
    loss = {"actor_denominator": "retained_exact"} if differs.get("exact") else {}
    with foreign_job(tp, pp, cp, per_token) as (stage, groups, arch):
        model, contract = stage if own else in_ddp(stage), None
        if own or "num_values" in differs:
            contract = LossContract(num_values=differs.get("num_values", 2), averages=own != "sum")
        if own:
            stage.config.finalize_model_grads_func = None
        worker = GuestWorker(model, objective(cp, **loss), VOCAB_SIZE, contract=contract)
        prepared = worker.prepare(rows_of(batch, groups.dp_rank, groups.dp_size))
        assert len(prepared.microbatches) > 1, "more than one microbatch, or their number cancels by itself"
        reports = get_forward_backward_func()(**prepared.schedule(), model=[model], forward_only=False)
        for parameter in stage.parameters() if own else ():
            gradient = parameter.grad.clone()
            torch.distributed.all_reduce(gradient, group=groups.dp)
            parameter.main_grad = gradient / (groups.dp_size if own == "mean" else 1)
        worker.arch = arch
        return worker.finish(prepared, reports), gradients_by_name(worker)


def own_worker(batch: TrainBatch, **loss: Any):
    """Result, gradients and weights after a step of our own worker, on one rank and in one microbatch."""
    values = {**objective(1, **loss), "model": MODEL, "seed": SEED, "optimizer": OPTIMIZER}
    values |= {"parallel": {"backend": "cpu"}, "train": {"microbatch_size": NUM_SEQUENCES, "steps": 3}}
    values |= {"rollout": {"max_new_tokens": 8}}
    ((result, gradients, weights),) = run_ranks(train_on_rank, 1, load_run_config(values), batch)
    return result, gradients, weights


@pytest.fixture(scope="module")
def batch():
    return make_batch()


@pytest.fixture(scope="module")
def expected(batch):
    return {
        exact: own_worker(batch, **({"actor_denominator": "retained_exact"} if exact else {}))
        for exact in (False, True)
    }


@pytest.mark.parametrize("name", JOBS)
def test_a_jobs_gradients_equal_the_workers(name, batch, expected):
    """Every loss contract, data parallelism of the job's own, context parallelism, uneven replicas."""
    result, gradients, _ = expected[bool(JOBS[name][4].get("exact"))]
    assert max(float(value.abs().max()) for value in gradients.values()) > 1e-3, "a gradient to speak of"
    assert result.metrics["tokens/trained"] < result.metrics["tokens/valid"], "some tokens left"
    for metrics, ours in run_ranks(run_own_schedule, JOBS[name][0], name, batch, timeout_s=60):
        assert_same(ours, gradients, name)
        for key in ("loss/total", "tokens/trained", "tokens/retained", "tokens/valid", "ratio/mean"):
            assert metrics[key] == pytest.approx(result.metrics[key], abs=TOLERANCE), key
