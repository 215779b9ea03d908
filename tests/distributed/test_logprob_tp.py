"""The op with the vocabulary cut over 1, 2 and 4 gloo ranks: every shard equals the reference on the whole
row.
"""

import contextlib
import itertools
import math

import pytest
import torch
import torch.distributed as dist

from rlcore.collectives import record_collectives
from rlcore.ops import bracket
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


LIMITS = (
    (support_filter, "MAX_CANDIDATES"),
    (support_filter, "NUCLEUS_CANDIDATES"),
    (bracket, "NUM_LISTED"),
    (bracket, "SAMPLE_FROM_ELEMENTS"),
)


@contextlib.contextmanager
def search_limits(*limits):
    """Other limits in this rank for a while: the pool's processes serve other tests too."""
    before = [getattr(module, name) for module, name in LIMITS]
    try:
        for (module, name), limit in zip(LIMITS, limits, strict=True):
            setattr(module, name, limit)
        yield
    finally:
        for (module, name), limit in zip(LIMITS, before, strict=True):
            setattr(module, name, limit)


NEVER = 1 << 60
REAL_LIMITS, TINY_LIMITS, SAMPLED_LIMITS = (1024, 64, 64, NEVER), (0, 2, 3, NEVER), (0, 2, 3, 0)


def _check_layout(rank, world_size, vocab_size, uneven, limits):
    edges = bounds(vocab_size, world_size, uneven)
    start, stop = edges[rank], edges[rank + 1]
    padding = 0 if uneven else -(-vocab_size // world_size) - (stop - start)
    with search_limits(*limits):
        for index, spec in enumerate(SPECS):
            # Two kinds of rows a spec, each kind with every third spec or so: the full product adds minutes,
            # not cases.
            for kind in (ROW_KINDS[index % 7], ROW_KINDS[(index * 3 + 1) % 7]):
                logits = make_logits(kind, 4, vocab_size, seed=11)
                target_t = torch.arange(4) * 7 % vocab_size
                check_shard(logits, target_t, spec, slice(start, stop), dist.group.WORLD, padding)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("uneven", [False, True])
# 5: TP 4 leaves a shard of padding only; 66: does not divide by 4; fewer candidates than k on small shards
@pytest.mark.parametrize("vocab_size", [5, 66])
@pytest.mark.parametrize(
    "limits", [REAL_LIMITS, TINY_LIMITS, SAMPLED_LIMITS], ids=["candidates", "search", "sampled"]
)
def test_every_shard_equals_the_whole(world_size, uneven, vocab_size, limits):
    run_ranks(_check_layout, world_size, vocab_size, uneven, limits)


def _score_cases(rank, world_size):
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


def _count(rank, world_size, spec, entropy, scale, sample_from=NEVER):
    shard = (make_logits("random", 8, 4000, seed=rank) * scale).requires_grad_()
    with search_limits(64, 32, 32, sample_from), record_collectives() as forward:
        result = vocab_parallel_logprob(shard, torch.arange(8), spec, dist.group.WORLD, entropy=entropy)
    with record_collectives() as backward:
        (result.unfiltered_logprob_t.sum() + result.log_mass_t.sum()).backward()
    return [(call.kind, call.group_size, call.num_bytes // 8) for call in forward], backward


STATS, SUMS = ("all_gather", 2, 7 * 4), ("all_gather", 2, 4 * 8)


def listed(count):
    """The first all-gather, with so many candidates."""
    return ("all_gather", 2, (7 + count) * 4)


@pytest.mark.parametrize(
    ("spec", "scale", "entropy", "expected"),
    [
        (SamplingSpec(), 1, True, [STATS]),
        (SamplingSpec(min_p=0.1), 1, False, [STATS, SUMS]),
        (SamplingSpec(top_k=50), 1, False, [listed(50)]),
        (SamplingSpec(top_k=50, top_p=0.9, min_p=0.1), 1, True, [listed(50)]),
        # Peaked rows: 32 candidates hold 90 % of the mass, so nothing is searched.
        (SamplingSpec(top_p=0.9), 4, False, [listed(32)]),
    ],
)
def test_collectives_are_counted(spec, scale, entropy, expected):
    """Number, kind, group size and bytes a token; the backward sends nothing."""
    for forward, backward in run_ranks(_count, 2, spec, entropy, scale):
        assert forward == expected
        assert backward == []


@pytest.mark.parametrize("sample_from", [NEVER, 0])
@pytest.mark.parametrize(
    ("spec", "num_searches"),
    [(SamplingSpec(top_p=0.9), 1), (SamplingSpec(top_k=500), 1), (SamplingSpec(top_k=500, top_p=0.9), 2)],
)
def test_a_search_makes_the_same_few_calls_on_every_rank(spec, num_searches, sample_from):
    """Passes over a sample, then rounds of at most four pivot passes, a listing and a cut; all together far
    below 16 KB a token and rank.
    """
    results = run_ranks(_count, 2, spec, False, 0.3, sample_from)
    assert results[0] == results[1] and results[0][1] == []
    first, *calls = results[0][0]
    assert first == listed(32) and {(kind, size) for kind, size, _ in calls} == {("all_gather", 2)}
    # A round is at most four pivot passes, a listing and a cut. Later rounds hold fewer rows.
    most = 12 if sample_from else 12 + 1 + bracket.SAMPLE_PASSES
    assert 3 * num_searches <= len(calls) <= most * num_searches
    assert sum(size for _, _, size in [first, *calls]) < 16 * 1024


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
