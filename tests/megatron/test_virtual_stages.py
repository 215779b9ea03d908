"""Virtual pipeline stages: every rank holds two pieces of the model, and no number shows it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from rlcore.config import RunConfig
from tests.megatron.layout_cases import (
    LAYOUTS,
    TOLERANCE,
    assert_same,
    assert_same_metrics,
    gradients_by_name,
    make_batch,
    make_config,
    perturbed,
    share,
    weights_by_name,
)
from tests.rank_pool import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]

NUM_LAYERS, NUM_STEPS = 4, 2
# Of weights that a step moves by up to 1e-2, and attention's tiny gradients by 1e-4. The optimizer's epsilon
# is large: with a small one first steps are the gradient's sign, which rounding decides where it is near 0.
WEIGHT_TOLERANCE = 1e-6


def vpp_config(layout: str, num_microbatches: int, vpp: int = 2, *, tied: bool = True, **loss) -> RunConfig:
    """The layout tests' config with four layers and `vpp` virtual stages."""
    config = make_config(layout, num_microbatches, **{"kl_coef": 0.1, **loss})
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, num_layers=NUM_LAYERS, tie_word_embeddings=tied),
        parallel=dataclasses.replace(config.parallel, vpp=vpp),
        optimizer=dataclasses.replace(config.optimizer, lr=1e-2, adam_eps=1e-2),
    )


def work_on_rank(rank, world_size, config, batch):
    """Scores of policy and reference, the first step with its gradients, and the weights after the last."""
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        own = share(batch, worker.groups.dp_rank, worker.groups.dp_size)
        scores, reference_sl = worker.logprobs(own), worker.reference_logprobs(own)
        first = worker.train_step(own)
        gradients = gradients_by_name(worker)
        for _ in range(NUM_STEPS - 1):
            assert worker.train_step(own).stepped
        layers = [len(chunk.module.decoder.layers) for chunk in worker.chunks]
        places = (worker.groups.dp_rank, worker.groups.dp_size)
        return scores, reference_sl, first, gradients, weights_by_name(worker), layers, places
    finally:
        worker.close()


def alone(batch, tied, **loss):
    """One rank's answer."""
    return run_ranks(work_on_rank, 1, vpp_config("tp1", 1, vpp=1, tied=tied, **loss), batch)[0]


@pytest.fixture(scope="module")
def vpp_batch():
    """The layout tests' batch with old logprobs of the model of four layers."""
    from tests.megatron.layout_cases import score_on_rank

    plain = make_batch()
    (scores,) = run_ranks(score_on_rank, 1, vpp_config("tp1", 1, vpp=1), plain)
    return perturbed(plain, scores)


@pytest.fixture(scope="module")
def answers(vpp_batch):
    """One rank's answer with a tied and an untied head."""
    return {tied: alone(vpp_batch, tied) for tied in (True, False)}


def check_work(outcomes, expected, hint):
    scores, reference_sl, first, gradients, weights, _, _ = expected
    for own_scores, own_reference_sl, result, own_gradients, own_weights, layers, place in outcomes:
        assert layers == [1, 1], "two pieces of one layer each"
        dp_rank, dp_size = place
        count = scores.keep_sl.shape[0] // dp_size
        rows = slice(dp_rank * count, (dp_rank + 1) * count)
        keep_sl = scores.keep_sl[rows]
        assert torch.equal(own_scores.keep_sl, keep_sl), hint
        gap_sl = (own_scores.logprob_sl - scores.logprob_sl[rows])[keep_sl]
        assert float(gap_sl.abs().max()) < TOLERANCE, hint
        assert torch.allclose(own_scores.log_mass_sl, scores.log_mass_sl[rows], atol=TOLERANCE), hint
        assert torch.allclose(own_reference_sl, reference_sl[rows], atol=TOLERANCE), hint
        assert_same_metrics(result, first, hint)
        assert_same(own_gradients, gradients, hint)
        for name, value in weights.items():
            distance = float((own_weights[name] - value).abs().max())
            assert distance <= WEIGHT_TOLERANCE, (hint, name, distance)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("layout", "num_microbatches"),
    [
        ("pp2", 2),
        ("pp2", 4),
        ("pp2dp2", 2),
        ("tp2pp2", 2),
        ("tp2pp2+sp+fused", 4),
        ("tp2pp2+sp+packed", 4),
        ("pp2dp2+packed", 2),
        ("pp2cp2", 2),
    ],
)
def test_scores_gradients_metrics_and_weights_equal_one_rank(
    layout, num_microbatches, tied, vpp_batch, answers
):
    config = vpp_config(layout, num_microbatches, tied=tied)
    outcomes = run_ranks(work_on_rank, LAYOUTS[layout][0], config, vpp_batch)
    check_work(outcomes, answers[tied], (layout, num_microbatches, tied))


def test_microbatches_that_do_not_fill_a_group_get_fillers(vpp_batch, answers):
    """Three microbatches of three, three and two sequences become four: scores, loss and gradients stay."""
    config = vpp_config("pp2", 2)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, microbatch_size=3))
    check_work(run_ranks(work_on_rank, 2, config, vpp_batch), answers[True], "fillers")


def test_a_denominator_counted_by_the_schedule(vpp_batch):
    """Megatron's per-token regime: the last chunk's counts reach the gradients of every chunk."""
    loss = {"kl_coef": 0.0, "actor_denominator": "retained_exact"}
    for layout in ("pp2dp2", "tp2pp2+sp"):
        config = vpp_config(layout, 2, **loss)
        outcomes = run_ranks(step_on_rank, 4, config, vpp_batch)
        ((expected, gradients),) = run_ranks(step_on_rank, 1, vpp_config("tp1", 1, vpp=1, **loss), vpp_batch)
        for result, own_gradients in outcomes:
            assert_same_metrics(result, expected, layout)
            assert_same(own_gradients, gradients, layout)


def step_on_rank(rank, world_size, config, batch):
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        result = worker.train_step(share(batch, worker.groups.dp_rank, worker.groups.dp_size))
        return result, gradients_by_name(worker)
    finally:
        worker.close()


def factors_on_rank(rank, world_size, config):
    from megatron_worker.loss_scale import measure_loss_scale
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        probe = worker.scale_probe()
        return measure_loss_scale(probe), len(probe.data)
    finally:
        worker.close()


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("layout", ["tp2pp2+sp", "pp2dp2", "pp2cp2"])
def test_the_loss_scale_is_measured_on_every_chunk(layout, per_token):
    loss = {"kl_coef": 0.0, "actor_denominator": "retained_exact"} if per_token else {}
    for factors, count in run_ranks(factors_on_rank, 4, vpp_config(layout, 2, **loss)):
        assert count == (2 if layout == "tp2pp2+sp" else 4)
        assert factors == pytest.approx([1.0] * 4, abs=1e-6)


def scaled_chunk_on_rank(rank, world_size, config, faulty):
    """The factors where one chunk of the last stage's rank gets half of its gradients."""
    from megatron_worker.loss_scale import measure_loss_scale
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        if worker.groups.is_last_stage:
            for parameter in worker.chunks[faulty].parameters():
                parameter.register_hook(lambda grad: grad * 0.5)
        return measure_loss_scale(worker.scale_probe())
    finally:
        worker.close()


@pytest.mark.parametrize("faulty", [0, 1])
def test_a_wrong_scale_of_one_chunk_is_seen(faulty):
    for factors in run_ranks(scaled_chunk_on_rank, 2, vpp_config("pp2", 2), faulty):
        assert factors == pytest.approx([1.0, 0.5], abs=1e-6)


def broken_chunk_on_rank(rank, world_size, config, batch, broken):
    """Is a NaN in the gradient of one chunk refused, and are the weights untouched?"""
    from megatron_worker.chunks import parameters_of
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        if worker.groups.pp_rank == 0:
            parameter = list(worker.chunks[broken].parameters())[-1]
            parameter.register_hook(lambda grad: grad * float("nan"))
        before = [parameter.detach().clone() for parameter in parameters_of(worker.chunks)]
        result = worker.train_step(batch)
        assert result.refused and "NaN or inf in a gradient" in result.reason
        return all(map(torch.equal, before, parameters_of(worker.chunks)))
    finally:
        worker.close()


@pytest.mark.parametrize("broken", [0, 1])
def test_a_broken_gradient_of_any_chunk_is_refused(broken, vpp_batch):
    assert all(run_ranks(broken_chunk_on_rank, 2, vpp_config("pp2", 2), vpp_batch, broken, timeout_s=60))


def guest_on_rank(rank, world_size, config, batch):
    """A job's own chunks under a guest: scores, a step, gradients; gradients of the job's own schedule; and
    what is said of chunks that are missing or out of order.
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_worker.architecture import architecture_from_config
    from megatron_worker.cpu_backend import cpu_backend
    from megatron_worker.groups import destroy_parallel, initialize_parallel
    from megatron_worker.guest import GuestWorker
    from megatron_worker.hf_bridge import initialize_from_seed
    from megatron_worker.model_setup import build_chunks, wrap_ddp
    from megatron_worker.optimizer_setup import build_optimizer

    with cpu_backend("cpu"):
        groups = initialize_parallel(config.parallel, "cpu")
        try:
            arch = architecture_from_config(config.model, 0)
            bare = build_chunks(arch, config.parallel, "float32", groups)
            initialize_from_seed(bare, arch, config.seed, groups)
            chunks: list[Any] = [wrap_ddp(chunk, config.parallel) for chunk in bare]
            optimizer, scheduler = build_optimizer(chunks, config.optimizer, 3)
            chunks[0].config.finalize_model_grads_func = finalize_model_grads
            told = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, pp=1, vpp=1))
            size = config.model.vocab_size
            guest = GuestWorker(chunks, told, size, optimizer=optimizer, scheduler=scheduler, reference=bare)
            guest.arch = arch
            scores, reference_sl = guest.logprobs(batch), guest.reference_logprobs(batch)
            prepared = guest.prepare(batch)
            reports = get_forward_backward_func()(**prepared.schedule(), model=chunks, forward_only=False)
            assert guest.refusal(reports) is None
            by_hand = gradients_by_name(guest)
            result = guest.train_step(batch)
            said = []
            for wrong in (chunks[0], chunks[:1], chunks[::-1]):
                with pytest.raises(ValueError) as caught:
                    GuestWorker(wrong, told, size)
                said.append(str(caught.value))
            return scores, reference_sl, result, gradients_by_name(guest), by_hand, said
        finally:
            destroy_parallel()


def test_a_guest_takes_the_jobs_chunks(vpp_batch, answers):
    scores, reference_sl, first, gradients, _, _, _ = answers[True]
    outcomes = run_ranks(guest_on_rank, 4, vpp_config("tp2pp2", 2), vpp_batch)
    for own_scores, own_reference_sl, result, own_gradients, by_hand, said in outcomes:
        kept_sl = scores.keep_sl
        gap_sl = (own_scores.logprob_sl - scores.logprob_sl)[kept_sl]
        assert float(gap_sl.abs().max()) < TOLERANCE
        assert torch.allclose(own_reference_sl, reference_sl, atol=TOLERANCE)
        assert_same_metrics(result, first, "guest")
        assert_same(own_gradients, gradients, "guest")
        assert_same(by_hand, gradients, "by hand")
        assert all("Pass the list of all of this rank's chunks" in message for message in said)
