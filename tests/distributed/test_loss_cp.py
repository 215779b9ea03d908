"""Sequences cut over context-parallel ranks: losses, aggregations and corrections equal those of one
process."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from rlcore.collectives import record_collectives
from tests.loss_cases import AGGREGATIONS, CORRECTIONS, LOSSES, counts_of, make_batch, reference_loss
from tests.rank_pool import run_ranks

# Two long sequences that every rank holds a part of, one token alone, and a sequence that ends up fully
# masked.
LENGTHS = [9, 1, 14, 3]


def whole_batch():
    batch = make_batch(LENGTHS, seed=11)
    mask_t = batch.tokens.mask_t & (batch.segments.segment_t != 3)
    return replace(batch, tokens=replace(batch.tokens, mask_t=mask_t))


def share_of(batch, rank, world_size):
    """Chunks rank and 2 n - 1 - rank of the tokens, as zig-zag does; rank 0 of 4 holds no counting token at
    all."""
    index_t = torch.arange(batch.tokens.mask_t.shape[0])
    chunks = index_t.chunk(2 * world_size)
    return torch.cat([chunks[rank], chunks[2 * world_size - 1 - rank]])


def evaluate(name, aggregation, correction, batch, group):
    """Value (this rank's part), gradient, weights, number of all-reduces in forward and backward."""
    tokens, segments = batch.tokens, batch.segments
    x = tokens.logprob_t.clone().requires_grad_()
    mask_t = tokens.mask_t
    with record_collectives() as calls:
        correct = CORRECTIONS[correction]
        if correct is not None:
            weights = correct(tokens.old_logprob_t, batch.sampler_logprob_t, mask_t, segments, group)
            tokens = replace(tokens, mask_t=mask_t & weights.kept_t, weight_t=weights.weight_t)
        counts = counts_of(mask_t, segments, group)
        multiplier_t = AGGREGATIONS[aggregation](mask_t, segments, counts).double()
        before = len(calls)
        terms = LOSSES[name](replace(tokens, logprob_t=x, multiplier_t=multiplier_t), segments, group)
        in_loss = len(calls) - before
        (grad,) = torch.autograd.grad(terms.total, x)
        assert len(calls) == before + in_loss, "a collective in backward"
    return terms, grad, in_loss, [(call.kind, call.num_bytes) for call in calls]


def _shares(rank, world_size, name, aggregation, correction):
    batch = whole_batch()
    own_t = share_of(batch, rank, world_size)
    terms, grad, in_loss, calls = evaluate(
        name, aggregation, correction, batch.permuted(own_t), dist.group.WORLD
    )
    return own_t, terms.total.detach(), terms.loss_t, terms.ratio_t, grad, in_loss, calls


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("name", "aggregation", "correction"),
    [
        *((name, "seq_mean_token_mean", "none") for name in LOSSES),
        *(("gspo", aggregation, "geometric") for aggregation in AGGREGATIONS),
        *(("clip", "seq_mean_token_mean", name) for name in CORRECTIONS),
    ],
)
def test_ranks_add_up_to_one_process(name, aggregation, correction, world_size):
    """Value, every token's loss, ratio and gradient to 1e-12; the same collectives on every rank."""
    terms, grad, *_ = evaluate(name, aggregation, correction, whole_batch(), None)
    parts = run_ranks(_shares, world_size, name, aggregation, correction)
    assert sum(float(part[1]) for part in parts) == pytest.approx(terms.total.item(), abs=1e-12)
    for own_t, _, loss_t, ratio_t, own_grad, in_loss, calls in parts:
        torch.testing.assert_close(loss_t, terms.loss_t.detach()[own_t], rtol=0, atol=1e-12)
        torch.testing.assert_close(ratio_t, terms.ratio_t[own_t], rtol=0, atol=1e-12)
        torch.testing.assert_close(own_grad, grad[own_t], rtol=0, atol=1e-12)
        assert in_loss == (1 if name.startswith("gspo") else 0) and calls == parts[0][6]
        assert all(call == ("all_reduce", 16 * len(LENGTHS)) for call in calls)
    assert grad.any()


def test_the_gradient_of_one_process_is_that_of_the_formula():
    """What the ranks are compared with: GSPO over whole sequences, differentiated by autograd."""
    batch = whole_batch()
    _, grad, *_ = evaluate("gspo", "seq_mean_token_mean", "none", batch, None)
    x = batch.tokens.logprob_t.clone().requires_grad_()
    counts = counts_of(batch.tokens.mask_t, batch.segments)
    multiplier_t = AGGREGATIONS["seq_mean_token_mean"](batch.tokens.mask_t, batch.segments, counts)
    (expected,) = torch.autograd.grad((reference_loss("gspo", batch, x) * multiplier_t).sum(), x)
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-8)
