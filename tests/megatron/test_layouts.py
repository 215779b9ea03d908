"""The same batch in every layout: loss, gradient of every parameter and metrics agree, and equal an unsharded
reference.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.megatron.layout_cases import (
    LAYOUTS,
    TOLERANCE,
    assert_same,
    assert_same_metrics,
    make_config,
    reference_step,
    share,
    train_on_rank,
)
from tests.rank_pool import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]


# Every layout with two microbatches; with one and four those that cut most, and the rest with the slow tests.
FAST = ("tp1", "tp2pp2+sp", "pp2dp2+packed", "tp2cp2+sp+fused")


@pytest.mark.parametrize(
    ("layout", "num_microbatches"),
    [
        pytest.param(layout, count, marks=() if count == 2 or layout in FAST else pytest.mark.slow)
        for count in (1, 2, 4)
        for layout in LAYOUTS
    ],
)
def test_loss_gradients_and_metrics_do_not_depend_on_the_layout(layout, num_microbatches, batch, baseline):
    """Token counts are those of the whole step, so neither microbatches nor ranks weigh anything."""
    config = make_config(layout, num_microbatches, kl_coef=0.1)
    expected, gradients, _ = baseline
    hint = (layout, num_microbatches)
    for result, ours, _ in run_ranks(train_on_rank, LAYOUTS[layout][0], config, batch):
        assert_same_metrics(result, expected, hint)
        if layout != "dp2+distopt":
            # The distributed optimizer reduces each rank's own slice only; its weights are compared below.
            assert_same(ours, gradients, hint)


@pytest.mark.parametrize("layout", ["tp2pp2+sp", "dp2+distopt"])
def test_the_step_moves_the_same_weights(layout, batch, baseline):
    """Adam divides by the gradient's size, so only entries whose gradient is clear of rounding are
    compared.
    """
    _, gradients, expected = baseline
    for _, _, weights in run_ranks(
        train_on_rank, LAYOUTS[layout][0], make_config(layout, 2, kl_coef=0.1), batch
    ):
        for name, value in expected.items():
            clear = gradients[name].abs() > 1e-5
            assert torch.allclose(weights[name][clear], value[clear], atol=1e-5), (layout, name)


def test_the_batch_holds_every_kind_of_token(baseline):
    """Otherwise the tests above would compare layouts on an easy batch."""
    metrics = baseline[0].metrics
    for name in ("sample_masked", "dropped_keep_old", "dropped_keep", "trained", "prompt"):
        assert metrics[f"tokens/{name}"] > 0, name
    assert metrics["ratio/clipped_low"] > 0 and metrics["ratio/clipped_high"] > 0
    assert 0 < metrics["filter/out_of_support"] < 1 and metrics["kl/reference"] > 0


@pytest.mark.parametrize("actor_denominator", ["retained", "valid"])
def test_loss_and_gradients_equal_an_unsharded_float64_reference(actor_denominator, batch, tmp_path):
    """Hugging Face's model in float64, the reference op, and the loss written out on whole sequences."""
    config = make_config("tp2pp2", 2, kl_coef=0.1, actor_denominator=actor_denominator)
    result, gradients, _ = run_ranks(train_on_rank, 4, config, batch)[0]
    loss, expected, retained = reference_step(
        config, batch, run_ranks(_save, 1, config, str(tmp_path / "policy"))[0]
    )
    assert result.metrics["loss/total"] == pytest.approx(loss, abs=TOLERANCE)
    assert result.metrics["tokens/retained"] == retained
    assert_same({name: gradients[name] for name in expected}, expected, actor_denominator)


def _save(rank, world_size, config, path):
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(dataclasses.replace(config, parallel=make_config("tp1", 1).parallel))
    try:
        worker.save(path)
    finally:
        worker.close()
    return path


def refused_on_rank(rank, world_size, config, batch, length):
    """What a rank says when a sequence of replica 1 alone claims that many tokens."""
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        own = share(batch, worker.groups.dp_rank, worker.groups.dp_size)
        if worker.groups.dp_rank == 1:
            length_s = torch.cat([torch.tensor([length]), own.length_s[1:]])
            mask_sl = own.token_mask_sl & (torch.arange(len(length_s)) > 0)[:, None]
            own = dataclasses.replace(own, length_s=length_s, token_mask_sl=mask_sl)
        with pytest.raises(ValueError) as caught:
            worker.logprobs(own)
        return str(caught.value)
    finally:
        worker.close()


@pytest.mark.parametrize("length", [0, 13])
@pytest.mark.parametrize("token_budget", [None, 44])
def test_a_length_that_the_columns_do_not_hold_is_named_on_every_rank(token_budget, length, batch):
    """A packed row could not be built of it on that rank alone, and the others would wait."""
    config = make_config("dp2", 2)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, token_budget=token_budget))
    for said in run_ranks(refused_on_rank, 2, config, batch, length, timeout_s=60):
        assert f"length_s of sample 0 is {length}: expected 1 to 12" in said
