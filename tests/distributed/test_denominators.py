"""One microbatch's loss and metrics with global denominators: hand-computed sums over microbatches and
ranks.
"""

import dataclasses
import math

import pytest
import torch
import torch.distributed as dist

from megatron_worker.forward_step import LossContract, cancel_megatron_scaling
from megatron_worker.microbatch_loss import microbatch_loss, neutral_metrics
from rlcore.batch import Microbatch
from rlcore.collectives import all_reduce_, record_collectives
from rlcore.config import LossConfig
from rlcore.masks import retained_mask
from rlcore.metrics import add_metrics, reduce_metrics
from rlcore.ops.logprob import TokenLogprobs
from tests.rank_pool import run_ranks

pytestmark = pytest.mark.distributed

LOSS = LossConfig(ratio_clip_min=0.2, ratio_clip_max=0.28)


def make_microbatch(losses, token_mask, sample_mask=None, old=None, keep_old=None):
    """Tokens whose policy-gradient loss is the given number: ratio 1, advantage minus the loss."""
    num = len(losses)
    sample_mask = token_mask if sample_mask is None else sample_mask
    ids_t = torch.zeros(num, dtype=torch.long)
    return Microbatch(
        input_ids_bl=ids_t[None],
        position_ids_bl=ids_t[None],
        target_t=ids_t,
        real_t=torch.ones(num).bool(),
        token_mask_t=torch.tensor(token_mask).bool(),
        sample_mask_t=torch.tensor(sample_mask).bool(),
        sample_index_t=torch.arange(num),
        advantage_t=-torch.tensor(losses, dtype=torch.float32),
        sampler_logprob_t=torch.zeros(num),
        old_logprob_t=torch.zeros(num) if old is None else torch.tensor(old),
        keep_old_t=None if keep_old is None else torch.tensor(keep_old).bool(),
        num_samples=num,
    )


def count_retained(microbatch):
    return retained_mask(microbatch.token_mask_t, microbatch.sample_mask_t, microbatch.keep_old_t).sum()


def over(microbatch, count):
    """The microbatch with the token mean over a global count."""
    multiplier = 1.0 / torch.as_tensor(count).clamp(min=1)
    return dataclasses.replace(
        microbatch, policy_multiplier_t=torch.full(microbatch.advantage_t.shape, float(multiplier))
    )


def make_scores(logprob_t, keep=None):
    num = logprob_t.shape[0]
    keep_t = torch.ones(num).bool() if keep is None else torch.tensor(keep).bool()
    detached_t = logprob_t.detach()
    return TokenLogprobs(
        logprob_t=torch.where(keep_t, logprob_t, -math.inf),
        unfiltered_logprob_t=detached_t,
        keep_t=keep_t,
        log_mass_t=torch.zeros(num),
        num_kept_t=torch.ones(num).long(),
        entropy_t=None,
        unfiltered_entropy_t=None,
    )


def run_step(microbatches, group=None):
    """Loss, gradient per microbatch, reduced metrics and collectives of one step on this rank."""
    retained = [count_retained(microbatch) for microbatch in microbatches]
    with record_collectives() as calls:
        count = all_reduce_(torch.stack(retained).sum().float(), "sum", group)
        reports, gradients = [], []
        for microbatch in microbatches:
            x = torch.zeros(len(microbatch.target_t), requires_grad=True)
            value, report = microbatch_loss(over(microbatch, count), make_scores(x), LOSS)
            gradients += torch.autograd.grad(value, x)[0].tolist()
            reports.append(report.metrics)
        total = add_metrics([neutral_metrics(LOSS, torch.device("cpu")), *reports])
        metrics = reduce_metrics(total, group)
    return metrics, gradients, [call.kind for call in calls]


B32 = {0: [([1.0, 1.0, 1.0], [1, 1, 1]), ([1.0], [1])], 1: [([4.0, 4.0], [1, 1]), ([9.0], [0])]}


def _b32(rank, world_size):
    return run_step([make_microbatch(*part) for part in B32[rank]], dist.group.WORLD)


def test_b32_uneven_microbatches_and_ranks_give_the_token_mean():
    """12 / 6 = 2; means of means give 1.5 or 2.5. The gradient is that of one batch of six tokens."""
    (metrics, first, _), (same, second, _) = run_ranks(_b32, 2)
    assert metrics == same and metrics["loss/total"] == pytest.approx(2.0)
    whole, gradient, _ = run_step([make_microbatch([1.0] * 4 + [4.0, 4.0], [1] * 6)])
    assert whole["loss/total"] == pytest.approx(2.0)
    assert first + second == pytest.approx([*gradient, 0.0])


def _b35(rank, world_size):
    losses, mask = ([2.0, 4.0], [1, 1]) if rank == 0 else ([9.0, 9.0], [0, 0])
    return run_step([make_microbatch(losses, mask)], dist.group.WORLD)


def test_b35_an_empty_rank_is_neutral():
    """Loss 3; rank 1 gets gradient 0, enters the same collectives, and no placeholder of its wins a min or
    max.
    """
    (metrics, first, calls), (same, second, empty_calls) = run_ranks(_b35, 2)
    assert metrics == same and calls == empty_calls
    assert metrics["loss/total"] == pytest.approx(3.0)
    assert first == pytest.approx([1.0, 2.0]) and second == [0.0, 0.0]
    assert metrics["ratio/min"] == metrics["ratio/max"] == 1.0
    assert metrics["tokens/trained"] == 2 and metrics["tokens/prompt"] == 2


def test_an_empty_step_has_no_minimum_and_no_nan():
    metrics, gradients, _ = run_step([make_microbatch([9.0], [0])])
    assert "ratio/min" not in metrics and all(math.isfinite(value) for value in metrics.values())
    assert gradients == [0.0]


@pytest.mark.parametrize("garbage", [-205.0, -math.inf, math.inf, math.nan])
@pytest.mark.parametrize("masked_by", ["token", "sample", "keep_old", "keep"])
def test_b21_every_metric_is_bit_equal_whatever_the_masked_slot_holds(garbage, masked_by):
    """ratio * mask gives a minimum of 0, and exp before the mask gives NaN."""

    def run(old):
        flags = {"token": [1, 1, 1], "sample": [1, 1, 1], "keep_old": [1, 1, 1], "keep": [1, 1, 1]}
        flags[masked_by][2] = 0
        microbatch = make_microbatch(
            [-1.0] * 3, flags["token"], flags["sample"], [-1.0, -2.1, old], flags["keep_old"]
        )
        x = torch.tensor([-1.0, -2.0, -5.0], requires_grad=True)
        value, report = microbatch_loss(over(microbatch, 2), make_scores(x, flags["keep"]), LOSS)
        return value, torch.autograd.grad(value, x)[0], reduce_metrics(report.metrics)

    value, gradient, metrics = run(garbage)
    clean_value, clean_gradient, clean_metrics = run(0.0)
    assert value.item() == pytest.approx(-1.052585, abs=1e-6)
    assert gradient.tolist() == pytest.approx([-0.5, -0.552585, 0.0], abs=1e-6)
    assert (
        torch.equal(value, clean_value) and torch.equal(gradient, clean_gradient) and metrics == clean_metrics
    )
    assert metrics["ratio/min"] == pytest.approx(1.0) and metrics["ratio/max"] == pytest.approx(math.exp(0.1))


def test_b34_tokens_dropped_before_the_step_are_in_no_count_and_those_dropped_now_are():
    """`retained`: keep_old leaves the denominator; a token that only the current pass drops stays in it."""
    microbatch = make_microbatch([1.0] * 4, [1] * 4, keep_old=[1, 1, 1, 0])
    x = torch.zeros(4, requires_grad=True)
    scores = make_scores(x, [1, 1, 0, 1])
    value, report = microbatch_loss(over(microbatch, count_retained(microbatch)), scores, LOSS)
    assert value.item() == pytest.approx(2 / 3)
    assert torch.autograd.grad(value, x)[0].tolist() == pytest.approx([1 / 3, 1 / 3, 0, 0])
    counts = reduce_metrics(report.metrics)
    assert (counts["tokens/retained"], counts["tokens/valid"], counts["tokens/trained"]) == (3, 4, 2)


def test_a_broken_token_is_reported_with_its_sample_and_a_masked_one_is_not():
    microbatch = make_microbatch([1.0] * 3, [1, 1, 0])

    def broken_samples(slot):
        scores = make_scores(torch.zeros(3))
        unfiltered = scores.unfiltered_logprob_t.clone()
        unfiltered[slot] = math.nan
        scores = dataclasses.replace(scores, unfiltered_logprob_t=unfiltered)
        report = microbatch_loss(over(microbatch, 1), scores, LOSS)[1]
        assert bool(report.is_broken) == bool(report.broken_s.any())
        return report.broken_s.nonzero()[:, 0].tolist()

    assert [broken_samples(slot) for slot in range(3)] == [[0], [1], []]


@pytest.mark.parametrize(("num_microbatches", "dp", "cp"), [(1, 1, 1), (4, 2, 1), (3, 2, 2)])
@pytest.mark.parametrize("averages", [True, False])
def test_the_scaling_that_megatron_adds_is_cancelled(num_microbatches, dp, cp, averages):
    """What is left after each contract's own arithmetic is the value. Data parallelism divides by DP x CP or
    by nothing.
    """
    data_parallel = 1 / (dp * cp) if averages else 1.0
    schedules = {
        LossContract(averages=averages): cp / num_microbatches,
        LossContract(num_values=3, averages=averages): 1 / num_microbatches,
        LossContract(per_token=True, averages=averages): 1.0,
    }
    given = torch.tensor(5.0)
    for contract, factor in schedules.items():
        loss = cancel_megatron_scaling(given, num_microbatches, dp, cp, contract)
        assert float(loss) * factor * data_parallel == pytest.approx(5.0)
        assert loss is not given, "the schedule changes it in place"


def test_the_default_contract_is_two_values_in_megatrons_data_parallelism():
    assert float(cancel_megatron_scaling(torch.tensor(5.0), 4, 2)) == 40.0
    per_token = LossContract(per_token=True)
    assert float(cancel_megatron_scaling(torch.tensor(5.0), 4, 2, 2, per_token)) == 5.0, "it adds none then"
