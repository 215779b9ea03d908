"""k3 against the reference policy: direction, clamps, gradient, masked slots."""

import math

import pytest
import torch

from rlcore.ops.kl import KL_ESTIMATORS, KLRule, adapted_coefficient, k3, kl_reward_penalty


def run(logprob, reference, mask=None):
    x = torch.tensor(logprob, requires_grad=True)
    mask = torch.ones(len(logprob)).bool() if mask is None else torch.tensor(mask).bool()
    terms = k3(x, torch.tensor(reference), mask)
    (grad,) = torch.autograd.grad(terms.kl_t.sum(), x)
    return terms, grad


def test_b25_direction_and_gradient():
    """k3(policy || reference); swapped arguments would give .222119. The gradient is that of the score
    function, -d.
    """
    terms, grad = run([-1.0], [-1.6])
    assert terms.kl_t.item() == pytest.approx(0.148812, abs=1e-6)
    assert grad.item() == pytest.approx(0.6, abs=1e-6)


@pytest.mark.parametrize("reference", [-2.0, 1e4])
def test_b25_a_clamped_token_is_counted_and_has_no_gradient(reference):
    terms, grad = run([-30.0], [reference])
    assert terms.kl_t.item() == 10.0 and grad.item() == 0.0 and bool(terms.clamped_t)


def test_the_other_side_is_finite_too():
    """exp(-1e4) is 0 and the linear term is large: clamped, counted, finite."""
    terms, grad = run([0.0], [-1e4])
    assert terms.kl_t.item() == 10.0 and grad.item() == 0.0 and bool(terms.clamped_t)


def test_half_precision_is_computed_in_float32():
    x = torch.tensor([-1.0], dtype=torch.float16)
    terms = k3(x, torch.tensor([11.0], dtype=torch.float16), torch.tensor([True]))
    assert terms.kl_t.dtype == torch.float32 and terms.kl_t.item() == 10.0


@pytest.mark.parametrize("garbage", [-math.inf, math.inf, math.nan])
def test_masked_slots_may_hold_anything(garbage):
    terms, grad = run([-1.0, garbage], [-1.6, garbage], [1, 0])
    assert terms.kl_t[1] == 0.0 and torch.equal(grad, torch.tensor([grad[0].item(), 0.0]))
    assert not terms.clamped_t[1]


def test_the_expected_gradient_is_that_of_the_kl_divergence():
    """Summed over the vocabulary with the policy's weights, the estimator's gradient equals d KL(p || q) / d
    logits.
    """
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(6, dtype=torch.float64, generator=generator).requires_grad_()
    logq = torch.log_softmax(torch.randn(6, dtype=torch.float64, generator=generator), dim=0)
    logp = torch.log_softmax(z, dim=0)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - logq)).sum(), z, retain_graph=True)
    estimate = k3(logp, logq, torch.ones(6).bool()).kl_t
    (ours,) = torch.autograd.grad((logp.detach().exp() * estimate).sum(), z)
    assert torch.allclose(ours, exact, atol=1e-12)


# --- the family ---------------------------------------------------------------------------------------------

LOGPROB, REFERENCE = [-1.0, -2.0, -0.5], [-1.6, -1.5, -0.5]
# d = .6, -.5, 0.
VALUES = {
    "k1": [0.6, -0.5, 0.0],
    "k2": [0.18, 0.125, 0.0],
    "k3": [0.148812, 0.148721, 0.0],
    "abs": [0.6, 0.5, 0.0],
    "mse": [0.18, 0.125, 0.0],
}
PLAIN = {
    "k1": [1.0, 1.0, 1.0],
    "k2": [0.6, -0.5, 0.0],
    "k3": [1 - math.exp(-0.6), 1 - math.exp(0.5), 0.0],
    "abs": [1.0, -1.0, 0.0],
    "mse": [0.6, -0.5, 0.0],
}


def run_family(name, logprob, reference, mask=None, **rule):
    x = torch.tensor(logprob, requires_grad=True)
    mask_t = torch.ones(len(logprob)).bool() if mask is None else torch.tensor(mask).bool()
    terms = KL_ESTIMATORS[name](x, torch.tensor(reference), mask_t, KLRule(**rule))
    return terms, torch.autograd.grad(terms.kl_t.sum(), x)[0]


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_b25_values_and_both_gradients_by_hand(name):
    """score = plain + value: see the table in the module."""
    terms, grad = run_family(name, LOGPROB, REFERENCE, gradient="plain")
    assert terms.kl_t.tolist() == pytest.approx(VALUES[name], abs=1e-6)
    assert grad.tolist() == pytest.approx(PLAIN[name], abs=1e-6) and not terms.clamped_t.any()
    same, score = run_family(name, LOGPROB, REFERENCE)
    assert torch.equal(same.kl_t, terms.kl_t)
    both = [plain + value for plain, value in zip(PLAIN[name], VALUES[name], strict=True)]
    assert score.tolist() == pytest.approx(both, abs=1e-6)
    if name == "k3":
        assert score.tolist() == pytest.approx([0.6, -0.5, 0.0], abs=1e-6)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_the_expected_score_gradient_is_that_of_the_expected_value(name):
    """Over the whole vocabulary; for k1 and k3 it is the KL divergence's too, for the others it is not."""
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(7, dtype=torch.float64, generator=generator).requires_grad_()
    logq = torch.log_softmax(torch.randn(7, dtype=torch.float64, generator=generator), dim=0)
    logp, mask_t = torch.log_softmax(z, dim=0), torch.ones(7).bool()
    d = logp - logq
    value = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d, "abs": d.abs(), "mse": d**2 / 2}[name]
    (exact,) = torch.autograd.grad((logp.exp() * value).sum(), z, retain_graph=True)
    (kl,) = torch.autograd.grad((logp.exp() * d).sum(), z, retain_graph=True)
    ours = KL_ESTIMATORS[name](logp, logq, mask_t).kl_t
    (score,) = torch.autograd.grad((logp.detach().exp() * ours).sum(), z, retain_graph=True)
    torch.testing.assert_close(score, exact, rtol=0, atol=1e-12)
    assert ((score - kl).abs().max() < 1e-12) == (name in ("k1", "k3"))
    plain = KL_ESTIMATORS[name](logp, logq, mask_t, KLRule(gradient="plain")).kl_t
    (plain_grad,) = torch.autograd.grad((logp.detach().exp() * plain).sum(), z)
    if name == "k1":
        assert plain_grad.abs().max() < 1e-12
    if name in ("k2", "mse"):
        torch.testing.assert_close(plain_grad, kl, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_gradcheck_of_the_plain_gradient(name):
    """The score gradient is none of the value: checked above by its formula."""
    x = torch.tensor([-1.0, -2.0, -30.0, -0.7], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.6, -1.5, -2.0, math.nan], dtype=torch.float64)
    mask_t, rule = torch.tensor([1, 1, 1, 0]).bool(), KLRule(gradient="plain")
    assert torch.autograd.gradcheck(lambda x: KL_ESTIMATORS[name](x, reference, mask_t, rule).kl_t, (x,))


def test_b25_clamps():
    """d = -28: input clamp 20, output clamp 10; without that exp(20) - 21; counted, and without gradient."""
    for gradient in ("score", "plain"):
        terms, grad = run_family("k3", [-30.0], [-2.0], gradient=gradient)
        assert (terms.kl_t.item(), grad.item(), bool(terms.clamped_t)) == (10.0, 0.0, True)
        terms, grad = run_family("k3", [-30.0], [-2.0], gradient=gradient, output_clamp=None)
        assert terms.kl_t.item() == pytest.approx(485165174.4, rel=1e-7)
        assert grad.item() == 0.0 and bool(terms.clamped_t)
    terms, grad = run_family("k1", [-30.0, -12.0, -9.0], [-2.0, -1.0, -1.0])
    assert terms.kl_t.tolist() == [-10.0, -10.0, -8.0] and terms.clamped_t.tolist() == [True, True, False]
    assert grad.tolist() == [0.0, 0.0, -7.0]


def test_b25_float16_is_computed_in_float32():
    """exp(12) is inf in float16; the gradient comes back in float16."""
    x = torch.tensor([-13.0], dtype=torch.float16, requires_grad=True)
    rule = KLRule(output_clamp=None)
    terms = k3(x, torch.tensor([-1.0], dtype=torch.float16), torch.tensor([True]), rule)
    assert terms.kl_t.item() == pytest.approx(math.exp(12) - 13, rel=1e-6)
    (grad,) = torch.autograd.grad(terms.kl_t.sum(), x)
    assert grad.dtype == torch.float16 and grad.item() == -12.0


@pytest.mark.parametrize("garbage", [-math.inf, math.inf, math.nan, 0.0])
@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_b21_masked_slots_of_every_estimator(name, garbage):
    terms, grad = run_family(name, [-1.0, garbage, garbage], [-1.6, garbage, -1.0], [1, 0, 0])
    assert terms.kl_t[1:].tolist() == [0.0, 0.0] and grad[1:].tolist() == [0.0, 0.0]
    assert terms.kl_t[0].item() == pytest.approx(VALUES[name][0], abs=1e-6) and not terms.clamped_t.any()


def test_the_sum_inside_the_pass():
    x = torch.tensor(LOGPROB, requires_grad=True)
    multiplier = torch.tensor([0.5, 0.25, 1.0])
    terms = k3(x, torch.tensor(REFERENCE), torch.ones(3).bool(), multiplier_t=multiplier)
    assert terms.total is not None
    assert terms.total.item() == pytest.approx(0.148812 / 2 + 0.148721 / 4, abs=1e-6)
    assert torch.autograd.grad(terms.total, x)[0].tolist() == pytest.approx([0.3, -0.125, 0.0], abs=1e-6)


def test_the_reward_penalty_is_a_constant():
    x = torch.tensor([-1.0, -2.0], requires_grad=True)
    penalty = kl_reward_penalty(x, torch.tensor([-1.6, math.nan]), torch.tensor([True, False]), 0.1)
    assert penalty.tolist() == pytest.approx([0.06, 0.0]) and not penalty.requires_grad
    penalty = kl_reward_penalty(x, torch.tensor([-1.6, -1.5]), torch.ones(2).bool(), 2.0, estimator="k3")
    assert penalty.tolist() == pytest.approx([0.297624, 0.297442], abs=1e-5)


def test_the_coefficient_follows_its_target():
    """Proportional up to 20% error, then constant; 10 steps of a horizon of 100."""
    follow = {"target_kl": 6.0, "num_steps": 10, "horizon": 100}
    assert adapted_coefficient(0.2, 6.6, **follow) == pytest.approx(0.2 * 1.01)
    assert adapted_coefficient(0.2, 60.0, **follow) == pytest.approx(0.2 * 1.02)
    assert adapted_coefficient(0.2, 0.0, **follow) == pytest.approx(0.2 * 0.98)
    assert adapted_coefficient(0.2, 6.0, **follow) == 0.2
    assert adapted_coefficient(0.2, math.nan, **follow) == 0.2
    assert adapted_coefficient(0.2, 0.0, target_kl=6.0, num_steps=1000, horizon=100) == 0.0
    with pytest.raises(ValueError, match="positive"):
        adapted_coefficient(0.2, 1.0, target_kl=0.0, num_steps=1, horizon=1)


@pytest.mark.parametrize(
    "rule",
    [
        {"gradient": "k3"},
        {"input_clamp": 0.0},
        {"input_clamp": 90.0},
        {"output_clamp": 0.0},
        {"output_clamp": math.nan},
    ],
)
def test_rules_that_mean_nothing_are_refused(rule):
    with pytest.raises(ValueError, match="expected"):
        KLRule(**rule)
