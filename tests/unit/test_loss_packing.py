"""Property: packing, permuting, splitting sequences over microbatches changes nothing but the order."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.ops.aggregation import LossCounts, count_sequences, count_tokens
from tests.loss_cases import AGGREGATIONS, CORRECTIONS, LOSSES, make_batch

PROBLEM = {
    "lengths": st.lists(st.integers(1, 30), min_size=1, max_size=7),
    "seed": st.integers(0, 1000),
    "name": st.sampled_from(sorted(LOSSES)),
    "aggregation": st.sampled_from(sorted(AGGREGATIONS)),
    "correction": st.sampled_from(sorted(CORRECTIONS)),
    "masked": st.sampled_from([0.0, 0.3, 0.8]),
}


def evaluate(batch, name, aggregation, correction, counts=None):
    """Value, gradient, each token's loss and weight; `counts`: the step's, None for this microbatch's own."""
    tokens, segments, mask_t = batch.tokens, batch.segments, batch.tokens.mask_t
    weight_t = torch.ones_like(tokens.logprob_t)
    if CORRECTIONS[correction] is not None:
        weights = CORRECTIONS[correction](tokens.old_logprob_t, batch.sampler_logprob_t, mask_t, segments)
        tokens = replace(tokens, mask_t=mask_t & weights.kept_t, weight_t=weights.weight_t)
        weight_t = weights.weight_t
    num_tokens_s = count_tokens(mask_t, segments)
    num_tokens, num_sequences = counts or (num_tokens_s.sum(), count_sequences(num_tokens_s))
    multiplier_t = AGGREGATIONS[aggregation](
        mask_t,
        segments,
        LossCounts(num_tokens=num_tokens, num_sequences=num_sequences, num_tokens_s=num_tokens_s),
    )
    x = tokens.logprob_t.clone().requires_grad_()
    terms = LOSSES[name](replace(tokens, logprob_t=x, multiplier_t=multiplier_t.double()), segments)
    (grad,) = torch.autograd.grad(terms.total, x)
    return terms.total.detach(), grad, terms.loss_t, weight_t


@settings(max_examples=150, deadline=None, derandomize=True)
@given(**PROBLEM)
def test_the_order_of_tokens_does_not_matter(lengths, seed, name, aggregation, correction, masked):
    """Any permutation of tokens, filler among them: every token keeps its loss, weight and gradient."""
    batch = make_batch(lengths, seed=seed, masked=masked)
    order_t = torch.randperm(batch.tokens.mask_t.shape[0], generator=torch.Generator().manual_seed(seed))
    value, *per_token = evaluate(batch, name, aggregation, correction)
    moved, *moved_per_token = evaluate(batch.permuted(order_t), name, aggregation, correction)
    torch.testing.assert_close(moved, value, rtol=1e-9, atol=1e-12)
    for ours, expected in zip(moved_per_token, per_token, strict=True):
        torch.testing.assert_close(ours, expected[order_t], rtol=1e-9, atol=1e-12)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(**PROBLEM, cut=st.integers(0, 7))
def test_how_sequences_are_packed_into_microbatches_does_not_matter(
    lengths, seed, name, aggregation, correction, masked, cut
):
    """The first sequences in one microbatch and the rest in another, with the step's counts: parts add up."""
    batch = make_batch(lengths, seed=seed, masked=masked)
    value, grad, *_ = evaluate(batch, name, aggregation, correction)
    num_tokens_s = count_tokens(batch.tokens.mask_t, batch.segments)
    counts = (num_tokens_s.sum(), count_sequences(num_tokens_s))
    total, parts = 0.0, torch.zeros_like(grad)
    first_t = (batch.segments.segment_t >= 0) & (batch.segments.segment_t < cut)
    for choice_t in (first_t, ~first_t):
        index_t = choice_t.nonzero()[:, 0]
        part, part_grad, *_ = evaluate(batch.permuted(index_t), name, aggregation, correction, counts)
        total, parts[index_t] = total + part, part_grad
    torch.testing.assert_close(total, value, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(parts, grad, rtol=1e-9, atol=1e-12)
