"""A step under the sampler's kept ids, and one with its logprobs as the old ones, through the real worker:
scores and gradients equal a float64 reference in padded, packed and fused layouts.
"""

from __future__ import annotations

import dataclasses
import math
from unittest import mock

import pytest
import torch

from rlcore.batch import TrainBatch
from rlcore.config import RunConfig, load_run_config, to_plain
from rlcore.ops.reference import support_weights
from rlcore.sampling_mask import SamplingMask
from tests.megatron.layout_cases import (
    LAYOUTS,
    LENGTH,
    NUM_SEQUENCES,
    TOLERANCE,
    assert_same,
    assert_same_metrics,
    make_batch,
    make_config,
    reference_scores,
    reference_step,
    share,
    with_kept_ids,
)
from tests.rank_pool import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]

# (layout, microbatches a data-parallel rank): padded, packed, sequences cut over CP, the fused head.
CUTS = [
    ("tp2pp2+sp", 4),
    ("tp2pp2+sp+packed", 2),
    ("dp2cp2", 2),
    ("tp2cp2+sp+fused", 2),
    ("tp2pp2+sp+fused", 2),
]


def config_of(layout: str, num_microbatches: int, support: str, **loss) -> RunConfig:
    """The layout tests' run; chunks of a fused head end inside rows."""
    plain = to_plain(make_config(layout, num_microbatches, kl_coef=0.1, **loss))
    plain["sampling"]["support"] = support
    plain["model"]["fused_head_tokens"] = 5
    return load_run_config(plain)


def with_lists(batch: TrainBatch, lists: dict[tuple[int, int], list[int]]) -> TrainBatch:
    """These kept ids by (sample, position), nothing elsewhere."""
    places = [(row, position) for row in range(NUM_SEQUENCES) for position in range(LENGTH)]
    mask = SamplingMask.from_lists([lists.get(place, []) for place in places])
    return dataclasses.replace(batch, sampling_mask=mask)


def scored_and_trained(rank, world_size, config, plain, trained):
    """Scores of one batch, then a step on another: scores, result, gradients by HF name."""
    from megatron_worker.worker import MegatronWorker
    from tests.megatron.layout_cases import gradients_by_name

    worker = MegatronWorker(config)
    try:
        where = (worker.groups.dp_rank, worker.groups.dp_size)
        scores = worker.logprobs(share(plain, *where))
        result = worker.train_step(share(trained, *where))
        return where, scores, result, gradients_by_name(worker)
    finally:
        worker.close()


def shifted_and_trained(rank, world_size, config, plain, trained):
    """The same with every token's kept ids taken from the token before it."""
    from megatron_worker import microbatches, packed_microbatches

    right = microbatches.mask_rows

    def planted(batch):
        row_sl = right(batch)
        return None if row_sl is None else row_sl.roll(1, 1)

    with (
        mock.patch.object(microbatches, "mask_rows", planted),
        mock.patch.object(packed_microbatches, "mask_rows", planted),
    ):
        return scored_and_trained(rank, world_size, config, plain, trained)


def _save(rank, world_size, config, path):
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        worker.save(path)
    finally:
        worker.close()
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Folder with the seed's policy."""
    folder = tmp_path_factory.mktemp("policy")
    return run_ranks(_save, 1, make_config("tp1", 1), str(folder / "policy"))[0]


@pytest.fixture(scope="module")
def logits_slv(path):
    """float64 logits that predict the token after each position, without gradient."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)(make_batch().ids_sl).logits


@pytest.fixture(scope="module")
def own_supports(logits_slv):
    """The trainer's own support of each response token, by (sample, position)."""
    batch, spec = make_batch(), make_config("tp1", 1).sampling.spec()
    return {
        (row, position): support_weights(logits_slv[row, position - 1] / spec.temperature, spec)
        .nonzero()
        .flatten()
        .tolist()
        for row, position in batch.token_mask_sl.nonzero().tolist()
    }


@pytest.fixture(scope="module")
def replayed(batch, path, logits_slv):
    """Batches to score and to train on, and what the float64 reference says of both under the kept ids."""
    config = config_of("tp1", 1, "replay")
    plain, trained = with_kept_ids(make_batch()), with_kept_ids(batch)
    expected_sl = torch.zeros(NUM_SEQUENCES, LENGTH, dtype=torch.float64)
    mass_sl = torch.zeros_like(expected_sl)
    for row in range(NUM_SEQUENCES):
        length = int(plain.length_s[row])
        scores = reference_scores(logits_slv[row, : length - 1], plain, row, config)
        expected_sl[row, 1:length] = scores.logprob_t
        mass_sl[row, 1:length] = scores.log_mass_t
    return plain, trained, (expected_sl, mass_sl), reference_step(config, trained, path)


def assert_replayed(outcome, replayed, hint):
    """One rank's scores and step are the reference's."""
    (dp_rank, dp_size), scores, result, gradients = outcome
    plain, _, (expected_sl, mass_sl), (loss, expected, retained) = replayed
    rows = slice(dp_rank * NUM_SEQUENCES // dp_size, (dp_rank + 1) * NUM_SEQUENCES // dp_size)
    response_sl = plain.token_mask_sl[rows]
    assert bool(scores.keep_sl.all()), "the sampled token is always in"
    for ours_sl, wanted_sl in ((scores.logprob_sl, expected_sl), (scores.log_mass_sl, mass_sl)):
        assert torch.allclose(ours_sl[response_sl].double(), wanted_sl[rows][response_sl], atol=TOLERANCE), (
            hint
        )
    assert result.metrics["loss/total"] == pytest.approx(loss, abs=TOLERANCE), hint
    assert result.metrics["tokens/retained"] == retained and result.metrics["tokens/dropped_keep"] == 0
    assert_same({name: gradients[name] for name in expected}, expected, hint)


@pytest.mark.parametrize("layout, num_microbatches", CUTS)
def test_scores_and_gradients_are_those_of_the_kept_ids(layout, num_microbatches, replayed):
    """Hugging Face's model in float64, each token under the ids given for it."""
    config = config_of(layout, num_microbatches, "replay")
    given = (config, *replayed[:2])
    for outcome in run_ranks(scored_and_trained, LAYOUTS[layout][0], *given, timeout_s=60):
        assert_replayed(outcome, replayed, layout)


@pytest.mark.parametrize("layout", ["tp1", "tp1+packed"])
def test_kept_ids_of_a_neighbour_are_noticed(layout, replayed):
    """The comparison above fails when every token reads the row before its own."""
    given = (config_of(layout, 2, "replay"), *replayed[:2])
    (outcome,) = run_ranks(shifted_and_trained, 1, *given)
    with pytest.raises(AssertionError):
        assert_replayed(outcome, replayed, layout)


@pytest.mark.parametrize("layout", ["tp2pp2+sp", "tp2cp2+sp+fused"])
def test_replaying_the_own_support_is_recomputing(layout, batch, own_supports):
    """To 1e-6, where the search keeps the token: one that it drops is in the sampler's support."""
    outcomes = {}
    for support in ("recompute", "replay"):
        config = config_of(layout, 2, support)
        plain = with_lists(make_batch(), own_supports)
        keep_sl = batch.keep_old_sl
        for row, position in batch.token_mask_sl.nonzero().tolist():
            if int(batch.ids_sl[row, position]) not in own_supports[row, position]:
                keep_sl = keep_sl.index_put((torch.tensor(row), torch.tensor(position)), torch.tensor(False))
        old_sl = torch.where(keep_sl, batch.old_logprob_sl, -math.inf)
        trained = dataclasses.replace(
            batch, keep_old_sl=keep_sl, old_logprob_sl=old_sl, sampling_mask=plain.sampling_mask
        )
        outcomes[support] = run_ranks(scored_and_trained, LAYOUTS[layout][0], config, plain, trained)
    for (_, ours, result, gradients), (_, expected, expected_result, expected_gradients) in zip(
        outcomes["replay"], outcomes["recompute"], strict=True
    ):
        kept_sl = expected.keep_sl & make_batch().token_mask_sl
        assert 20 < int(kept_sl.sum()) < int(make_batch().token_mask_sl.sum())
        assert torch.allclose(ours.logprob_sl[kept_sl], expected.logprob_sl[kept_sl], atol=1e-6)
        assert torch.allclose(ours.log_mass_sl[kept_sl], expected.log_mass_sl[kept_sl], atol=1e-6)
        assert result.metrics["loss/total"] == pytest.approx(expected_result.metrics["loss/total"], abs=1e-6)
        for name, value in expected_gradients.items():
            assert torch.allclose(gradients[name], value, atol=1e-6), name


def test_recompute_reads_no_kept_ids(batch):
    """A mask that is there costs nothing and changes no bit."""
    config = config_of("tp2pp2", 2, "recompute")
    with_mask = (with_kept_ids(make_batch()), with_kept_ids(batch))
    outcomes = [run_ranks(_untouched, 4, config, *given) for given in (with_mask, (make_batch(), batch))]
    for ours, expected in zip(*outcomes, strict=True):
        for value, wanted in zip(ours, expected, strict=True):
            assert torch.equal(value, wanted)


def _untouched(rank, world_size, config, plain, trained):
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        assert all(microbatch.sampling_mask is None for microbatch in worker.prepare(trained).microbatches)
        with mock.patch.object(SamplingMask, "select", side_effect=AssertionError("kept ids were read")):
            return worker.logprobs(plain).logprob_sl, worker.reference_logprobs(plain)
    finally:
        worker.close()


@pytest.mark.parametrize("layout", ["pp2dp2", "tp2cp2+sp"])
def test_the_samplers_logprobs_as_old_ones(layout, batch):
    """Not those of the batch, and no scoring pass; -inf and NaN leave through keep_old and are counted."""
    noise_sl = torch.randn(NUM_SEQUENCES, LENGTH, generator=torch.Generator().manual_seed(3)) * 0.3
    sampler_sl = torch.where(batch.token_mask_sl, -2.5 + noise_sl, 0.0)
    lost = (batch.token_mask_sl & batch.sample_mask_s[:, None]).nonzero()[[1, 4, 9]]
    for (row, position), value in zip(lost.tolist(), (math.nan, -math.inf, math.nan), strict=True):
        sampler_sl[row, position] = value
    given = dataclasses.replace(batch, sampler_logprob_sl=sampler_sl, keep_old_sl=None, old_logprob_sl=None)
    finite_sl = torch.isfinite(sampler_sl)
    by_hand = dataclasses.replace(
        batch, old_logprob_sl=torch.where(finite_sl, sampler_sl, -math.inf), keep_old_sl=finite_sl
    )
    config = config_of(layout, 2, "recompute", old_logprobs="sampler")
    expected = run_ranks(scored_and_trained, 1, config_of("tp1", 1, "recompute"), by_hand, by_hand)[0]
    assert expected[2].metrics["tokens/dropped_keep_old"] == 3
    for _, _, result, gradients in run_ranks(scored_and_trained, 4, config, given, given, timeout_s=60):
        assert_same_metrics(result, expected[2], layout)
        assert_same(gradients, expected[3], layout)
