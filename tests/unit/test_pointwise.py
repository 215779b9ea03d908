"""Compiled losses equal eager ones, stay compiled, and nothing in the family waits for a device."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlcore.ops import pointwise
from rlcore.ops.importance import importance_metrics
from rlcore.ops.loss import ClipBounds, clip_terms
from tests.loss_cases import AGGREGATIONS, CORRECTIONS, KLS, LOSSES, counts_of, make_batch

FIELDS = ("loss_t", "ratio_t", "log_ratio_t", "clipped_low_t", "clipped_high_t")
# 77 tokens: whole vectors, whole lanes, and a rest.
LENGTHS = [30, 1, 40, 3]


@contextmanager
def compiled_from(num_tokens, monkeypatch):
    monkeypatch.setattr(pointwise, "COMPILE_FROM_TOKENS", num_tokens)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


def _outputs(name, batch, multiplier_t, weighted):
    weight_t = torch.full_like(batch.tokens.logprob_t, 0.5) if weighted else None
    x = batch.tokens.logprob_t.clone().requires_grad_()
    tokens = replace(batch.tokens, logprob_t=x, weight_t=weight_t, multiplier_t=multiplier_t)
    terms = LOSSES[name](tokens, batch.segments)
    value = terms.loss_t.sum() if terms.total is None else terms.total
    return [value.detach(), *torch.autograd.grad(value, x), *(getattr(terms, field) for field in FIELDS)]


@pytest.mark.parametrize("name", ["clip", "gspo_dual", "cispo", "positive_nll"])
def test_compiled_equals_eager(name, monkeypatch):
    """float32 to a few roundings, masks of decisions exactly; with and without weight and multiplier."""
    batch = make_batch(LENGTHS, seed=7, dtype=torch.float32)
    for multiplier_t, weighted in ((None, False), (torch.full((77,), 0.25), True)):
        eager = _outputs(name, batch, multiplier_t, weighted)
        with compiled_from(1, monkeypatch):
            compiled = _outputs(name, batch, multiplier_t, weighted)
        monkeypatch.undo()
        for ours, expected in zip(compiled, eager, strict=True):
            torch.testing.assert_close(ours, expected, rtol=2e-6, atol=1e-6)
        assert compiled[0] != 0


def test_kl_and_importance_compiled_equal_eager(monkeypatch):
    batch = make_batch(LENGTHS, seed=8, dtype=torch.float32)
    x = batch.tokens.logprob_t.clone().requires_grad_()

    def run():
        kl = KLS["k3_score"](x, batch.sampler_logprob_t, batch.tokens.mask_t)
        args = (batch.tokens.old_logprob_t, batch.sampler_logprob_t, batch.tokens.mask_t, batch.segments)
        weights = CORRECTIONS["geometric"](*args)
        return [kl.kl_t, kl.clamped_t, *torch.autograd.grad(kl.kl_t.sum(), x), weights.weight_t]

    eager = run()
    with compiled_from(1, monkeypatch):
        compiled = run()
    for ours, expected in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-6, atol=1e-6)


def test_a_new_epsilon_is_no_new_compilation(monkeypatch):
    """Numbers baked into the code would be compiled again for each value and, past eight, run eagerly."""
    batch = make_batch([60], seed=9, dtype=torch.float32)
    with compiled_from(1, monkeypatch):
        clip_terms(batch.tokens, ClipBounds(low=0.2, high=0.2))
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for step in range(12):
            bounds = ClipBounds(low=0.1 + 0.01 * step, high=0.3, dual=2.0 + step)
            terms = clip_terms(make_batch([70 + step], dtype=torch.float32).tokens, bounds)
            assert terms.loss_t.isfinite().all()
        # One more may be made when the first new size comes by.
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= before + 1


class _NoReadBack(TorchDispatchMode):
    """Fails on every operation that reads a tensor's value back or whose result's shape depends on it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "item", "nonzero", "masked_select", "_unique2", "equal"), (
            name
        )
        return func(*args, **(kwargs or {}))


def test_the_guard_against_reading_back_guards():
    for read in (lambda t: t.sum().item(), lambda t: t.nonzero(), lambda t: bool(t.any())):
        with _NoReadBack(), pytest.raises(AssertionError):
            read(torch.ones(3))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nothing_reads_a_value_back(device):
    """Meta tensors have no value at all; on the CPU every dispatched operation is looked at, backward
    included."""
    batch = make_batch(LENGTHS, dtype=torch.float32)
    whole = {name: value.to(device) for name, value in vars(batch.tokens).items() if value is not None}
    tokens = replace(batch.tokens, **whole)
    segments = replace(batch.segments, segment_t=batch.segments.segment_t.to(device))
    sampler_t, old_t, mask_t = batch.sampler_logprob_t.to(device), tokens.old_logprob_t, tokens.mask_t
    with _NoReadBack():
        counts = counts_of(mask_t, segments)
        multipliers = [make(mask_t, segments, counts) for make in AGGREGATIONS.values()]
        for correct in filter(None, CORRECTIONS.values()):
            weights = correct(old_t, sampler_t, mask_t, segments)
            importance_metrics(weights, mask_t)
        for loss in LOSSES.values():
            x = tokens.logprob_t.clone().requires_grad_()
            ready = replace(tokens, logprob_t=x, weight_t=weights.weight_t, multiplier_t=multipliers[1])
            assert torch.autograd.grad(loss(ready, segments).total, x)[0].device.type == device
        for kl in KLS.values():
            x = tokens.logprob_t.clone().requires_grad_()
            assert torch.autograd.grad(kl(x, sampler_t, mask_t).kl_t.sum(), x)[0].shape == x.shape


def test_the_inputs_are_left_alone():
    batch = make_batch(LENGTHS, dtype=torch.float32)
    before = {name: value.clone() for name, value in vars(batch.tokens).items() if value is not None}
    for loss in LOSSES.values():
        x = batch.tokens.logprob_t.clone().requires_grad_()
        loss(replace(batch.tokens, logprob_t=x), batch.segments).loss_t.sum().backward()
        assert torch.equal(x, before["logprob_t"])
    assert all(torch.equal(getattr(batch.tokens, name), value) for name, value in before.items())


def test_strided_views_are_legal(monkeypatch):
    """Every second token of a longer tensor, eager and compiled."""
    batch = make_batch([40, 50], seed=2, dtype=torch.float32)
    spread = {
        name: torch.stack([value, value], dim=1)[:, 0]
        for name, value in vars(batch.tokens).items()
        if value is not None
    }
    segments = replace(batch.segments, segment_t=torch.stack([batch.segments.segment_t] * 2, dim=1)[:, 0])
    for name in ("clip", "gspo"):
        expected = LOSSES[name](batch.tokens, batch.segments).loss_t
        for start in (1 << 30, 1):
            with compiled_from(start, monkeypatch):
                ours = LOSSES[name](replace(batch.tokens, **spread), segments).loss_t
            torch.testing.assert_close(ours, expected, rtol=2e-6, atol=1e-6)
