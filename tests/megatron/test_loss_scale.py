"""The loss-scale self-test: right regimes give factor 1 on every rank, wrong ones are named before a step."""

from __future__ import annotations

import dataclasses
import re
from unittest import mock

import pytest
import torch

from tests.megatron.expert_cases import EXPERT_LAYOUTS, expert_config
from tests.megatron.layout_cases import LAYOUTS, make_config, train_on_rank
from tests.megatron.planted_faults import planted
from tests.rank_pool import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]

CONTRACTS = {
    "two_values": {},
    "three_values": {"num_values": 3},
    "per_token": {"per_token": True},
}


def scale_config(layout, num_microbatches=2, *, per_token=False, checks=False, dtype="float32"):
    config = make_config(
        layout, num_microbatches, actor_denominator="retained_exact" if per_token else "retained"
    )
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, dtype=dtype),
        train=dataclasses.replace(config.train, check_loss_scale=checks),
    )


def factors_on_rank(rank, world_size, config, regime, multiplier):
    """Factors of the world under a loss function of that regime, whose loss is `multiplier` too large."""
    from megatron_worker.forward_step import LossContract
    from megatron_worker.loss_scale import measure_loss_scale
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        probe = worker.scale_probe()

        def loss_return(loss, num_tokens):
            if regime == "plain":
                # A job that cancels nothing.
                return loss * multiplier, {}
            contract = LossContract(**CONTRACTS[regime])
            return contract.scaled(loss * multiplier, num_tokens, {}, len(probe.data), worker.groups)

        return measure_loss_scale(dataclasses.replace(probe, loss_return=loss_return)), len(probe.data)
    finally:
        worker.close()


@pytest.mark.parametrize("regime", CONTRACTS)
@pytest.mark.parametrize(
    "layout", ["tp1", "dp2+distopt", "tp2pp2+sp", "pp2dp2", "pp2cp2", "dp2cp2", "tp2cp2+sp+fused"]
)
def test_every_regime_has_factor_one(layout, regime):
    """Whatever Megatron scales by: CP, microbatches, data parallelism, token counts."""
    config = scale_config(layout, per_token=regime == "per_token")
    world_size = LAYOUTS[layout][0]
    for factors, count in run_ranks(factors_on_rank, world_size, config, regime, 1.0):
        # A step of several: not the number of CP or DP ranks, nor their product.
        assert count == (3 if "2" in layout.replace("tp2", "").replace("pp2", "") else 2)
        assert factors == pytest.approx([1.0] * world_size, abs=1e-6)


def test_two_errors_of_one_size_do_not_make_up_for_each_other():
    """A loss function that cancels the average over DP x CP alone: the schedule's factor of CP and its
    division by the microbatches stay. With as many of those as CP ranks, gradients would come out right.
    """
    for layout, cancelled, expected in (("pp2cp2", 2, 2 / 3), ("dp2cp2", 4, 2 / 3)):
        for factors, _ in run_ranks(factors_on_rank, 4, scale_config(layout), "plain", cancelled):
            assert factors == pytest.approx([expected] * 4, abs=1e-6), layout


@pytest.mark.parametrize("regime", CONTRACTS)
def test_the_factor_is_measured_not_only_judged(regime):
    config = scale_config("dp2cp2", per_token=regime == "per_token")
    for factors, _ in run_ranks(factors_on_rank, 4, config, regime, 3.0):
        assert factors == pytest.approx([3.0] * 4, abs=1e-5)


@pytest.mark.parametrize(("layout", "num_microbatches", "expected"), [("pp2dp2", 4, 6), ("pp2cp2", 2, 3)])
def test_a_loss_function_that_cancels_nothing(layout, num_microbatches, expected):
    """Two values: the schedule multiplies by CP and divides by the microbatches, the average divides by
    DP x CP; what is left is 1 / (microbatches x DP)."""
    config = scale_config(layout, num_microbatches)
    for factors, _ in run_ranks(factors_on_rank, 4, config, "plain", 1.0):
        assert factors == pytest.approx([1 / expected] * 4, abs=1e-6)


def test_bfloat16_is_within_the_tolerance():
    from megatron_worker.loss_scale import TOLERANCE

    for layout in ("tp2pp2+sp", "pp2cp2"):
        config = scale_config(layout, dtype="bfloat16")
        for factors, _ in run_ranks(factors_on_rank, 4, config, "two_values", 1.0):
            assert factors == pytest.approx([1.0] * 4, abs=TOLERANCE / 2)


def start_on_rank(rank, world_size, config, fault):
    """The message of the error at start-up; caught here, because all ranks have it and the pool lives on."""
    from megatron_worker.worker import MegatronWorker

    with planted(fault):
        try:
            MegatronWorker(config).close()
        except ValueError as error:
            return str(error)
    return None


@pytest.mark.parametrize(
    ("fault", "layout", "message"),
    [
        ("wrong_cp_factor", "pp2cp2", "gradients are 0.5 times what the loss says .*cancelled twice"),
        ("dp_size_left_out", "pp2dp2", "gradients are 0.5 times what the loss says .*data-parallel"),
        ("microbatches_left_out", "tp2pp2", "gradients are 0.5 times what the loss says .*microbatches"),
    ],
)
def test_a_wrong_scale_is_refused_at_start_up_on_every_rank(fault, layout, message):
    config = scale_config(layout, 4, checks=True)
    for said in run_ranks(start_on_rank, 4, config, fault):
        assert re.match(message, said or "started")
    unchecked = scale_config(layout, 4, checks=False)
    assert run_ranks(start_on_rank, 4, unchecked, fault) == [None] * 4, "train.check_loss_scale=false"


def leaves_on_rank(rank, world_size, config):
    """What the self-test left different: names of things."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from megatron_worker.loss_scale import check_loss_scale
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        parameters = list(worker.model.parameters())
        for index, parameter in enumerate(parameters):
            parameter.main_grad.fill_(index + 0.5)
        worker.model.eval()

        def state():
            return {
                "weights": [parameter.detach().clone() for parameter in parameters],
                "gradients": [parameter.main_grad.clone() for parameter in parameters],
                "host generator": [torch.get_rng_state()],
                "Megatron's generators": list(get_cuda_rng_tracker().get_states().values()),
                "mode": [torch.tensor(worker.model.training)],
                "autograd's gradients": [torch.tensor(p.grad is None) for p in parameters],
            }

        before = state()
        run_stage = worker.head.run

        def noisy_stage(model, item):
            torch.rand(3)
            with get_cuda_rng_tracker().fork():
                torch.rand(3)
            return run_stage(model, item)

        check_loss_scale(dataclasses.replace(worker.scale_probe(), run_stage=noisy_stage))
        after = state()
        same = {name: all(map(torch.equal, before[name], after[name])) for name in before}
        return [name for name, is_same in same.items() if not is_same]
    finally:
        worker.close()


@pytest.mark.parametrize("layout", ["tp1", "tp2pp2+sp", "dp2+distopt"])
def test_it_leaves_weights_gradients_and_generators_alone(layout):
    for changed in run_ranks(leaves_on_rank, LAYOUTS[layout][0], scale_config(layout)):
        assert changed == []


def test_the_first_step_is_the_same_with_and_without_it(batch):
    """Bit for bit: result, gradients, weights."""
    with_check, without = (
        run_ranks(train_on_rank, 4, scale_config("tp2pp2+sp", checks=checks), batch)[0]
        for checks in (True, False)
    )
    assert with_check[0].metrics == without[0].metrics
    for ours, theirs in zip(with_check[1:], without[1:], strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def foreign_on_rank(rank, world_size, layout_values, per_token):
    """A Megatron job without a worker: its own model, schedule and a three-value or per-token loss."""
    from megatron_worker.forward_step import LossContract
    from megatron_worker.loss_scale import ScaleProbe, check_loss_scale, measure_loss_scale
    from tests.megatron.packing_cases import stage

    contract = LossContract(num_values=3, per_token=per_token)
    with stage(layout_values, 1) as (_, _, groups, model):
        model.config.calculate_per_token_loss = per_token
        tokens = torch.zeros(3, 4, dtype=torch.int64)
        position = torch.arange(4).expand(3, 4)
        probe = ScaleProbe(
            model=model,
            groups=groups,
            data=[tokens] * 3,
            shape=(3, 4),
            run_stage=lambda model, tokens: model(tokens, position, None),
            loss_return=lambda loss, num_tokens: contract.scaled(loss, num_tokens, {}, 3, groups),
        )
        if not per_token:
            check_loss_scale(probe)
        return measure_loss_scale(probe)


def test_a_job_of_your_own():
    """Per token, a stage that was wrapped without `calculate_per_token_loss` still averages over DP."""
    for factors in run_ranks(foreign_on_rank, 4, {"tp": 2, "pp": 1}, False):
        assert factors == pytest.approx([1.0] * 4, abs=1e-6)
    for factors in run_ranks(foreign_on_rank, 4, {"tp": 2, "pp": 1}, True):
        assert factors == pytest.approx([0.5] * 4, abs=1e-6)


def test_a_stage_without_norms_is_named():
    from megatron_worker.loss_scale import probe_norm

    with pytest.raises(ValueError, match="check_loss_scale=false"):
        probe_norm(torch.nn.Linear(2, 2))


def test_a_missing_reduction_cannot_hide_behind_equal_ranks():
    """Microbatches weigh 1, 2, 3 on rank 0 and 2, 3, 4 on rank 1: twice the own sum is 12 and 18, all give
    15. Packed too, where the test has as many.
    """
    for layout in ("dp2", "cp2"):
        for factors, _ in run_ranks(without_reduction_on_rank, 2, scale_config(layout, 2)):
            assert factors == pytest.approx([0.8, 1.2], abs=1e-6), layout


def without_reduction_on_rank(rank, world_size, config):
    from megatron.core.distributed import DistributedDataParallel

    with mock.patch.object(DistributedDataParallel, "finish_grad_sync", lambda self, **_: None):
        return factors_on_rank(rank, world_size, config, "two_values", 1.0)


@pytest.mark.parametrize("regime", ["three_values", "per_token"])
@pytest.mark.parametrize("layout", ["ep2", "ep2+distopt", "tp2ep2", "dp4ep2"])
def test_experts_have_factor_one_too(layout, regime):
    """Their gradient is reduced over the ranks that hold the same experts, and averaged over all."""
    denominator = "retained_exact" if regime == "per_token" else "retained"
    config = expert_config(layout, 2, actor_denominator=denominator)
    world_size = EXPERT_LAYOUTS[layout][0]
    for factors, _ in run_ranks(factors_on_rank, world_size, config, regime, 1.0):
        assert factors == pytest.approx([1.0] * world_size, abs=1e-6)


def test_experts_scaled_wrongly_are_found():
    """The norm's factor is still 1."""
    for factors, _ in run_ranks(fault_on_rank, 2, expert_config("ep2", 2), "expert_gradients_scaled_by_ep"):
        assert factors == pytest.approx([2.0] * 2, abs=1e-6)


def fault_on_rank(rank, world_size, config, fault):
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, check_loss_scale=False))
    with planted(fault):
        return factors_on_rank(rank, world_size, config, "three_values", 1.0)
