"""What a train step promises besides its numbers: what it refuses, what it leaves alone, what it repeats."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from rlcore.config import ImportanceConfig
from rlcore.config_rules import check_run_config
from rlcore.masks import WHY_LEFT
from tests.megatron.layout_cases import (
    LAYOUTS,
    NUM_SEQUENCES,
    assert_same,
    gradients_by_name,
    make_batch,
    make_config,
    score_on_rank,
    share,
    train_on_rank,
    weights_by_name,
)
from tests.rank_pool import RankError, run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]


def test_an_unchanged_policy_has_ratio_one(batch):
    """Old logprobs of the same weights under top-k + top-p: ratio 1, and the loss is that of the advantages
    alone.
    """
    config = make_config("tp2pp2", 2)
    plain = make_batch()
    scores = run_ranks(score_on_rank, 4, config, plain)[0]
    unchanged = dataclasses.replace(plain, old_logprob_sl=scores.logprob_sl, keep_old_sl=scores.keep_sl)
    result = run_ranks(train_on_rank, 4, config, unchanged)[0][0]
    for name in ("ratio/mean", "ratio/min", "ratio/max"):
        assert result.metrics[name] == pytest.approx(1.0, abs=1e-5)
    counted = plain.token_mask_sl & plain.sample_mask_s[:, None] & scores.keep_sl
    assert result.metrics["loss/policy"] == pytest.approx(
        -float(plain.advantage_sl[counted].mean()), abs=1e-5
    )


@pytest.mark.parametrize("layout", ["tp1", "tp2pp2"])
@pytest.mark.parametrize("actor_denominator", ["retained", "valid"])
@pytest.mark.parametrize("dropped_by", ["keep_old", "keep"])
def test_b35_a_step_whose_tokens_were_all_dropped_moves_nothing(layout, actor_denominator, dropped_by, batch):
    """Known before the step (keep_old), or only by the current pass (targets outside its support)."""
    config = make_config(layout, 2, actor_denominator=actor_denominator)
    if dropped_by == "keep_old":
        dropped = dataclasses.replace(batch, keep_old_sl=torch.zeros_like(batch.keep_old_sl))
    else:
        config = dataclasses.replace(
            config, sampling=dataclasses.replace(config.sampling, top_k=1, top_p=None)
        )
        outside_sl = (
            ~run_ranks(score_on_rank, LAYOUTS[layout][0], config, batch)[0].keep_sl & batch.token_mask_sl
        )
        assert outside_sl.any()
        dropped = dataclasses.replace(
            batch,
            token_mask_sl=outside_sl,
            keep_old_sl=torch.ones_like(outside_sl),
            # A kept token has an old logprob.
            old_logprob_sl=batch.old_logprob_sl.clamp(min=-20.0),
        )
    expected = run_ranks(_initial_weights, 1, make_config("tp1", 1))[0]
    for result, _, weights in run_ranks(train_on_rank, LAYOUTS[layout][0], config, dropped):
        assert not result.stepped and result.reason
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def _several_steps(rank, world_size, config, batch, num_steps):
    """Learning rates, gradients of the last step, and the reference's scores before and after."""
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        mine = share(batch, worker.groups.dp_rank, worker.groups.dp_size)
        before = worker.reference_logprobs(mine)
        rates = [worker.train_step(mine).metrics["optimizer/lr"] for _ in range(num_steps)]
        return (
            rates,
            gradients_by_name(worker),
            before,
            worker.reference_logprobs(mine),
            worker.logprobs(mine),
        )
    finally:
        worker.close()


def test_gradients_start_from_zero_at_every_step(batch, baseline):
    """With a learning rate of 0 the third step repeats the first; leftovers would triple it."""
    config = make_config("tp2pp2", 2, kl_coef=0.1)
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, lr=0.0))
    _, gradients, _, _, _ = run_ranks(_several_steps, 4, config, batch, 3)[0]
    assert_same(gradients, baseline[1], "third step")


def test_the_reference_stays_at_the_initial_weights_and_is_never_truncated(batch):
    config = make_config("tp2pp2", 2, kl_coef=0.1)
    plain = dataclasses.replace(config.sampling, top_k=None, top_p=None)
    initial = run_ranks(score_on_rank, 4, dataclasses.replace(config, sampling=plain), batch)[0].logprob_sl
    mask_sl = batch.token_mask_sl
    for _, _, before, after, policy in run_ranks(_several_steps, 4, config, batch, 3):
        assert torch.allclose(before[mask_sl], initial[mask_sl], atol=1e-5)
        assert torch.equal(before, after)
        kept_sl = mask_sl & policy.keep_sl
        unfiltered_sl = policy.logprob_sl + policy.log_mass_sl
        assert float((unfiltered_sl - before)[kept_sl].abs().max()) > 1e-3, "the policy itself has moved"


def test_the_learning_rate_follows_the_schedule(batch):
    config = make_config("tp1", 1, kl_coef=0.1)
    optimizer = dataclasses.replace(
        config.optimizer, lr=1e-3, min_lr=1e-4, warmup_steps=2, decay_style="linear"
    )
    config = dataclasses.replace(
        config, optimizer=optimizer, train=dataclasses.replace(config.train, steps=5)
    )
    rates = run_ranks(_several_steps, 1, config, batch, 5)[0][0]
    # Two steps of warm-up from 0, then three of linear decay towards min_lr, which the step after the last
    # reaches.
    assert rates == pytest.approx([0.0, 5e-4, 1e-3, 7e-4, 4e-4])


def _break_gradient(rank, world_size, config, batch):
    """A gradient turns NaN on the first stage of the last replica although every loss is finite."""
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        groups = worker.groups
        if groups.pp_rank == 0 and groups.tp_rank == 0 and groups.dp_rank == groups.dp_size - 1:
            parameter = list(worker.model.parameters())[1]
            parameter.register_hook(lambda grad: grad * math.nan)
        before = [p.detach().clone() for p in worker.model.parameters()]
        result = worker.train_step(share(batch, groups.dp_rank, groups.dp_size))
        assert result.refused and not result.stepped and "NaN or inf in a gradient" in result.reason
        return all(torch.equal(a, b) for a, b in zip(before, worker.model.parameters(), strict=True))
    finally:
        worker.close()


@pytest.mark.parametrize("layout", ["tp1", "pp2dp2"])
def test_a_broken_gradient_under_a_finite_loss_is_refused_on_all_ranks(layout, batch):
    assert all(run_ranks(_break_gradient, LAYOUTS[layout][0], make_config(layout, 2), batch, timeout_s=60))


def test_the_retained_denominator_needs_keep_old(batch):
    with pytest.raises(RankError, match="actor_denominator=retained counts keep_old"):
        run_ranks(train_on_rank, 1, make_config("tp1", 1), dataclasses.replace(batch, keep_old_sl=None))


@pytest.mark.parametrize("layout", ["tp1", "pp2", "dp2"])
def test_b35_a_step_without_tokens_moves_nothing(layout, batch):
    """Momentum and weight decay would move weights although nothing was trained."""
    empty = dataclasses.replace(batch, sample_mask_s=torch.zeros(NUM_SEQUENCES).bool())
    config = make_config(layout, 2, kl_coef=0.1)
    expected = run_ranks(_initial_weights, 1, make_config("tp1", 1))[0]
    for result, _, weights in run_ranks(train_on_rank, LAYOUTS[layout][0], config, empty):
        assert not result.stepped and "no token" in result.reason
        counted = {name: value for name, value in result.metrics.items() if name in WHY_LEFT and value}
        assert counted == {
            "tokens/sample_masked": int(batch.token_mask_sl.sum()),
            "tokens/prompt": int((batch.length_s - 1).sum() - batch.token_mask_sl.sum()),
        }
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def _initial_weights(rank, world_size, config):
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        return weights_by_name(worker)
    finally:
        worker.close()


def _train_broken(rank, world_size, config, batch, where):
    """One step on a batch or a model that holds a NaN; returns the error and whether the weights moved."""
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        mine = share(batch, worker.groups.dp_rank, worker.groups.dp_size)
        if where == "advantage" and worker.groups.dp_rank == worker.groups.dp_size - 1:
            advantage_sl = mine.advantage_sl.clone()
            advantage_sl[1] = math.nan
            mine = dataclasses.replace(mine, advantage_sl=advantage_sl)
        elif where == "weights" and worker.groups.is_last_stage and worker.groups.tp_rank == 0:
            next(worker.model.parameters()).data.view(-1)[3] = math.nan
        before = [p.detach().clone() for p in worker.model.parameters()]
        result = worker.train_step(mine)
        assert result.refused and not result.stepped
        if where == "advantage":
            assert result.broken_samples == ((worker.groups.dp_size - 1, 1),)
        errors = [result.reason]
        if where == "weights":
            try:
                worker.logprobs(mine)
            except ValueError as error:
                errors.append(str(error))
        same = all(
            torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
            for a, b in zip(before, worker.model.parameters(), strict=True)
        )
        return errors, same
    finally:
        worker.close()


@pytest.mark.parametrize("layout", ["tp1", "tp2pp2", "pp2dp2", "tp2pp2+sp+fused"])
@pytest.mark.parametrize("where", ["advantage", "weights"])
def test_a_nan_is_refused_on_all_ranks_and_moves_nothing(layout, where, batch):
    """Only the last stage of one replica sees it; every rank refuses, none hangs, no weight moves."""
    for errors, same in run_ranks(
        _train_broken, LAYOUTS[layout][0], make_config(layout, 2), batch, where, timeout_s=60
    ):
        assert len(errors) == (2 if where == "weights" else 1)
        assert all("NaN or inf" in error and "sample" in error for error in errors), errors
        assert same


def _train_on_a_nan_weight(rank, world_size, config, batch, row):
    """One step on a batch whose last replica has a NaN sampler logprob: the result, and the weights moved."""
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        groups = worker.groups
        mine = share(batch, groups.dp_rank, groups.dp_size)
        assert mine.keep_old_sl is not None and mine.old_logprob_sl is not None
        counted_sl = mine.token_mask_sl & mine.keep_old_sl & worker.logprobs(mine).keep_sl
        sampler_sl = torch.where(mine.keep_old_sl, mine.old_logprob_sl, -math.inf)
        if groups.dp_rank == groups.dp_size - 1:
            column = int(counted_sl[row].nonzero()[0])
            sampler_sl[row, column] = math.nan
        before = [p.detach().clone() for p in worker.model.parameters()]
        result = worker.train_step(dataclasses.replace(mine, sampler_logprob_sl=sampler_sl))
        same = all(torch.equal(a, b) for a, b in zip(before, worker.model.parameters(), strict=True))
        return result, same, groups.dp_size - 1
    finally:
        worker.close()


def corrected(layout, **importance):
    config = dataclasses.replace(make_config(layout, 2), importance=ImportanceConfig(**importance))
    check_run_config(config)
    return config


@pytest.mark.parametrize("layout", ["tp1", "tp2pp2", "pp2dp2", "tp2pp2+sp+fused"])
@pytest.mark.parametrize("correction", ["tis", "geometric", "sequence"])
def test_a_nan_sampler_logprob_is_refused_on_all_ranks_with_its_sample(layout, correction, batch):
    """A weight that is no number would make every gradient NaN: no rank steps, and all name the sample."""
    config = corrected(layout, correction=correction, cap=2.0)
    given = (config, batch, 1)
    for result, same, dp_rank in run_ranks(_train_on_a_nan_weight, LAYOUTS[layout][0], *given, timeout_s=60):
        assert result.refused and not result.stepped and same
        assert result.broken_samples == ((dp_rank, 1),)
        assert f"sample 1 on data-parallel rank {dp_rank}" in result.reason


@pytest.mark.parametrize(
    ("importance", "row", "reason"),
    [
        ({"correction": "icepop", "low": 0.5, "high": 5.0}, 1, "tokens/dropped_importance"),
        ({"sequence_error_max": 2.0}, 1, "tokens/dropped_sequence"),
        # A masked sample's NaN is nobody's business.
        ({"correction": "tis", "cap": 2.0}, 3, "tokens/sample_masked"),
    ],
)
def test_a_nan_sampler_logprob_that_a_filter_or_a_mask_takes_out_is_counted(importance, row, reason, batch):
    for result, same, _ in run_ranks(
        _train_on_a_nan_weight, 4, corrected("pp2dp2", **importance), batch, row
    ):
        assert result.stepped and not result.refused and not same
        assert result.metrics[reason] > 0 and math.isfinite(result.metrics["loss/total"])
        assert math.isfinite(result.metrics["optimizer/grad_norm"])


def _after_a_step_not_taken(rank, world_size, config, batch, not_taken):
    """Learning rate and weights after one real step, and the same after another that was not taken first."""
    from megatron_worker.worker import MegatronWorker

    outcomes = []
    for first in ([], [not_taken]):
        worker = MegatronWorker(config)
        try:
            for one in first:
                assert not worker.train_step(one).stepped
            rates = [worker.train_step(batch).metrics["optimizer/lr"] for _ in range(2)]
            outcomes.append((rates, weights_by_name(worker)))
        finally:
            worker.close()
    return outcomes


@pytest.mark.parametrize("kind", ["empty", "refused"])
def test_b35_a_step_not_taken_leaves_no_trace_in_optimizer_and_schedule(kind, batch):
    """The next two steps are those of a run without it: momentum, step count and learning rate."""
    config = make_config("tp1", 1, kl_coef=0.1)
    optimizer = dataclasses.replace(config.optimizer, lr=1e-3, warmup_steps=2, weight_decay=0.1)
    config = dataclasses.replace(config, optimizer=optimizer)
    if kind == "empty":
        not_taken = dataclasses.replace(batch, sample_mask_s=torch.zeros(NUM_SEQUENCES).bool())
    else:
        not_taken = dataclasses.replace(batch, advantage_sl=batch.advantage_sl * math.nan)
    ((without, after),) = run_ranks(_after_a_step_not_taken, 1, config, batch, not_taken)
    assert after[0] == without[0] and after[0][1] > after[0][0]
    assert all(torch.equal(after[1][name], without[1][name]) for name in without[1])


def test_the_kl_in_the_reward_reads_unfiltered_logprobs(batch):
    """A truncated policy's own logprob would be a divergence from the reference before the first update."""
    config = make_config("tp2pp2", 2, kl_coef=0.1, kl_in="reward")
    counts_sl = batch.token_mask_sl
    reference_sl = run_ranks(_several_steps, 4, config, batch, 0)[0][2]
    for scored in run_ranks(score_on_rank, 4, config, batch):
        assert torch.allclose(scored.unfiltered_logprob_sl[counts_sl], reference_sl[counts_sl], atol=1e-5)
        assert bool((scored.log_mass_sl[counts_sl & scored.keep_sl] < -1e-3).any()), "something is cut"


@pytest.mark.parametrize("truncated", [True, False])
def test_the_sequence_check_knows_whether_the_distribution_is_truncated(truncated, batch):
    """-inf of the sampler is skipped under truncation, and rejects the sequence where nothing is cut."""
    config = corrected("tp1", sequence_error_max=1e6)
    if not truncated:
        plain = dataclasses.replace(config.sampling, top_k=None, top_p=None)
        config = dataclasses.replace(config, sampling=plain)
    position = int(batch.token_mask_sl[1].nonzero()[0, 0])
    sampler_sl, old_sl = (
        torch.full_like(batch.sampler_logprob_sl, -2.0),
        torch.full_like(batch.sampler_logprob_sl, -2.0),
    )
    sampler_sl[1, position] = -math.inf
    given = dataclasses.replace(
        batch,
        sampler_logprob_sl=sampler_sl,
        old_logprob_sl=old_sl,
        keep_old_sl=torch.ones_like(batch.token_mask_sl),
    )
    ((result, _, _),) = run_ranks(train_on_rank, 1, config, given)
    rejected = 0 if truncated else int(batch.token_mask_sl[1].sum())
    assert result.metrics["tokens/dropped_sequence"] == rejected
