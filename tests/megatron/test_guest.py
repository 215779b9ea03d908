"""The worker as a guest: in a job whose model, data parallelism and loss contract are its own, gradients
equal those of our own worker on one rank for the same batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.batch import TrainBatch
from rlcore.batch_import import from_nemo_rl
from rlcore.config import RunConfig, load_run_config
from tests.megatron.layout_cases import (
    TOLERANCE,
    assert_same,
    assert_same_metrics,
    gradients_by_name,
    score_on_rank,
    train_on_rank,
    weights_by_name,
)
from tests.rank_pool import run_ranks

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
# With a small epsilon Adam's first step is the gradient's sign, which rounding decides where it is near 0.
OPTIMIZER = {"lr": 1e-2, "clip_grad": 0.0, "adam_eps": 1e-2}

# name -> (world size, tp, pp, cp, what differs from a job with Megatron's defaults)
JOBS: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "tp2dp2": (4, 2, 1, 1, {}),
    "tp2dp2 own forward step": (4, 2, 1, 1, {"own_step": True}),
    "tp2dp2 fused head": (4, 2, 1, 1, {"fused": True}),
    "pp2dp2": (4, 1, 2, 1, {}),
    "tp2dp2 three values": (4, 2, 1, 1, {"num_values": 3}),
    "pp2dp2 per token": (4, 1, 2, 1, {"per_token": True}),
    "pp2dp2 exact": (4, 1, 2, 1, {"per_token": True, "exact": True}),
    "tp2dp2 own mean": (4, 2, 1, 1, {"own": "mean"}),
    "tp2dp2 own sum": (4, 2, 1, 1, {"own": "sum"}),
    "dp2cp2": (4, 1, 1, 2, {}),
    "dp2cp2 three values": (4, 1, 1, 2, {"num_values": 3}),
    "dp2cp2 per token": (4, 1, 1, 2, {"per_token": True}),
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
    return batch.rows(slice(cuts[dp_rank], cuts[dp_rank + 1]))


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
    from megatron_worker.model_setup import build_chunks
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
                (stage,) = build_chunks(arch, ParallelConfig(tp=tp, pp=pp, cp=cp), "float32", groups)
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


def own_forward_step(loss_func, data, model):
    """A job's own way to call its model, with the loss alone from us."""
    microbatch = next(data)
    mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
    output = model(
        input_ids=microbatch.input_ids_bl, position_ids=microbatch.position_ids_bl, attention_mask=mask
    )
    return output, functools.partial(loss_func, model, microbatch)


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
        config = objective(cp, **loss)
        if differs.get("fused"):
            # Chunks that end inside rows.
            config["model"] = {"fused_head": True, "fused_head_tokens": 20}
        worker = GuestWorker(model, config, VOCAB_SIZE, contract=contract)
        prepared = worker.prepare(rows_of(batch, groups.dp_rank, groups.dp_size))
        assert len(prepared.microbatches) > 1, "more than one microbatch, or their number cancels by itself"
        arguments = prepared.schedule()
        if differs.get("own_step"):
            arguments["forward_step_func"] = functools.partial(own_forward_step, prepared.loss_func)
        reports = get_forward_backward_func()(**arguments, model=[model], forward_only=False)
        for parameter in stage.parameters() if own else ():
            gradient = parameter.grad.clone()
            torch.distributed.all_reduce(gradient, group=groups.dp)
            parameter.main_grad = gradient / (groups.dp_size if own == "mean" else 1)
        worker.arch = arch
        return worker.finish(prepared, reports), gradients_by_name(worker)


def own_config(**loss: Any) -> RunConfig:
    """Of our own worker, on one rank and in one microbatch."""
    values = {**objective(1, **loss), "model": MODEL, "seed": SEED, "optimizer": OPTIMIZER}
    values |= {"parallel": {"backend": "cpu"}, "train": {"microbatch_size": NUM_SEQUENCES, "steps": 3}}
    return load_run_config({**values, "rollout": {"max_new_tokens": 8}})


@pytest.fixture(scope="module")
def batch():
    return make_batch()


@pytest.fixture(scope="module")
def expected(batch):
    """Result, gradients and weights after our own worker's step, by whether the exact count divides."""
    configs = {False: own_config(), True: own_config(actor_denominator="retained_exact")}
    return {exact: run_ranks(train_on_rank, 1, config, batch)[0] for exact, config in configs.items()}


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


def run_whole_step(rank, world_size, batch, wrong):
    """`train_step` in the job's DDP and optimizer, after one that is refused: results, weights, scores."""
    from megatron_worker.guest import GuestWorker
    from megatron_worker.optimizer_setup import build_optimizer
    from rlcore.config import OptimizerConfig

    with foreign_job(2, 1, 1, False) as (stage, groups, arch):
        model = in_ddp(stage)
        optimizer, scheduler = build_optimizer([model], OptimizerConfig(**OPTIMIZER), 3)
        worker = GuestWorker(model, objective(1), VOCAB_SIZE, optimizer=optimizer, scheduler=scheduler)
        worker.arch = arch
        mine = rows_of(batch, groups.dp_rank, groups.dp_size)
        old = worker.with_old_logprobs(mine)
        refused = worker.train_step(rows_of(wrong, groups.dp_rank, groups.dp_size))
        result = worker.train_step(mine)
        return refused, result, weights_by_name(worker), old, groups.dp_rank


def test_a_whole_step_through_the_guest_equals_the_workers(batch, expected):
    """Scores, weights after the step and metrics; a step refused before leaves no trace."""
    last_s = torch.arange(NUM_SEQUENCES) >= NUM_SEQUENCES - 2
    broken_sl = torch.where(last_s[:, None] & batch.token_mask_sl, math.nan, batch.advantage_sl)
    wrong = dataclasses.replace(batch, advantage_sl=broken_sl)
    result, _, weights = expected[False]
    (scores,) = run_ranks(score_on_rank, 1, own_config(), batch)
    for refused, ours, moved, old, dp_rank in run_ranks(run_whole_step, 4, batch, wrong, timeout_s=60):
        assert refused.refused and refused.broken_samples == ((1, 2),), "row 7; row 6 is masked"
        assert_same(moved, weights, "weights after the step")
        assert_same_metrics(ours, result, "the whole step")
        rows = slice(0, 5) if dp_rank == 0 else slice(5, NUM_SEQUENCES)
        mask_sl = batch.token_mask_sl[rows]
        assert torch.equal(old.keep_old_sl[mask_sl], scores.keep_sl[rows][mask_sl])
        assert torch.allclose(old.old_logprob_sl[mask_sl], scores.logprob_sl[rows][mask_sl], atol=1e-5)
        assert not old.keep_old_sl[mask_sl].all(), "some tokens are outside the support"


def run_broken(rank, world_size, batch, wraps):
    """A NaN weight on the last stage of one replica, in a schedule of the job's own: `finish`'s message."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_worker.forward_step import LossContract
    from megatron_worker.guest import GuestWorker

    with foreign_job(1, 2, 1, False) as (stage, groups, _):
        if groups.dp_rank == 1 and groups.is_last_stage:
            stage.output_layer.weight.data[5, 5] = math.nan
        model = in_ddp(stage) if wraps else stage
        if not wraps:
            stage.config.finalize_model_grads_func = None
        contract = None if wraps else LossContract(averages=True)
        worker = GuestWorker(model, objective(1), VOCAB_SIZE, contract=contract)
        prepared = worker.prepare(rows_of(batch, groups.dp_rank, groups.dp_size))
        reports = get_forward_backward_func()(**prepared.schedule(), model=[model], forward_only=False)
        try:
            worker.finish(prepared, reports)
        except ValueError as error:
            return str(error)
        return "went through"


@pytest.mark.parametrize("wraps", [True, False])
def test_finish_refuses_nan_on_all_ranks(wraps, batch):
    for message in run_ranks(run_broken, 4, batch, wraps, timeout_s=60):
        assert "NaN or inf in the logits or loss" in message and "data-parallel rank 1" in message


# What the job does, what the guest is told, what it says.
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"loss": {"ratio_clip_mx": 0.3}}, "ratio_clip_mx"),
    ({"contract": {"num_values": 4}}, {}, "num_values=4: expected 2 or 3"),
    ({}, {"loss": {"ratio_clip_min": 1.5}}, "loss.ratio_clip_min=1.5"),
    ({}, {"sampling": {"top_p": 2.0}}, "sampling.top_p=2.0"),
    ({}, {"parallel": {"tp": 4}}, "parallel.tp=4, but this Megatron job runs with 2"),
    ({}, {"loss": {"actor_denominator": "retained_exact"}}, "calculate_per_token_loss=True"),
    ({}, {"train": {"token_budget": 32}}, "DotProductAttention"),
    ({"hidden_dropout": 0.1}, {}, "hidden_dropout=0.1"),
    ({"virtual_pipeline_model_parallel_size": 2}, {}, "the list of all of this rank's chunks"),
    ({"vocab_size": 65}, {}, "vocab_size=65: the model has 64 rows"),
    ({"parallel_output": False}, {}, "parallel_output=True"),
    ({"contract": {"per_token": True}}, {}, "contract.per_token=True, but the model's calculate_per_token"),
    ({"optimizer": "torch"}, {}, "not GPTModel and Adam"),
    (
        {"calculate_per_token_loss": True, "finalize_model_grads_func": None},
        {"loss": {"actor_denominator": "retained_exact"}},
        "finalize_model_grads_func",
    ),
]


def run_refused(rank, world_size, batch):
    """Each message of the table, then what a batch and a missing optimizer or reference are told."""
    from megatron_worker.forward_step import LossContract
    from megatron_worker.guest import GuestWorker
    from megatron_worker.loss_scale import check_loss_scale

    def message_of(call, *arguments, **named):
        try:
            call(*arguments, **named)
        except ValueError as error:
            return str(error)
        return "went through"

    messages = []
    with foreign_job(2, 1, 1, False) as (stage, _, _):
        for job, told, _ in REFUSED:
            changed = {name: value for name, value in job.items() if hasattr(stage.config, name)}
            before = {name: getattr(stage.config, name) for name in changed}
            for name, value in changed.items():
                setattr(stage.config, name, value)
            stage.parallel_output = job.get("parallel_output", True)
            named: dict[str, Any] = {}
            if "optimizer" in job:
                named["optimizer"] = torch.optim.Adam(stage.parameters())
            vocab_size = job.get("vocab_size", VOCAB_SIZE)

            def build(job=job, told=told, vocab_size=vocab_size, named=named):
                contract = LossContract(**job["contract"]) if "contract" in job else None
                GuestWorker(stage, told, vocab_size, contract=contract, **named)

            messages.append(message_of(build))
            for name, value in before.items():
                setattr(stage.config, name, value)
            stage.parallel_output = True
        messages.append(message_of(GuestWorker(stage, {}, VOCAB_SIZE).prepare, batch))
        contract = LossContract(averages=True)
        worker = GuestWorker(stage, {"loss": {"kl_coef": 0.1}}, VOCAB_SIZE, contract=contract)
        unscored = dataclasses.replace(batch, old_logprob_sl=None, keep_old_sl=None)
        messages.append(message_of(worker.prepare, unscored))
        messages.append(message_of(worker.prepare, batch))
        messages.append(message_of(worker.train_step, batch))
        messages.append(message_of(worker.reference_logprobs, batch))
        messages.append(message_of(worker.save, "/tmp"))
        for averages in (False, None):
            contract = LossContract(averages=averages)
            worker = GuestWorker(in_ddp(stage), objective(1), VOCAB_SIZE, contract=contract)
            messages.append(message_of(check_loss_scale, worker.scale_probe()))
    return messages


def test_what_the_job_has_to_change_is_named_on_every_rank(batch):
    wanted = [message for _, _, message in REFUSED]
    wanted.append(
        "2 data- x context-parallel ranks. Pass the wrapped model, or contract=LossContract(averages"
    )
    wanted += ["the batch has none: score the batch", "reads reference logprobs, and the batch has none"]
    wanted += ["given no optimizer", "given no reference policy", "belongs to your job"]
    # The self-test of a job whose contract is wrong about Megatron's average over two replicas, and right.
    wanted += ["gradients are 0.5 times what the loss says", "went through"]
    for messages in run_ranks(run_refused, 4, batch):
        assert len(messages) == len(wanted)
        for message, part in zip(messages, wanted, strict=True):
            assert part in message
