"""Models with experts: equal to transformers' Mixtral in float64, and the same in every layout."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from rlcore.batch import TrainBatch
from tests.megatron.expert_cases import (
    EXPERT_LAYOUTS,
    MARGIN,
    by_folder_names,
    expert_config,
    margin_on_rank,
    mixtral_folder,
)
from tests.megatron.layout_cases import (
    BUDGETS,
    TOLERANCE,
    assert_same,
    assert_same_metrics,
    gradients_by_name,
    make_batch,
    perturbed,
    reference_step,
    score_on_rank,
    share,
    train_on_rank,
)
from tests.rank_pool import run_ranks

# Transformers' default way through the experts takes no float64.
EAGER = {"experts_implementation": "eager"}

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return mixtral_folder(tmp_path_factory.mktemp("mixtral") / "policy")


@pytest.fixture(scope="module")
def expert_batch(folder):
    """The layout tests' batch with old logprobs near this model's, and its scores on one rank."""
    plain = make_batch()
    (scores,) = run_ranks(score_on_rank, 1, expert_config("alone", hf_path=folder), plain)
    return perturbed(plain, scores), scores


@pytest.fixture(scope="module")
def alone(folder, expert_batch):
    """Result, gradients and weights of one step on one rank."""
    config = expert_config("alone", hf_path=folder, kl_coef=0.1)
    ((result, gradients, weights),) = run_ranks(train_on_rank, 1, config, expert_batch[0])
    return result, gradients, weights


def test_no_token_is_near_a_tie_and_no_expert_is_idle(folder, expert_batch):
    """Otherwise rounding could explain a difference, or an expert's gradient would compare nothing."""
    margin, counts = run_ranks(margin_on_rank, 1, expert_config("alone", hf_path=folder), expert_batch[0])[0]
    assert margin > MARGIN
    assert all(number > 0 for layer in counts for number in layer), counts


def test_logprobs_equal_transformers_in_float64(folder, expert_batch):
    """Padded rows, no truncation: what a token's own logits say."""
    from transformers import AutoModelForCausalLM

    from rlcore.ops.reference import reference_logprob

    batch, scores = expert_batch
    spec = expert_config("alone").sampling.spec()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **EAGER)
    for row, length in enumerate(batch.length_s.tolist()):
        with torch.no_grad():
            logits = model(batch.ids_sl[row : row + 1, : length - 1]).logits[0]
        expected = reference_logprob(logits, batch.ids_sl[row, 1:length], spec)
        assert torch.equal(scores.keep_sl[row, 1:length], expected.keep_t)
        kept = expected.keep_t
        difference = scores.logprob_sl[row, 1:length].double() - expected.logprob_t
        assert float(difference[kept].abs().max()) < 1e-5
        assert float((scores.log_mass_sl[row, 1:length] - expected.log_mass_t).abs().max()) < 1e-5


def test_gradients_equal_transformers_in_float64(folder, expert_batch, alone):
    """Router, experts, norms and the rest, through the loss, to 1e-4 of each one's largest entry."""
    config = expert_config("alone", hf_path=folder, kl_coef=0.1)
    loss, expected, retained = reference_step(config, expert_batch[0], folder, **EAGER)
    result, gradients, _ = alone
    assert result.metrics["loss/total"] == pytest.approx(loss, abs=TOLERANCE)
    assert result.metrics["tokens/retained"] == retained
    named = by_folder_names(expected)
    assert sorted(named) == sorted(gradients)
    for name, value in named.items():
        assert float((gradients[name] - value).abs().max()) <= 1e-4 * float(value.abs().max()), name
    norm = torch.stack([value.double().norm() for value in named.values()]).norm()
    assert result.metrics["optimizer/grad_norm"] == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.parametrize("layout", [name for name in EXPERT_LAYOUTS if name != "alone"])
def test_the_step_does_not_depend_on_the_layout(layout, folder, expert_batch, alone):
    """Loss, gradient norm and every other metric, and the gradient of every parameter, experts included."""
    config = expert_config(layout, 2, hf_path=folder, kl_coef=0.1)
    result, gradients, weights = alone
    for ours, own, moved in run_ranks(train_on_rank, EXPERT_LAYOUTS[layout][0], config, expert_batch[0]):
        assert_same_metrics(ours, result, layout)
        if "distopt" not in layout:
            assert_same(own, gradients, layout)
        for name, value in weights.items():
            # Adam divides by the gradient's size: entries whose gradient is clear of rounding only.
            clear = gradients[name].abs() > 1e-5
            assert torch.allclose(moved[name][clear], value[clear], atol=1e-5), (layout, name)


@pytest.mark.parametrize("layout", ["tp2ep2", "cp2dp2ep4"])
def test_scores_do_not_depend_on_the_layout(layout, folder, expert_batch):
    batch, expected = expert_batch
    config = expert_config(layout, 2, hf_path=folder)
    world_size, parallel = EXPERT_LAYOUTS[layout]
    for rank, ours in enumerate(run_ranks(score_on_rank, world_size, config, batch)):
        dp_size = world_size // (parallel.get("tp", 1) * parallel.get("cp", 1))
        dp_rank = rank // (world_size // dp_size)
        own = share(batch, dp_rank, dp_size)
        count = own.ids_sl.shape[0]
        rows = slice(dp_rank * count, (dp_rank + 1) * count)
        assert torch.equal(ours.keep_sl, expected.keep_sl[rows])
        kept_sl = ours.keep_sl & own.token_mask_sl
        difference = (ours.logprob_sl - expected.logprob_sl[rows])[kept_sl]
        assert kept_sl.any() and float(difference.abs().max()) < 1e-5


def test_clipping_sees_the_norm_of_all_experts(folder, expert_batch, alone):
    """A step clipped to a hundredth moves weights as the clipped gradient of one rank does."""

    def clipped(layout):
        config = expert_config(layout, 1, hf_path=folder, kl_coef=0.1)
        # Adam's first step hides the gradient's scale unless epsilon is large beside it.
        optimizer = dataclasses.replace(config.optimizer, clip_grad=0.01, adam_eps=1.0, lr=1.0)
        return dataclasses.replace(config, optimizer=optimizer)

    ((_, _, expected),) = run_ranks(train_on_rank, 1, clipped("alone"), expert_batch[0])
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    for layout in ("ep2", "tp2ep2"):
        for _, _, weights in run_ranks(
            train_on_rank, EXPERT_LAYOUTS[layout][0], clipped(layout), expert_batch[0]
        ):
            moved = float((expected[name] - run_start(folder, name)).abs().max())
            assert moved > 1e-7
            for each, value in expected.items():
                assert float((weights[each] - value).abs().max()) < 1e-3 * moved + 3e-7, (layout, each)


def run_start(folder, name):
    from safetensors.torch import load_file

    return load_file(f"{folder}/model.safetensors")[name]


def guest_on_rank(rank, world_size, config, batch):
    """What a guest around an existing stage says, and its layout."""
    from megatron_worker.guest import GuestWorker
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        settings = {"sampling": {"temperature": 0.8, "top_k": 12, "top_p": 0.9}}
        settings["train"] = {"microbatch_size": 2}
        guest = GuestWorker(worker.model, settings, worker.arch.vocab_size)
        own = share(batch, worker.groups.dp_rank, worker.groups.dp_size)
        same = torch.equal(guest.logprobs(own).logprob_sl, worker.logprobs(own).logprob_sl)
        with pytest.raises(ValueError, match=r"parallel.ep=4, but this Megatron job runs with 2"):
            GuestWorker(worker.model, settings | {"parallel": {"ep": 4}}, worker.arch.vocab_size)
        return same, guest.config.parallel.ep
    finally:
        worker.close()


def test_a_guest_reads_the_expert_groups_of_its_job(folder, expert_batch):
    config = expert_config("ep2", 2, hf_path=folder)
    assert run_ranks(guest_on_rank, 2, config, expert_batch[0]) == [(True, 2)] * 2


def unequal_on_rank(rank, world_size, config, batch, cuts):
    """Scores and a step where each replica has another number of sequences."""
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        rows = cuts[worker.groups.dp_rank]
        given = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        cut: dict[str, Any] = {name: None if value is None else value[rows] for name, value in given.items()}
        own = TrainBatch(**cut)
        scores = worker.logprobs(own)
        return rows, scores, worker.train_step(own), gradients_by_name(worker)
    finally:
        worker.close()


@pytest.mark.parametrize("packed", [False, True])
def test_replicas_with_unequal_numbers_of_sequences_do_not_wait_for_each_other(
    packed, folder, expert_batch, alone
):
    """Six sequences against two, in microbatches of two: three and one, and the others' tokens need the
    experts of the one that has no more."""
    batch, expected = expert_batch
    config = expert_config("ep2", 2, hf_path=folder, kl_coef=0.1)
    budget = BUDGETS[4] if packed else None
    train = dataclasses.replace(config.train, microbatch_size=2, token_budget=budget)
    config = dataclasses.replace(config, train=train)
    cuts = [slice(0, 6), slice(6, 8)]
    for rows, scores, result, gradients in run_ranks(unequal_on_rank, 2, config, batch, cuts, timeout_s=60):
        assert torch.equal(scores.keep_sl, expected.keep_sl[rows])
        kept_sl = scores.keep_sl & batch.token_mask_sl[rows]
        difference = (scores.logprob_sl - expected.logprob_sl[rows])[kept_sl]
        assert kept_sl.any() and float(difference.abs().max()) < 1e-5
        assert_same_metrics(result, alone[0], packed)
        assert_same(gradients, alone[1], packed)
