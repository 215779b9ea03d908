"""Every policy loss against its formula in float64, hand-computed cases, garbage in masked slots."""

import math
from dataclasses import replace

import pytest
import torch

from rlcore.ops.loss import (
    ClipBounds,
    PolicyTokens,
    cispo_terms,
    clip_terms,
    entropy_terms,
    on_policy_terms,
    positive_nll_terms,
    reinforce_terms,
)
from tests.loss_cases import BOUNDS, DUAL, LOSSES, Batch, make_batch, reference_loss

FIELDS = ("loss_t", "ratio_t", "log_ratio_t", "clipped_low_t", "clipped_high_t")


def tokens_of(logprob, old, advantage, mask=None, **more):
    mask = [1] * len(logprob) if mask is None else mask
    x = torch.tensor(logprob, requires_grad=True)
    return PolicyTokens(
        logprob_t=x,
        old_logprob_t=torch.tensor(old),
        advantage_t=torch.tensor(advantage),
        mask_t=torch.tensor(mask).bool(),
        **more,
    )


def grad_of(terms, tokens, scale=1.0):
    value = terms.loss_t.sum() * scale if terms.total is None else terms.total
    return torch.autograd.grad(value, tokens.logprob_t)[0]


# --- against the formula


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "weighted"),
    # An entropy bonus has no importance weight.
    [
        (name, weighted)
        for name in LOSSES
        for weighted in (False, True)
        if not (weighted and name == "entropy")
    ],
)
def test_values_and_gradients_equal_the_formula(name, weighted, dtype):
    """Sequences of 1 to 40 tokens, a quarter of them masked, filler; a multiplier per sequence."""
    batch = make_batch([1, 5, 40, 7], seed=3)
    segment_t = batch.segments.segment_t
    multiplier_t = torch.tensor([0.5, 0.1, 0.3, 0.2, math.nan], dtype=torch.float64)[segment_t]
    multiplier_t = torch.where(batch.tokens.mask_t, multiplier_t, 0.0)
    weight_t = (
        torch.tensor([0.5, 2.0, 0.0, 1.5, math.nan], dtype=torch.float64)[segment_t] if weighted else None
    )
    exact = replace(batch, tokens=replace(batch.tokens, weight_t=weight_t))
    x = batch.tokens.logprob_t.clone().requires_grad_()
    expected_t = reference_loss(name, exact, x)
    (expected_grad,) = torch.autograd.grad((expected_t * multiplier_t).sum(), x)

    ours = batch.tokens.logprob_t.to(dtype).requires_grad_()
    cast = {k: v.to(dtype) for k, v in vars(exact.tokens).items() if v is not None and k != "mask_t"}
    tokens = PolicyTokens(**(cast | {"logprob_t": ours, "mask_t": batch.tokens.mask_t}))
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-11, "atol": 1e-12}
    terms = LOSSES[name](tokens, batch.segments)
    assert terms.total is None and terms.loss_t.dtype == dtype
    torch.testing.assert_close(terms.loss_t.double(), expected_t, **tolerance)
    (grad,) = torch.autograd.grad((terms.loss_t * multiplier_t).sum(), ours)
    torch.testing.assert_close(grad.double(), expected_grad, **tolerance)
    # The same with the sum inside the pass.
    summed = LOSSES[name](replace(tokens, multiplier_t=multiplier_t), batch.segments)
    torch.testing.assert_close(summed.total.double(), (expected_t * multiplier_t).sum(), **tolerance)
    (grad,) = torch.autograd.grad(summed.total, ours)
    torch.testing.assert_close(grad.double(), expected_grad, **tolerance)
    assert all(torch.equal(getattr(summed, field), getattr(terms, field)) for field in FIELDS)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("cispo", "on_policy")])
def test_gradcheck(name):
    """Away from kinks: log ratios 0.05 off every bound. The sum over a sequence, which is what GSPO
    differentiates.
    """
    batch = make_batch([3, 4, 2], seed=5, masked=0.2)
    log_ratio_t = torch.tensor([-0.5, 0.1, 0.6, 1.5, -0.1, 0.02, -0.4, 1.3, 0.05, 0.0, 0.0, 0.0])
    old_t, mask_t = batch.tokens.old_logprob_t, batch.tokens.mask_t

    def total(x):
        tokens = replace(batch.tokens, logprob_t=x)
        loss_t = LOSSES[name](tokens, batch.segments).loss_t
        return torch.zeros(4, dtype=torch.float64).index_add(0, batch.segments.segment_t % 4, loss_t)

    x = (old_t + log_ratio_t.double()).requires_grad_()
    assert mask_t.sum() > 5 and torch.autograd.gradcheck(total, (x,))


def test_gradcheck_of_cispo_where_its_weight_is_constant():
    """Inside the bounds the weight is stopped, so differences of the value are not its gradient."""
    old = torch.zeros(4, dtype=torch.float64)
    x = torch.tensor([0.5, -0.5, 0.9, -2.0], dtype=torch.float64, requires_grad=True)
    mask, advantage = torch.tensor([1, 1, 1, 0]).bool(), torch.tensor([1.0, 2.0, -1.0, 1.0])

    def loss(x):
        tokens = PolicyTokens(logprob_t=x, old_logprob_t=old, advantage_t=advantage.double(), mask_t=mask)
        return cispo_terms(tokens, BOUNDS).loss_t

    assert torch.autograd.gradcheck(loss, (x,))


# --- B21: masked slots


@pytest.mark.parametrize("garbage", [-205.0, -math.inf, math.inf, math.nan])
@pytest.mark.parametrize("field", ["logprob_t", "old_logprob_t", "advantage_t", "weight_t"])
@pytest.mark.parametrize("name", LOSSES)
def test_b21_masked_slots_may_hold_anything(name, field, garbage):
    """Bit-equal to zeros in the masked slots: loss, gradient and every diagnostic; masked exactly 0 / 1 /
    0."""
    batch = make_batch([6, 1, 9], seed=1, dtype=torch.float32)
    mask_t = batch.tokens.mask_t
    tokens = replace(batch.tokens, weight_t=torch.full_like(batch.tokens.logprob_t, 1.5))

    def run(value):
        value_t = torch.where(mask_t, getattr(tokens, field), value)
        dirty = replace(tokens, **{field: value_t})
        x = dirty.logprob_t.clone().requires_grad_()
        terms = LOSSES[name](replace(dirty, logprob_t=x), batch.segments)
        return terms, torch.autograd.grad(terms.loss_t.sum(), x)[0]

    (terms, grad), (clean, clean_grad) = run(garbage), run(0.0)
    assert torch.equal(grad, clean_grad) and grad[mask_t].any() and not grad[~mask_t].any()
    for name_of in FIELDS:
        assert torch.equal(getattr(terms, name_of), getattr(clean, name_of))
    out = ~mask_t
    assert (
        not terms.loss_t[out].any() and not terms.log_ratio_t[out].any() and (terms.ratio_t[out] == 1).all()
    )
    assert not terms.clipped_low_t[out].any() and not terms.clipped_high_t[out].any()


def test_b21_value_and_gradient():
    tokens = tokens_of([-1.0, -2.0, -5.0], [-1.0, -2.1, -205.0], [1.0, 1.0, 1.0], [1, 1, 0])
    terms = clip_terms(tokens, ClipBounds(low=1.0, high=1e9))
    assert (terms.loss_t.sum() / 2).item() == pytest.approx(-1.052585, abs=1e-6)
    assert grad_of(terms, tokens, 0.5).tolist() == pytest.approx([-0.5, -0.552585, 0.0], abs=1e-6)


# --- B31: clip


@pytest.mark.parametrize(
    ("ratio", "advantage", "bounds", "loss", "grad", "low", "high"),
    [
        (5.0, -1.0, DUAL, 3.0, 0.0, False, True),
        (5.0, 1.0, DUAL, -1.28, 0.0, False, True),
        (1.25, 1.0, DUAL, -1.25, -1.25, False, False),
        (0.75, -1.0, DUAL, 0.8, 0.0, True, False),
        (2.5, -1.0, DUAL, 2.5, 2.5, False, False),
        (5.0, -2.0, DUAL, 6.0, 0.0, False, True),
        (5.0, -1.0, BOUNDS, 5.0, 5.0, False, False),
        (5.0, 0.0, DUAL, 0.0, 0.0, False, False),
        (0.5, 0.0, DUAL, 0.0, 0.0, False, False),
    ],
)
def test_b31_dual_clip(ratio, advantage, bounds, loss, grad, low, high):
    """c bounds the loss of negative advantages only, and then there is no gradient."""
    tokens = tokens_of([math.log(ratio)], [0.0], [advantage])
    terms = clip_terms(tokens, bounds)
    assert terms.loss_t.item() == pytest.approx(loss, abs=1e-5)
    assert grad_of(terms, tokens).item() == pytest.approx(grad, abs=1e-5)
    assert (bool(terms.clipped_low_t), bool(terms.clipped_high_t)) == (low, high)


@pytest.mark.parametrize(
    "bounds",
    [
        {"low": 0.2, "high": 0.28, "dual": 1.0},
        {"low": 0.2, "high": 0.28, "dual": 0.5},
        {"low": 0.2, "high": 0.28, "dual": math.nan},
        {"low": -0.1, "high": 0.2},
        {"low": 1.2, "high": 0.2},
        {"low": 0.2, "high": -0.2},
        {"low": math.nan, "high": 0.2},
    ],
)
def test_b31_bounds_that_mean_nothing_are_refused(bounds):
    with pytest.raises(ValueError, match="expected"):
        ClipBounds(**bounds)


def test_a_ratio_beyond_exp_20_is_counted_and_has_no_gradient():
    """Its loss does not depend on the logprob any more: a silent zero gradient would look like a trained
    token."""
    tokens = tokens_of([0.0, 0.0], [-50.0, -10.0], [-1.0, -1.0])
    terms = clip_terms(tokens, BOUNDS)
    assert terms.clipped_high_t.tolist() == [True, False]
    assert grad_of(terms, tokens).tolist() == [0.0, pytest.approx(math.exp(10.0), rel=1e-5)]
    assert terms.loss_t[0].item() == pytest.approx(math.exp(20.0), rel=1e-5)


# --- B30: CISPO


@pytest.mark.parametrize(
    ("logprob", "loss", "grad", "low", "high"),
    [
        (-1.0, 1.28, -1.28, False, True),
        (-2.0, 1.6, -0.8, True, False),
        (-1.4, 1.547239, -1.105171, False, False),
    ],
)
def test_b30_cispo_clips_the_weight_and_keeps_the_gradient(logprob, loss, grad, low, high):
    """PPO's clip would give -1.28 with gradient 0 in the first case; an attached weight more gradient in the
    last."""
    tokens = tokens_of([logprob], [-1.5], [1.0])
    terms = cispo_terms(tokens, BOUNDS)
    assert terms.loss_t.item() == pytest.approx(loss, abs=1e-5)
    assert grad_of(terms, tokens).item() == pytest.approx(grad, abs=1e-5)
    assert (bool(terms.clipped_low_t), bool(terms.clipped_high_t)) == (low, high)


def test_b30_a_dual_clip_is_refused():
    with pytest.raises(ValueError, match="no dual clip"):
        cispo_terms(tokens_of([-1.0], [-1.5], [1.0]), DUAL)


# --- without a ratio


@pytest.mark.parametrize("loss", [reinforce_terms, on_policy_terms])
def test_losses_without_a_ratio_report_one_whatever_the_old_logprob_is(loss):
    """The gradient is -A. Diagnostics are numbers of their own, not the current logprob under another
    name."""
    tokens = tokens_of([-0.5, -2.0, -1.0], [-7.0, math.nan, -1.0], [2.0, -1.0, 3.0], [1, 1, 0])
    terms = loss(tokens)
    assert grad_of(terms, tokens).tolist() == [-2.0, 1.0, 0.0]
    assert terms.loss_t.tolist() == ([1.0, -2.0, 0.0] if loss is reinforce_terms else [-2.0, 1.0, 0.0])
    assert terms.ratio_t.tolist() == [1.0] * 3 and terms.log_ratio_t.tolist() == [0.0] * 3
    assert not terms.clipped_low_t.any() and not terms.clipped_high_t.any()
    own = tokens.logprob_t.untyped_storage().data_ptr()
    assert all(getattr(terms, name).untyped_storage().data_ptr() != own for name in FIELDS)
    assert not terms.ratio_t.requires_grad
    assert replace(tokens, old_logprob_t=None) and torch.equal(
        loss(replace(tokens, old_logprob_t=None)).loss_t, terms.loss_t
    )


def test_a_loss_with_a_ratio_asks_for_the_old_logprob():
    with pytest.raises(ValueError, match="old_logprob_t"):
        clip_terms(replace(tokens_of([-1.0], [-1.0], [1.0]), old_logprob_t=None), BOUNDS)


def test_positive_nll_sees_positive_samples_and_no_advantage():
    """-logprob over the count of positive tokens: (0.5 + 2) / 2; a masked one of them is in neither."""
    tokens = tokens_of([-0.5, -2.0, -3.0, -9.0], [0.0] * 4, [math.nan, 7.0, -1.0, 1.0], [1, 1, 1, 0])
    terms = positive_nll_terms(tokens, torch.tensor([1, 1, 0, 1]).bool())
    assert (terms.loss_t.sum() / 2).item() == pytest.approx(1.25)
    assert grad_of(terms, tokens, 0.5).tolist() == [-0.5, -0.5, 0.0, 0.0]


def test_entropy_bonus_lets_the_gradient_through():
    entropy = torch.tensor([0.5, math.nan, 2.0], requires_grad=True)
    terms = entropy_terms(entropy, torch.tensor([1, 0, 1]).bool())
    assert terms.loss_t.tolist() == [-0.5, 0.0, -2.0]
    assert torch.autograd.grad(terms.loss_t.sum(), entropy)[0].tolist() == [-1.0, 0.0, -1.0]


# --- weights, dtypes


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "entropy"])
def test_a_weight_is_a_constant_factor(name):
    """It scales loss and gradient, and gets no gradient itself (B27 c's wrong gradient was twice as
    large)."""
    batch = make_batch([4, 6], seed=2, dtype=torch.float32, masked=0.0)
    x = batch.tokens.logprob_t.clone().requires_grad_()
    weight = torch.full_like(x, 0.25).requires_grad_()
    plain = LOSSES[name](replace(batch.tokens, logprob_t=x), batch.segments)
    scaled = LOSSES[name](replace(batch.tokens, logprob_t=x, weight_t=weight), batch.segments)
    assert torch.equal(scaled.loss_t, 0.25 * plain.loss_t) and torch.equal(scaled.ratio_t, plain.ratio_t)
    plain_grad, scaled_grad = (torch.autograd.grad(t.loss_t.sum(), x)[0] for t in (plain, scaled))
    assert torch.equal(scaled_grad, 0.25 * plain_grad) and plain_grad.any()
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(
            LOSSES[name](replace(batch.tokens, logprob_t=x, weight_t=weight), batch.segments).loss_t.sum(),
            weight,
        )


@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_is_computed_in_float32(name):
    """The ratio of rounded logprobs, to float32's precision; the gradient comes back in the input's dtype."""
    batch = make_batch([8, 8], seed=4, dtype=torch.bfloat16)
    x = batch.tokens.logprob_t.clone().requires_grad_()
    terms = LOSSES[name](replace(batch.tokens, logprob_t=x), batch.segments)
    exact = {k: v.double() for k, v in vars(batch.tokens).items() if v is not None and k != "mask_t"}
    tokens = PolicyTokens(**exact, mask_t=batch.tokens.mask_t)
    expected_t = reference_loss(
        name, Batch(tokens=tokens, segments=batch.segments, sampler_logprob_t=x), exact["logprob_t"]
    )
    assert terms.loss_t.dtype == torch.float32
    torch.testing.assert_close(terms.loss_t.double(), expected_t, rtol=1e-5, atol=1e-6)
    (grad,) = torch.autograd.grad(terms.loss_t.sum(), x)
    assert grad.dtype == torch.bfloat16 and grad.any()


def test_a_nan_of_a_counting_token_is_not_hidden():
    """The step that holds it must be refused, so no maximum or comparison may swallow it."""
    for name, loss in LOSSES.items():
        batch = make_batch([3], seed=0, dtype=torch.float32, masked=0.0)
        broken_t = torch.where(torch.arange(6) == 1, math.nan, batch.tokens.logprob_t)
        tokens = replace(batch.tokens, logprob_t=broken_t, advantage_t=torch.ones(6))
        if name != "on_policy":
            assert torch.isnan(loss(tokens, batch.segments).loss_t).any(), name
