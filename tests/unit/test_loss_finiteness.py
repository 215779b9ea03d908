"""10,000 adversarial batches through every loss x aggregation x importance correction x KL: finite, always.

A batch is one segment of a long tensor: a few tokens whose logprobs, advantages and weights are extreme,
whose masked slots hold infinities and NaN. Each is looked at by itself, and all as one step.
"""

from dataclasses import replace

import pytest
import torch

from rlcore.metrics import reduce_metrics
from rlcore.ops import pointwise
from rlcore.ops.importance import importance_metrics
from rlcore.ops.loss import PolicyTokens
from rlcore.ops.segments import Segments
from tests.loss_cases import AGGREGATIONS, CORRECTIONS, KLS, LOSSES, Batch, counts_of

NUM_BATCHES = 10_000
TOKENS_PER_BATCH = 8
FINITE = [0.0, -1e-30, -1e-4, -1.0, -50.0, -1e4]
GARBAGE = [float("nan"), float("inf"), float("-inf"), -1e4, 3e38]
ADVANTAGES = [0.0, 1.0, -1.0, 1e6, -1e6, 1e-30]
# What a sampler may say of a token that counts: it drew it, so not -inf; but an engine may underflow to it.
SAMPLER = [*FINITE, float("-inf")]


def adversarial() -> Batch:
    """Every batch: extreme values where it counts, garbage where masked; -inf where a keep flag is False."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = NUM_BATCHES * TOKENS_PER_BATCH

    def pick(values):
        return torch.tensor(values)[torch.randint(len(values), (num_tokens,), generator=generator)]

    def chance(probability):
        return torch.rand(num_tokens, generator=generator) < probability

    segment_t = torch.arange(num_tokens) // TOKENS_PER_BATCH
    # Some batches have no counting token at all.
    masked_t = chance(0.3) | (segment_t % 11 == 0)
    keep_old_t, keep_t = ~chance(0.1), ~chance(0.1)
    logprob_t = torch.where(keep_t, pick(FINITE), float("-inf"))
    old_t = torch.where(keep_old_t, pick(FINITE), float("-inf"))
    fields = {"logprob_t": logprob_t, "old_logprob_t": old_t, "advantage_t": pick(ADVANTAGES)}
    fields = {name: torch.where(masked_t, pick(GARBAGE), value) for name, value in fields.items()}
    order_t = torch.randperm(num_tokens, generator=generator)
    batch = Batch(
        tokens=PolicyTokens(**fields, mask_t=~masked_t & keep_old_t & keep_t),
        segments=Segments(segment_t=segment_t, num_segments=NUM_BATCHES),
        sampler_logprob_t=torch.where(masked_t, pick(GARBAGE), pick(SAMPLER)),
    )
    return batch.permuted(order_t)


BATCH = adversarial()


def assert_finite(**values):
    for name, value in values.items():
        assert torch.isfinite(value).all(), f"{name}: {int((~torch.isfinite(value)).sum())} not finite"


def test_the_batches_are_adversarial():
    """The plain formula on the same numbers is not finite: the fuzz would notice."""
    tokens, mask_t = BATCH.tokens, BATCH.tokens.mask_t
    assert mask_t.sum() > 30_000
    naive_t = (tokens.logprob_t - tokens.old_logprob_t).exp() * tokens.advantage_t
    assert torch.isnan(naive_t * mask_t).sum() > 1000 and torch.isinf(naive_t[mask_t]).sum() > 1000
    assert torch.isneginf(tokens.logprob_t[~mask_t]).sum() > 1000


@pytest.mark.parametrize("compile_from", [1, 1 << 30], ids=["compiled", "eager"])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_loss_and_aggregation(correction, compile_from, monkeypatch):
    monkeypatch.setattr(pointwise, "COMPILE_FROM_TOKENS", compile_from)
    tokens, segments, mask_t = BATCH.tokens, BATCH.segments, BATCH.tokens.mask_t
    if CORRECTIONS[correction] is not None:
        weights = CORRECTIONS[correction](tokens.old_logprob_t, BATCH.sampler_logprob_t, mask_t, segments)
        assert_finite(weight=weights.weight_t, log_weight=weights.log_weight_t)
        metrics = reduce_metrics(importance_metrics(weights, mask_t))
        assert_finite(metrics=torch.tensor(list(metrics.values())))
        tokens = replace(tokens, mask_t=mask_t & weights.kept_t, weight_t=weights.weight_t)
    counts = counts_of(mask_t, segments)
    for aggregation, make in AGGREGATIONS.items():
        multiplier_t = make(mask_t, segments, counts)
        for name, loss in LOSSES.items():
            x = tokens.logprob_t.clone().requires_grad_()
            terms = loss(replace(tokens, logprob_t=x, multiplier_t=multiplier_t), segments)
            (grad,) = torch.autograd.grad(terms.total, x)
            where = f"{name}/{aggregation}"
            # Each batch's own loss and gradient, and the step's.
            each_s = torch.zeros(NUM_BATCHES).index_add(0, segments.segment_t, terms.loss_t * multiplier_t)
            assert_finite(**{f"{where} total": terms.total, f"{where} batch": each_s, f"{where} grad": grad})
            assert_finite(ratio=terms.ratio_t, log_ratio=terms.log_ratio_t)
            assert not grad[~tokens.mask_t].any() and not terms.loss_t[~tokens.mask_t].any(), where


@pytest.mark.parametrize("name", KLS)
def test_every_kl(name):
    """The reference is never truncated, but may be as far away as it likes."""
    x = BATCH.tokens.logprob_t.clone().requires_grad_()
    terms = KLS[name](x, BATCH.tokens.old_logprob_t, BATCH.tokens.mask_t)
    (grad,) = torch.autograd.grad(terms.kl_t.sum(), x)
    assert_finite(kl=terms.kl_t, grad=grad)
    assert terms.clamped_t.sum() > 1000 and not grad[terms.clamped_t | ~BATCH.tokens.mask_t].any()
