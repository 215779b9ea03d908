"""The fused head with vocabulary and tokens cut over gloo ranks: values, both gradients, collectives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rlcore.collectives import record_collectives
from rlcore.ops.linear_logprob import linear_logprob_loss, linear_vocab_parallel_logprob
from rlcore.ops.logprob import VocabShard
from rlcore.ops.reference import reference_logprob
from rlcore.sampling import SamplingSpec
from tests.linear_cases import assert_near, make_head, sum_of_chunk, weighted_sum
from tests.oracle import assert_same_values, make_weights
from tests.rank_pool import RankError, run_ranks

pytestmark = pytest.mark.distributed

SPECS = [
    SamplingSpec(),
    SamplingSpec(temperature=0.7, top_k=4, top_p=0.9),
    SamplingSpec(min_p=0.05, ties="all"),
    SamplingSpec(top_p=0.8),
]
D = 6


def my_rows(rank, world_size, vocab_size, uneven):
    """This rank's ids [start, stop) and its number of padding rows, as Megatron cuts, or uneven."""
    if uneven:
        start, stop = (vocab_size * r * r // world_size**2 for r in (rank, rank + 1))
        return start, stop, 0
    width = -(-vocab_size // world_size)
    start, stop = (min(r * width, vocab_size) for r in (rank, rank + 1))
    return start, stop, width - (stop - start)


def _check_layout(rank, world_size, vocab_size, uneven, sequence_parallel, chunk_tokens):
    group, num_tokens = dist.group.WORLD, 12
    hidden, weight, target_t = make_head(num_tokens, vocab_size, D, seed=9)
    weights = {name: w.double() for name, w in make_weights(num_tokens, seed=3).items()}
    start, stop, padding = my_rows(rank, world_size, vocab_size, uneven)
    vocab = VocabShard(start=start, vocab_size=vocab_size)
    pad = torch.full((padding, D), torch.nan, dtype=torch.float64)
    mine = slice(rank * num_tokens // world_size, (rank + 1) * num_tokens // world_size)
    mine = mine if sequence_parallel else slice(None)
    options = {
        "entropy": True,
        "chunk_tokens": chunk_tokens,
        "sequence_parallel": sequence_parallel,
    }
    for spec in SPECS:
        reference = reference_logprob(hidden @ weight.t(), target_t, spec)
        expected_loss = weighted_sum(reference, weights)
        expected = torch.autograd.grad(expected_loss, (hidden, weight))
        hidden_td = hidden.detach()[mine].clone().requires_grad_()
        weight_vd = torch.cat([weight.detach()[start:stop], pad]).requires_grad_()
        result = linear_vocab_parallel_logprob(hidden_td, weight_vd, target_t, spec, group, vocab, **options)
        assert_same_values(result, reference, tolerance=1e-9, hint=spec)
        loss, _ = linear_logprob_loss(
            hidden_td, weight_vd, target_t, spec, sum_of_chunk(weights), group, vocab, **options
        )
        assert loss.item() == pytest.approx(expected_loss.item(), abs=1e-9)
        for value in (weighted_sum(result, weights), loss):
            hidden_grad, weight_grad = torch.autograd.grad(value, (hidden_td, weight_vd))
            assert_near(hidden_grad, expected[0][mine], 1e-9)
            if stop > start:
                assert_near(weight_grad[: stop - start], expected[1][start:stop], 1e-9)
            assert not weight_grad[stop - start :].any()


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
# 5 ids: TP 4 leaves a shard of padding only, uneven cuts leave an empty one; 5 tokens a chunk divide nothing.
@pytest.mark.parametrize(("vocab_size", "chunk_tokens"), [(5, 64), (66, 5)])
def test_every_layout_equals_the_whole(world_size, uneven, sequence_parallel, vocab_size, chunk_tokens):
    run_ranks(_check_layout, world_size, vocab_size, uneven, sequence_parallel, chunk_tokens)


def _partial_gradients(rank, world_size):
    group = dist.group.WORLD
    hidden, weight, target_t = make_head(6, 20, D)
    width = 20 // world_size
    weight_vd = weight.detach()[rank * width : (rank + 1) * width].clone().requires_grad_()
    (expected,) = torch.autograd.grad(
        reference_logprob(hidden @ weight.t(), target_t, SPECS[1]).log_mass_t.sum(), hidden
    )
    result = linear_vocab_parallel_logprob(
        hidden, weight_vd, target_t, SPECS[1], group, reduce_hidden_grad=False, chunk_tokens=4
    )
    loss, _ = linear_logprob_loss(
        hidden, weight_vd, target_t, SPECS[1], lambda s, _: (s.log_mass_t.sum(), None), group,
        reduce_hidden_grad=False, chunk_tokens=4,
    )  # fmt: skip
    for value in (result.log_mass_t.sum(), loss):
        (part,) = torch.autograd.grad(value, hidden)
        assert not torch.allclose(part, expected)
        total = part.clone()
        dist.all_reduce(total)
        assert_near(total, expected, 1e-9)


def test_without_reduction_the_shards_parts_add_up():
    """What Megatron's copy region adds up itself must not be added up twice."""
    run_ranks(_partial_gradients, 2)


T, CHUNK = 12, 5


def _count(rank, world_size, form, sequence_parallel, frozen):
    hidden, weight, target_t = make_head(T, 40, D, dtype=torch.float32)
    mine = hidden.detach()[rank * T // 2 : (rank + 1) * T // 2] if sequence_parallel else hidden.detach()
    hidden_td = mine.clone().requires_grad_(not frozen)
    weight_vd = weight.detach()[rank * 20 : (rank + 1) * 20].clone().requires_grad_()
    arguments = (hidden_td, weight_vd, target_t, SamplingSpec(top_k=3))
    options = {"chunk_tokens": CHUNK, "sequence_parallel": sequence_parallel}
    with record_collectives() as forward:
        if form == "loss":
            loss, _ = linear_logprob_loss(
                *arguments, lambda s, _: (s.log_mass_t.sum(), None), dist.group.WORLD, **options
            )
        else:
            loss = linear_vocab_parallel_logprob(*arguments, dist.group.WORLD, **options).log_mass_t.sum()
    with record_collectives() as backward:
        loss.backward()
    return [[(call.kind, call.group_size, call.num_bytes) for call in part] for part in (forward, backward)]


# The op's one all-gather of 7 numbers and 3 candidates, once a chunk: 5, 5 and 2 tokens.
OP = [("all_gather", 2, (7 + 3) * 4 * tokens) for tokens in (5, 5, 2)]
GATHER = ("all_gather", 2, T // 2 * D * 4)
ALL_REDUCE, REDUCE_SCATTER = ("all_reduce", 2, T * D * 4), ("reduce_scatter", 2, T * D * 4)


@pytest.mark.parametrize(
    ("form", "sequence_parallel", "frozen", "forward", "backward"),
    [
        ("two_pass", False, False, OP, [ALL_REDUCE]),
        ("two_pass", False, True, OP, []),
        ("two_pass", True, False, [GATHER, *OP], [GATHER, REDUCE_SCATTER]),
        ("two_pass", True, True, [GATHER, *OP], [GATHER]),
        ("loss", False, False, [*OP, ALL_REDUCE], []),
        ("loss", False, True, OP, []),
        ("loss", True, False, [GATHER, *OP, REDUCE_SCATTER], []),
        ("loss", True, True, [GATHER, *OP], []),
    ],
)
def test_collectives_are_counted(form, sequence_parallel, frozen, forward, backward):
    """Number, kind, group size and bytes, for hidden states with and without (`frozen`) a gradient."""
    for ours in run_ranks(_count, 2, form, sequence_parallel, frozen):
        assert ours == [forward, backward]


def _wrong_share(rank, world_size):
    hidden, weight, target_t = make_head(7, 20, D)
    linear_vocab_parallel_logprob(
        hidden, weight, target_t, SPECS[0], dist.group.WORLD, sequence_parallel=True
    )


def test_targets_are_those_of_all_ranks_tokens():
    with pytest.raises(RankError, match=r"\(14,\), one for each token of all ranks of the group") as caught:
        run_ranks(_wrong_share, 2)
    assert [(rank, kind) for rank, kind, _, _ in caught.value.errors] == [
        (0, "ValueError"),
        (1, "ValueError"),
    ]
