"""Replay, audit and penalties with the vocabulary cut over 1, 2 and 4 gloo ranks."""

import math

import pytest
import torch
import torch.distributed as dist

from rlcore.collectives import record_collectives
from rlcore.ops.audit import audit_supports, gathered_quantiles
from rlcore.ops.logprob import VocabShard, vocab_parallel_logprob
from rlcore.ops.penalties import penalised_logits
from rlcore.ops.replay import Replayed
from rlcore.sampling import SamplingSpec
from rlcore.sampling_mask import SamplingMask
from tests.oracle import ROW_KINDS, make_logits
from tests.rank_pool import RankError, run_ranks
from tests.replay_oracle import History, Shard, check_penalised, check_replayed

pytestmark = pytest.mark.distributed


def shard_of(rank, world_size, vocab_size, uneven):
    """Equal widths with a padded last one, as Megatron cuts, or uneven on purpose."""
    if uneven:
        edges = [vocab_size * r * r // (world_size * world_size) for r in range(world_size + 1)]
        return Shard(start=edges[rank], stop=edges[rank + 1], group=dist.group.WORLD)
    width = -(-vocab_size // world_size)
    start, stop = (min(r * width, vocab_size) for r in (rank, rank + 1))
    return Shard(start=start, stop=stop, padding=width - (stop - start), group=dist.group.WORLD)


def kept_lists(logits, seed):
    """From one id to all of them, in any order, some twice; never without a finite one."""
    num_rows, vocab_size = logits.shape
    generator = torch.Generator().manual_seed(seed)
    lists = []
    for row in range(num_rows):
        count = 1 + (vocab_size + 2) * row // num_rows
        ids = torch.randint(0, vocab_size, (count,), generator=generator).tolist()
        lists.append([*ids, int(logits[row].argmax())] if row % 2 else ids)
        if logits[row, lists[-1]].isneginf().all():
            lists[-1].append(int(logits[row].argmax()))
    return lists


def _check_replay(rank, world_size, vocab_size, uneven):
    shard = shard_of(rank, world_size, vocab_size, uneven)
    for seed, kind in enumerate(ROW_KINDS):
        for dtype in (torch.float32, torch.bfloat16):
            logits = make_logits(kind, 6, vocab_size, seed=seed).to(dtype)
            target_t = torch.arange(6) * 7 % vocab_size
            kept = kept_lists(logits, seed)
            check_replayed(logits, target_t, SamplingSpec(temperature=0.7), kept, shard)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("uneven", [False, True])
# 5: TP 4 leaves a shard of padding only, or one without a column; 66: does not divide by 4
@pytest.mark.parametrize("vocab_size", [5, 66])
def test_every_replayed_shard_equals_the_whole(world_size, uneven, vocab_size):
    run_ranks(_check_replay, world_size, vocab_size, uneven)


def _check_penalties(rank, world_size, vocab_size, uneven):
    shard = shard_of(rank, world_size, vocab_size, uneven)
    # Few ids, so all of them lie in the first shards; many, so most lie elsewhere.
    for seed, num_ids in enumerate((1, 3, vocab_size)):
        past = History.random(3, 6, num_ids, seed)
        for kind in ("tied", "banned", "bfloat16"):
            logits = make_logits(kind, 18, vocab_size, seed=seed)
            target_t = torch.arange(18) % vocab_size
            quarters = [
                SamplingSpec(
                    top_k=4,
                    repetition_penalty=2.0 ** (row % 3 - 1),
                    presence_penalty=row % 4 / 4,
                    frequency_penalty=-(row % 5) / 4,
                )
                for row in range(18)
            ]
            check_penalised(logits, target_t, quarters, past, shard)
            check_penalised(logits, target_t, [SamplingSpec(top_p=0.9, repetition_penalty=2.0)], past, shard)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("vocab_size", [5, 66])
def test_every_penalised_shard_equals_the_whole(world_size, uneven, vocab_size):
    run_ranks(_check_penalties, world_size, vocab_size, uneven)


def _score_by_hand(rank, world_size):
    """exp(z) = 8, 4, 2, 1, the kept ids on other shards than the target."""
    row = torch.tensor([[math.log(8), math.log(4), math.log(2), 0.0]])
    shard = Shard(start=rank * 4 // world_size, stop=(rank + 1) * 4 // world_size, group=dist.group.WORLD)
    columns, mask = shard.cut(row), SamplingMask.from_lists([[3, 1]])
    result = vocab_parallel_logprob(
        columns, torch.tensor([0]), SamplingSpec(), shard.group, shard.vocab(4), replay=mask, entropy=True
    )
    (grad,) = torch.autograd.grad(result.logprob_t.sum(), columns)
    distribution = Replayed(SamplingSpec(top_k=2), mask)
    report = audit_supports(columns.detach(), torch.tensor([0]), distribution, shard.group, shard.vocab(4))
    return result.logprob_t.item(), result.num_kept_t.item(), grad[0].tolist(), report.jaccard_t.item()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_row_by_hand(world_size):
    """8 / 13 of the mass; {0, 1, 3} and {0, 1} have two of three ids in common."""
    gradient = []
    for logprob, num_kept, grad, jaccard in run_ranks(_score_by_hand, world_size):
        assert logprob == pytest.approx(math.log(8 / 13), abs=1e-6) and num_kept == 3
        assert jaccard == pytest.approx(2 / 3)
        gradient += grad
    assert gradient == pytest.approx([5 / 13, -4 / 13, 0, -1 / 13], abs=1e-6)


def _audit(rank, world_size, spec):
    reports = []
    for seed, kind in enumerate(("random", "tied", "banned")):
        logits = make_logits(kind, 8, 66, seed=seed)
        distribution = Replayed(spec, SamplingMask.from_lists(kept_lists(logits, seed)))
        target_t = torch.arange(8)
        shard = shard_of(rank, world_size, 66, uneven=True)
        cut = audit_supports(shard.cut(logits).detach(), target_t, distribution, shard.group, shard.vocab(66))
        whole = audit_supports(logits, target_t, distribution, None, VocabShard(start=0, vocab_size=66))
        for name, value in vars(cut).items():
            assert torch.allclose(value.double(), vars(whole)[name].double(), atol=1e-6), name
        reports.append(cut.jaccard_t)
    # Each rank brings another number of values, one of them none.
    values = torch.arange(10)[: 3 * rank]
    quantiles = gathered_quantiles(values, torch.ones(3 * rank).bool(), [0.0, 0.75, 1.0], dist.group.WORLD)
    return torch.cat(reports), quantiles.tolist()


@pytest.mark.parametrize("spec", [SamplingSpec(top_k=9), SamplingSpec(top_p=0.9), SamplingSpec(min_p=0.2)])
def test_an_audit_is_the_same_on_every_shard(spec):
    results = run_ranks(_audit, 4, spec)
    assert all(torch.equal(jaccard, results[0][0]) for jaccard, _ in results)
    # 0 1 2 | 0 1 .. 5 | 0 1 .. 8
    assert all(quantiles == [0.0, 5.0, 8.0] for _, quantiles in results)


def _count(rank, world_size, entropy):
    logits = make_logits("random", 8, 400, seed=rank).requires_grad_()
    mask = SamplingMask.from_lists([[i, i + 400, 799] for i in range(8)])
    with record_collectives() as forward:
        result = vocab_parallel_logprob(
            logits, torch.arange(8), SamplingSpec(top_k=50), dist.group.WORLD, replay=mask, entropy=entropy
        )
    past = History.random(2, 4, 800, seed=0)
    with record_collectives() as silent:
        (result.logprob_t.sum() + result.log_mass_t.sum()).backward()
        penalised_logits(
            logits, past.tokens(), SamplingSpec(presence_penalty=1.0), rank * 400
        ).sum().backward()
    return [(call.kind, call.group_size, call.num_bytes // 8) for call in forward], silent


@pytest.mark.parametrize("entropy", [False, True])
def test_collectives_are_counted(entropy):
    """Seven float32 and four float64 a token, whatever is listed; nothing backward, nothing for penalties."""
    for forward, silent in run_ranks(_count, 2, entropy):
        assert forward == [("all_gather", 2, 7 * 4), ("all_gather", 2, 4 * 8)]
        assert silent == []


def _same_bits(rank, world_size):
    logits = make_logits("random", 8, 100, seed=5)
    shard = shard_of(rank, world_size, 100, uneven=True)
    mask = SamplingMask.from_lists(kept_lists(logits, 5))
    result = vocab_parallel_logprob(
        shard.cut(logits).detach(),
        torch.arange(8),
        SamplingSpec(),
        shard.group,
        shard.vocab(100),
        replay=mask,
        entropy=True,
    )
    return torch.stack([result.logprob_t, result.log_mass_t, result.entropy_t])


def test_every_rank_holds_the_same_bits():
    first, *others = run_ranks(_same_bits, 4)
    assert all(torch.equal(other, first) for other in others)


def _broken(rank, world_size):
    """All that row 1 lists is banned, on whichever shard it lies."""
    row = torch.tensor([0.0, 1.0]) if rank == 0 else torch.full((2,), -math.inf)
    mask = SamplingMask.from_lists([[0, 2], [2, 3]])
    vocab_parallel_logprob(
        row.repeat(2, 1), torch.tensor([0, 3]), SamplingSpec(), dist.group.WORLD, replay=mask
    )


def test_a_banned_support_is_an_error_on_every_rank():
    with pytest.raises(RankError) as caught:
        run_ranks(_broken, 2)
    assert [(rank, kind) for rank, kind, _, _ in caught.value.errors] == [
        (0, "ValueError"),
        (1, "ValueError"),
    ]
    assert all("row 1" in message for _, _, message, _ in caught.value.errors)
