"""The clipped policy-gradient loss: hand-computed values and gradients, and garbage in masked slots."""

import math

import pytest
import torch

from rlcore.ops.loss import clipped_policy_terms, token_sum_over

NO_CLIP = (0.999999, 1e9)


def loss_and_grad(logprob, old, advantage, mask, clip=NO_CLIP, denominator=2.0):
    x = torch.tensor(logprob, requires_grad=True)
    terms = clipped_policy_terms(
        x, torch.tensor(old), torch.tensor(advantage), torch.tensor(mask).bool(), *clip
    )
    value = token_sum_over(terms.loss_t, torch.tensor(denominator))
    (grad,) = torch.autograd.grad(value, x)
    return value, grad, terms


@pytest.mark.parametrize("garbage", [-205.0, -math.inf, math.inf, math.nan, 0.0])
@pytest.mark.parametrize("where", ["old", "logprob", "advantage"])
def test_b21_masked_slots_may_hold_anything(garbage, where):
    """A mask applied after exp meets inf * 0 = NaN; here the result is bit-equal to zeros in the masked
    slot.
    """

    def run(value):
        fields = {"logprob": [-1.0, -2.0, -5.0], "old": [-1.0, -2.1, -5.0], "advantage": [1.0, 1.0, 1.0]}
        fields[where][2] = value
        return loss_and_grad(fields["logprob"], fields["old"], fields["advantage"], [1, 1, 0])

    value, grad, terms = run(garbage)
    assert value.item() == pytest.approx(-1.052585, abs=1e-6)
    assert grad.tolist() == pytest.approx([-0.5, -0.552585, 0.0], abs=1e-6)
    clean_value, clean_grad, clean = run(0.0)
    assert torch.equal(value, clean_value) and torch.equal(grad, clean_grad)
    for name in ("loss_t", "ratio_t", "clipped_low_t", "clipped_high_t"):
        assert torch.equal(getattr(terms, name), getattr(clean, name))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "grad", "low", "high"),
    [
        (1.25, 1.0, -1.25, -1.25, False, False),
        (1.5, 1.0, -1.28, 0.0, False, True),
        (5.0, 1.0, -1.28, 0.0, False, True),
        (5.0, -1.0, 5.0, 5.0, False, False),
        (0.75, -1.0, 0.8, 0.0, True, False),
        (0.75, 1.0, -0.75, -0.75, False, False),
        (1.0, 2.0, -2.0, -2.0, False, False),
    ],
)
def test_b31_asymmetric_clip(ratio, advantage, loss, grad, low, high):
    """Epsilons .2 below and .28 above; swapped they would give -1.2 and .72."""
    value, got, terms = loss_and_grad(
        [math.log(ratio)], [0.0], [advantage], [1], clip=(0.2, 0.28), denominator=1.0
    )
    assert value.item() == pytest.approx(loss, abs=1e-6)
    assert got.item() == pytest.approx(grad, abs=1e-6)
    assert (bool(terms.clipped_low_t), bool(terms.clipped_high_t)) == (low, high)


def test_an_overflowing_ratio_is_finite():
    """exp of 1e4 is inf; with a negative advantage no clip of the objective bounds it."""
    value, grad, _ = loss_and_grad([0.0, -1.0], [-1e4, -1.0], [-1.0, 1.0], [1, 1], clip=(0.2, 0.2))
    assert math.isfinite(value.item()) and torch.isfinite(grad).all()
    value, grad, _ = loss_and_grad([-1e4, -1.0], [0.0, -1.0], [-1.0, 1.0], [1, 1], clip=(0.2, 0.2))
    assert math.isfinite(value.item()) and torch.isfinite(grad).all()


def test_the_log_ratio_survives_a_ratio_that_underflows():
    """log(exp(-1e4)) is -inf, and a metric built on it is no JSON number."""
    _, _, terms = loss_and_grad([-1e4, -1.0], [0.0, -2.0], [1.0, 1.0], [1, 1])
    assert terms.log_ratio_t.tolist() == [-1e4, 1.0] and terms.ratio_t[0] == 0.0


def test_b35_a_microbatch_without_tokens_is_a_differentiable_zero():
    value, grad, _ = loss_and_grad([-1.0, -2.0], [-1.0, -math.inf], [1.0, 1.0], [0, 0], denominator=0.0)
    assert value.item() == 0.0 and not grad.any()


def test_b32_parts_divided_by_the_global_count_add_up():
    """(sum, tokens): (3, 3), (1, 1), (8, 2), (0, 0) -> 12 / 6; the mean of means would be 1.5."""
    parts = [[1.0, 1.0, 1.0], [1.0], [4.0, 4.0], []]
    total = sum(token_sum_over(torch.tensor(part), torch.tensor(6.0)) for part in parts)
    assert float(total) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # (a) lengths 4 and 2 and a masked one of 2; (b) one valid row of 4 and two masked rows
        ([(4, 1), (2, 1), (2, 0)], 1.0),
        ([(4, 1), (4, 0), (4, 0)], 1.0),
    ],
)
def test_b34_masked_samples_are_in_no_count(rows, expected):
    mask = torch.tensor([float(valid) for length, valid in rows for _ in range(length)])
    logprob = torch.zeros_like(mask)
    terms = clipped_policy_terms(logprob, logprob, -torch.ones_like(mask), mask.bool(), 0.2, 0.2)
    assert token_sum_over(terms.loss_t, mask.sum()).item() == pytest.approx(expected)
