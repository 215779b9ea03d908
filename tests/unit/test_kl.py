"""k3 against the reference policy: direction, clamps, gradient, masked slots."""

import math

import pytest
import torch

from rlcore.ops.kl import k3


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
