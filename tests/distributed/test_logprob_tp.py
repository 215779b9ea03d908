"""The op with the vocabulary cut over 1, 2 and 4 gloo ranks: every shard equals the reference on the whole
row.
"""

import itertools
import math

import pytest
import torch
import torch.distributed as dist

from rlcore.collectives import record_collectives
from rlcore.ops import filter as support_filter
from rlcore.ops.logprob import VocabShard, vocab_parallel_logprob
from rlcore.sampling import SamplingSpec
from tests.oracle import ROW_KINDS, check_shard, make_logits
from tests.rank_pool import RankError, run_ranks

pytestmark = pytest.mark.distributed

SPECS = [
    SamplingSpec(temperature=0.7, top_k=k, top_p=p, min_p=m, ties=ties)
    for k, p, m, ties in itertools.product((None, 1, 6), (None, 0.5, 0.999), (0.0, 0.05), ("share", "all"))
]


def bounds(vocab_size, world_size, uneven):
    """Shard borders: equal widths with a padded last one, as Megatron cuts, or uneven on purpose."""
    if uneven:
        return [vocab_size * rank * rank // (world_size * world_size) for rank in range(world_size + 1)]
    width = -(-vocab_size // world_size)
    return [min(rank * width, vocab_size) for rank in range(world_size + 1)]


def _check_layout(rank, world_size, vocab_size, uneven, max_candidates):
    support_filter.MAX_CANDIDATES = max_candidates
    edges = bounds(vocab_size, world_size, uneven)
    start, stop = edges[rank], edges[rank + 1]
    padding = 0 if uneven else -(-vocab_size // world_size) - (stop - start)
    for kind in ROW_KINDS:
        logits = make_logits(kind, 5, vocab_size, seed=11)
        target_t = torch.arange(5) * 7 % vocab_size
        for spec in SPECS:
            check_shard(logits, target_t, spec, start, stop, dist.group.WORLD, padding)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("uneven", [False, True])
# 5: TP 4 leaves a shard of padding only; 66: does not divide by 4; fewer candidates than k on small shards
@pytest.mark.parametrize("vocab_size", [5, 66])
@pytest.mark.parametrize("max_candidates", [1024, 0])
def test_every_shard_equals_the_whole(world_size, uneven, vocab_size, max_candidates):
    run_ranks(_check_layout, world_size, vocab_size, uneven, max_candidates)


def _score_cases(rank, world_size):
    support_filter.MAX_CANDIDATES = 1024
    group = dist.group.WORLD

    def kept_and_logprobs(row, spec):
        z = torch.tensor(row)
        width = len(row) // world_size
        shard = z[rank * width : (rank + 1) * width].repeat(len(row), 1)
        vocab = VocabShard(start=rank * width, vocab_size=len(row))
        result = vocab_parallel_logprob(shard, torch.arange(len(row)), spec, group, vocab)
        return result.keep_t.nonzero()[:, 0].tolist(), result.logprob_t.tolist()

    row = [5.0, 4, 3, 0, 2, 1, 0, -1]
    entropy_row = torch.tensor([[1.0, 0, -math.inf, -math.inf]])
    width = 4 // world_size
    shard = entropy_row[:, rank * width : (rank + 1) * width].clone().requires_grad_()
    vocab = VocabShard(start=rank * width, vocab_size=4)
    result = vocab_parallel_logprob(shard, torch.tensor([0]), SamplingSpec(), group, vocab, entropy=True)
    (grad,) = torch.autograd.grad(result.unfiltered_entropy_t, shard)
    return {
        "top_k": kept_and_logprobs(row, SamplingSpec(top_k=2)),
        "top_p": kept_and_logprobs(row, SamplingSpec(top_p=0.9)),
        "ties": kept_and_logprobs([3.0, 1, 2, 2, 2, 0, -9, -9], SamplingSpec(top_k=2)),
        "entropy": (result.unfiltered_entropy_t.item(), grad[0].tolist()),
    }


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_b11_the_filter_is_global(world_size):
    """Filtering inside each shard keeps up to TP x k ids; the right sets are those of the whole row, on every
    rank.
    """
    entropy_grad = []
    for result in run_ranks(_score_cases, world_size):
        keep, logprobs = result["top_k"]
        assert keep == [0, 1]
        assert logprobs[:2] == pytest.approx([-0.313262, -1.313262], abs=1e-5) and logprobs[4] == -math.inf
        assert result["top_p"][0] == [0, 1, 2]
        keep, logprobs = result["ties"]
        assert keep == [0, 2, 3, 4]
        assert logprobs[:3] == pytest.approx([-0.313262, -math.inf, -1.313262], abs=1e-5)
        value, grad = result["entropy"]
        assert value == pytest.approx(0.582203, abs=1e-6)
        entropy_grad += grad
    assert entropy_grad == pytest.approx([-0.196612, 0.196612, 0, 0], abs=1e-6), (
        "B13: a shard that is all -inf"
    )


def _count(rank, world_size, spec, entropy):
    support_filter.MAX_CANDIDATES = 64
    shard = make_logits("random", 8, 400, seed=rank).requires_grad_()
    with record_collectives() as forward:
        result = vocab_parallel_logprob(shard, torch.arange(8), spec, dist.group.WORLD, entropy=entropy)
    with record_collectives() as backward:
        (result.unfiltered_logprob_t.sum() + result.log_mass_t.sum()).backward()
    return [(call.kind, call.group_size, call.num_bytes // 8) for call in forward], backward


STATS, SEARCH = ("all_gather", 2, 20), ("all_reduce", 2, 2 * 256 * 4)


@pytest.mark.parametrize(
    ("spec", "entropy", "expected"),
    [
        (SamplingSpec(), True, [STATS]),
        (SamplingSpec(min_p=0.1), False, [STATS, ("all_reduce", 2, 12)]),
        (SamplingSpec(top_k=50), False, [("all_gather", 2, (6 + 50) * 4)]),
        (SamplingSpec(top_k=50, top_p=0.9, min_p=0.1), True, [("all_gather", 2, (6 + 50) * 4)]),
        (SamplingSpec(top_p=0.9), False, [STATS, *[SEARCH] * 4]),
        (SamplingSpec(top_k=100), False, [STATS, *[SEARCH] * 4]),
        (SamplingSpec(top_k=100, top_p=0.9), True, [STATS, *[SEARCH] * 8, ("all_reduce", 2, 4)]),
    ],
)
def test_collectives_are_counted(spec, entropy, expected):
    """Number, kind, group size and bytes a token follow from the spec alone; the backward sends nothing."""
    for forward, backward in run_ranks(_count, 2, spec, entropy):
        assert forward == expected
        assert backward == []


def _broken(rank, world_size):
    shard = torch.zeros(4, 3)
    if rank == 1:
        shard[2, 1] = math.nan
    vocab_parallel_logprob(shard, torch.zeros(4, dtype=torch.long), SamplingSpec(top_k=2), dist.group.WORLD)


def test_a_nan_on_one_shard_is_an_error_on_every_rank():
    with pytest.raises(RankError) as caught:
        run_ranks(_broken, 2)
    assert [(rank, kind) for rank, kind, _, _ in caught.value.errors] == [
        (0, "ValueError"),
        (1, "ValueError"),
    ]
    assert all("row 2" in message for _, _, message, _ in caught.value.errors)
