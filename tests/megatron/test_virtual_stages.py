"""Virtual pipeline stages: every rank holds two pieces of the model, and nothing that is computed shows it."""

from __future__ import annotations

import dataclasses

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


def vpp_config(layout: str, num_microbatches: int, vpp: int = 2, **values: object) -> RunConfig:
    """The layout tests' config with four layers and `vpp` virtual stages. `values`: `tied`, `lr`, loss keys."""
    tied, lr = bool(values.pop("tied", True)), values.pop("lr", 1e-3)
    config = make_config(layout, num_microbatches, **{"kl_coef": 0.1, **values})
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, num_layers=NUM_LAYERS, tie_word_embeddings=tied),
        parallel=dataclasses.replace(config.parallel, vpp=vpp),
        optimizer=dataclasses.replace(config.optimizer, lr=lr, adam_eps=1e-2),
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


def check_work(outcomes, expected, hint, gradients=True):
    scores, reference_sl, first, expected_gradients, weights, _, _ = expected
    for own_scores, own_reference_sl, result, own_gradients, own_weights, layers, (
        dp_rank,
        dp_size,
    ) in outcomes:
        assert layers == [1, 1], "two pieces of one layer each"
        count = scores.keep_sl.shape[0] // dp_size
        rows = slice(dp_rank * count, (dp_rank + 1) * count)
        keep_sl = scores.keep_sl[rows]
        assert torch.equal(own_scores.keep_sl, keep_sl), hint
        gap_sl = (own_scores.logprob_sl - scores.logprob_sl[rows])[keep_sl]
        assert float(gap_sl.abs().max()) < TOLERANCE, hint
        assert torch.allclose(own_scores.log_mass_sl, scores.log_mass_sl[rows], atol=TOLERANCE), hint
        assert torch.allclose(own_reference_sl, reference_sl[rows], atol=TOLERANCE), hint
        assert_same_metrics(result, first, hint)
        if gradients:
            assert_same(own_gradients, expected_gradients, hint)
        for name, value in weights.items():
            assert torch.allclose(own_weights[name], value, atol=TOLERANCE), (hint, name)


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
