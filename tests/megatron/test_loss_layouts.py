"""The loss family through the real worker: one rank equals the float64 oracle, parameters included, and every
layout equals one rank.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import pytest
import torch

from rlcore.batch import StepResult, TrainBatch
from rlcore.config import RunConfig, load_run_config, to_plain
from rlcore.ops.reference import reference_logprob, reference_replay
from tests.loss_oracle import Outcome, Scores, step_in_one_piece
from tests.megatron.layout_cases import (
    LAYOUTS,
    LENGTH,
    NUM_SEQUENCES,
    TOLERANCE,
    assert_same,
    assert_same_metrics,
    make_config,
    train_on_rank,
    with_kept_ids,
)
from tests.rank_pool import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]

GSPO: dict[str, Any] = {"policy": "gspo", "aggregation": "seq_mean_token_mean", "ratio_clip_c": 3.0}
ICEPOP: dict[str, Any] = {"correction": "icepop", "low": 0.8, "high": 1.25}
SEQ_MASK_TIS: dict[str, Any] = {"correction": "seq_mask_tis", "low": 0.7, "high": 1.4, "cap": 1.5}
SKIPPED: dict[str, Any] = {
    "policy": "on_policy",
    "ratio_clip_max": 0.2,
    "old_logprobs": "skip",
    "actor_denominator": "valid",
}

# name -> (loss section, importance section)
OBJECTIVES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gspo": ({**GSPO, "ratio_clip_min": 0.1, "ratio_clip_max": 0.1}, {}),
    "cispo": ({"policy": "cispo"}, {"correction": "tis", "cap": 1.05}),
    "dual_clip_fixed": ({"ratio_clip_c": 1.5, "aggregation": "fixed_length", "fixed_length": 16}, {}),
    "on_policy_skipped": ({**SKIPPED, "kl_coef": 0.1, "aggregation": "seq_mean_token_mean"}, {}),
    "exact": ({"actor_denominator": "retained_exact", "entropy_coef": 0.1}, ICEPOP),
    "seq_sum_icepop": ({"aggregation": "seq_mean_token_sum"}, {**ICEPOP, "sequence_error_max": 1.6}),
    "seq_mask_kl_k2": ({"kl_coef": 0.2, "kl_type": "k2", "kl_gradient": "plain"}, SEQ_MASK_TIS),
    "entropy_nll": ({"entropy_coef": 0.1, "positive_nll_coef": 0.5}, {}),
    # Under the ids that the sampler kept, whatever the trainer's own support is.
    "replay": ({"kl_coef": 0.2, "entropy_coef": 0.1}, {}),
}

# objective -> (layout, microbatches): each kind of cut meets each kind of loss; see `test_every_pair`.
PAIRS = {
    "gspo": [("tp2pp2+sp+fused", 2), ("pp2dp2", 4)],
    "cispo": [("tp2pp2+sp+fused", 4), ("dp2", 2)],
    "dual_clip_fixed": [("tp2pp2", 4), ("dp2", 4)],
    "on_policy_skipped": [("pp2dp2", 2), ("tp2pp2+sp+fused", 1)],
    "exact": [("pp2dp2", 4), ("tp2pp2+sp+fused", 4), ("dp2", 2)],
    "seq_sum_icepop": [("tp2pp2", 2), ("pp2dp2", 4)],
    "seq_mask_kl_k2": [("pp2dp2", 2), ("tp2pp2+sp+fused", 2)],
    "entropy_nll": [("tp2pp2+sp+fused", 4), ("dp2", 4)],
    "replay": [("tp2pp2", 2), ("tp2pp2+sp+packed", 4), ("pp2dp2+packed", 2), ("tp2pp2+sp+fused", 4)],
}


def config_of(name: str, layout: str, num_microbatches: int) -> RunConfig:
    """The layout tests' run with another objective, and fused chunks that end inside rows."""
    plain = to_plain(make_config(layout, num_microbatches))
    loss, importance = OBJECTIVES[name]
    plain["loss"] |= loss
    plain["importance"] |= importance
    plain["model"]["fused_head_tokens"] = 20
    plain["sampling"]["support"] = "replay" if name == "replay" else "recompute"
    return load_run_config(plain)


def batch_of(name: str, batch: TrainBatch) -> TrainBatch:
    """The layout tests' batch with a sampler that differs a little, far, or cannot draw the token at all."""
    if name == "replay":
        batch = with_kept_ids(batch)
    if OBJECTIVES[name][0].get("old_logprobs") == "skip":
        return dataclasses.replace(batch, old_logprob_sl=None, keep_old_sl=None, old_log_mass_sl=None)
    generator = torch.Generator().manual_seed(8)
    noise_sl = torch.randn(NUM_SEQUENCES, LENGTH, generator=generator)
    far_sl = torch.rand(NUM_SEQUENCES, LENGTH, generator=generator) < 0.1
    scale_s = torch.tensor([0.1, 0.5, 0.2, 0.3, 0.1, 0.6, 0.2, 0.2])[:, None]
    assert batch.old_logprob_sl is not None and batch.keep_old_sl is not None
    sampler_sl = batch.old_logprob_sl + noise_sl * torch.where(far_sl, 2.0, scale_s)
    return dataclasses.replace(
        batch, sampler_logprob_sl=torch.where(batch.keep_old_sl, sampler_sl, -math.inf)
    )


def _reference(logits_tv, batch, spec):
    """The reference's scores of every token that something predicts, under the sampler's kept ids where the
    batch has them.
    """
    target_t, mask = batch.ids_sl[:, 1:].flatten(), batch.sampling_mask
    if mask is None:
        return reference_logprob(logits_tv, target_t, spec)
    bounds = mask.offsets.tolist()
    lists = [mask.token_ids[start:stop].tolist() for start, stop in itertools.pairwise(bounds)]
    by_row = [lists[row * LENGTH : (row + 1) * LENGTH] for row in range(NUM_SEQUENCES)]
    return reference_replay(logits_tv, target_t, spec, [kept for row in by_row for kept in row[1:]])


def _oracle_on_rank(rank, world_size, config, batch):
    """The oracle's step on this worker's scores, and its gradients by parameter: through the reference op on
    this worker's logits, and the model's own backward.
    """
    from megatron_worker.chunks import unwrap
    from megatron_worker.worker import MegatronWorker
    from tests.megatron.layout_cases import weights_by_name

    worker = MegatronWorker(config)
    try:
        scored = worker.logprobs(batch)
        model = unwrap(worker.model)
        position_sl = torch.arange(LENGTH).expand(NUM_SEQUENCES, LENGTH)
        logits = model(batch.ids_sl, position_sl, None)[..., : worker.arch.vocab_size]
        tokens = _reference(logits[:, :-1].flatten(0, 1), batch, worker.spec)

        def of(value_t):
            """Token-aligned; the first column, which nothing predicts, repeats the second."""
            value_sl = value_t.view(NUM_SEQUENCES, LENGTH - 1)
            return torch.cat([value_sl[:, :1], value_sl], dim=1)

        scores = Scores(
            logprob_sl=scored.logprob_sl,
            unfiltered_sl=of(tokens.unfiltered_logprob_t),
            keep_sl=scored.keep_sl,
            log_mass_sl=scored.log_mass_sl,
            num_kept_sl=of(tokens.num_kept_t),
            entropy_sl=of(tokens.entropy_t),
            unfiltered_entropy_sl=of(tokens.unfiltered_entropy_t),
        )
        outcome = step_in_one_piece(batch, scores, config.loss, config.importance, worker.spec.truncates)
        surrogate = torch.zeros((), dtype=torch.float64)
        for field, key in (
            ("logprob", "logprob"),
            ("unfiltered_logprob", "unfiltered"),
            ("entropy", "entropy"),
        ):
            slope_t = outcome.gradients[key][:, 1:].flatten()
            counts_t = slope_t != 0
            surrogate = surrogate + (getattr(tokens, f"{field}_t")[counts_t] * slope_t[counts_t]).sum()
        parameters = list(worker.model.parameters())
        gradients = torch.autograd.grad(surrogate, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.data.copy_(gradient)
        return outcome, weights_by_name(worker)
    finally:
        worker.close()


@pytest.fixture(scope="module")
def one_rank(batch):
    """Result and gradients of an objective on one rank and in one microbatch, each run once."""

    @functools.cache
    def run(name: str) -> tuple[StepResult, dict[str, torch.Tensor]]:
        given = (config_of(name, "tp1", 1), batch_of(name, batch))
        ((result, gradients, _),) = run_ranks(train_on_rank, 1, *given)
        return result, gradients

    return run


@pytest.mark.parametrize("name", OBJECTIVES)
def test_one_rank_equals_the_float64_oracle(name, batch, one_rank):
    """Loss, every metric, and the gradient of every parameter."""
    result, gradients = one_rank(name)
    outcome: Outcome
    ((outcome, expected),) = run_ranks(_oracle_on_rank, 1, config_of(name, "tp1", 1), batch_of(name, batch))
    assert result.stepped
    own = {"optimizer/grad_norm", "optimizer/lr"}
    rest = {key for key in result.metrics if "quantile" not in key} - own
    assert sorted(rest) == sorted(outcome.metrics)
    for key, value in outcome.metrics.items():
        assert result.metrics[key] == pytest.approx(value, abs=TOLERANCE, rel=TOLERANCE), key
    assert_same(gradients, expected, name)
    assert max(float(value.abs().max()) for value in expected.values()) > 1e-4, "a gradient to speak of"


def check_layout(name: str, layout: str, num_microbatches: int, batch: TrainBatch, one_rank: Any) -> None:
    config = config_of(name, layout, num_microbatches)
    expected, gradients = one_rank(name)
    hint = (name, layout, num_microbatches)
    for result, ours, _ in run_ranks(train_on_rank, LAYOUTS[layout][0], config, batch_of(name, batch)):
        assert_same_metrics(result, expected, hint)
        assert_same(ours, gradients, hint)


@pytest.mark.parametrize(
    ("name", "layout", "num_microbatches"),
    [(name, *pair) for name, pairs in PAIRS.items() for pair in pairs],
)
def test_an_objective_does_not_depend_on_the_layout(name, layout, num_microbatches, batch, one_rank):
    check_layout(name, layout, num_microbatches, batch, one_rank)


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("layout", ["tp1+fused", "tp2pp2", "pp2dp2", "dp2", "tp2pp2+sp+fused"])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_every_pair(name, layout, num_microbatches, batch, one_rank):
    check_layout(name, layout, num_microbatches, batch, one_rank)


def test_the_objectives_meet_what_they_are_about(one_rank):
    """Every bound, filter and term of the table acts on this batch."""
    metrics = {name: one_rank(name)[0].metrics for name in OBJECTIVES}
    for name in ("gspo", "cispo", "dual_clip_fixed"):
        assert metrics[name]["ratio/clipped_low"] > 0 and metrics[name]["ratio/clipped_high"] > 0, name
    assert 0 < metrics["exact"]["tokens/dropped_importance"] < metrics["exact"]["tokens/retained"]
    assert metrics["exact"]["tokens/trained"] < metrics["exact"]["tokens/retained"]
    assert metrics["seq_sum_icepop"]["tokens/dropped_sequence"] > 0
    assert metrics["seq_sum_icepop"]["tokens/dropped_importance"] > 0
    assert metrics["seq_mask_kl_k2"]["tokens/dropped_importance"] > 0
    assert metrics["seq_mask_kl_k2"]["kl/reference"] > 1e-3
    assert metrics["cispo"]["importance/weight"] < metrics["cispo"]["importance/raw_mean"]
    assert metrics["entropy_nll"]["loss/entropy"] < 0 < metrics["entropy_nll"]["loss/positive_nll"]
    assert metrics["on_policy_skipped"]["tokens/dropped_keep_old"] == 0
