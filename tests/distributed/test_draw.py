"""Drawing under TP: the frequencies are those of the truncated distribution, and the logprob is the scorer's
own.
"""

import math

import pytest
import torch
import torch.distributed as dist

from rlcore.batch import Prompt
from rlcore.groups import ParallelGroups
from rlcore.ops.draw import draw_tokens
from rlcore.ops.logprob import VocabShard, vocab_parallel_logprob
from rlcore.ops.reference import reference_logprob, support_weights
from rlcore.rollout.policy_sampler import PolicySampler
from rlcore.sampling import SamplingSpec
from tests.oracle import make_logits
from tests.rank_pool import run_ranks

pytestmark = pytest.mark.distributed

NUM_DRAWS = 20000
# Twelve ids, two tied at the cut of top_k=4, one banned.
ROW = [2.0, 1.0, 0.5, -math.inf, 0.5, 0.5, -1.0, 1.5, -2.0, -3.0, 0.0, -0.5]


def _draw(rank, world_size, row, spec, num_draws):
    width = -(-len(row) // world_size)
    start, stop = min(rank * width, len(row)), min((rank + 1) * width, len(row))
    logits_tv = torch.tensor(row)[start:stop].expand(num_draws, stop - start)
    generator = torch.Generator().manual_seed(100 + rank)
    vocab = VocabShard(start=start, vocab_size=len(row))
    ids_t, logprob_t = draw_tokens(logits_tv, spec, dist.group.WORLD, vocab, generator)
    scored = vocab_parallel_logprob(logits_tv, ids_t, spec, dist.group.WORLD, vocab)
    return ids_t, logprob_t, scored.logprob_t, scored.keep_t


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    "spec",
    [
        SamplingSpec(top_k=4),
        SamplingSpec(temperature=0.7, top_p=0.8),
        SamplingSpec(min_p=0.2),
        SamplingSpec(),
        SamplingSpec(top_k=1),
    ],
    ids=["top_k-tied", "top_p", "min_p", "plain", "one"],
)
def test_frequencies_are_those_of_the_reference(world_size, spec):
    results = run_ranks(_draw, world_size, ROW, spec, NUM_DRAWS)
    z_v = torch.tensor(ROW).double() / spec.effective_temperature
    weight_v = support_weights(z_v, spec)
    expected_v = torch.where(weight_v > 0, weight_v * z_v.exp(), 0.0)
    expected_v /= expected_v.sum()
    for ids_t, logprob_t, scored_t, keep_t in results:
        assert torch.equal(ids_t, results[0][0]), "every TP rank holds the same draw"
        assert bool(keep_t.all()), "a drawn token is never outside the support"
        assert torch.allclose(logprob_t, scored_t, atol=1e-6)
        frequency_v = torch.bincount(ids_t, minlength=len(ROW)).double() / NUM_DRAWS
        assert not frequency_v[expected_v == 0].any()
        # Five standard deviations of a binomial frequency; a wrong share of a tied id is off by far more.
        bound_v = 5 * (expected_v * (1 - expected_v) / NUM_DRAWS).sqrt() + 1e-9
        assert bool(((frequency_v - expected_v).abs() <= bound_v).all()), (frequency_v, expected_v)


def test_the_logprob_of_a_draw_equals_the_reference():
    logits = make_logits("random", 50, 40, seed=2)
    spec = SamplingSpec(temperature=0.9, top_k=10, top_p=0.9)
    ids_t, logprob_t = draw_tokens(
        logits, spec, None, VocabShard(start=0, vocab_size=40), torch.Generator().manual_seed(0)
    )
    assert torch.allclose(logprob_t.double(), reference_logprob(logits, ids_t, spec).logprob_t, atol=1e-5)


def test_a_broken_row_gives_nan_and_nothing_else_does():
    logits = torch.zeros(4, 6)
    logits[1, 2], logits[3] = math.nan, -math.inf
    _, logprob_t = draw_tokens(
        logits,
        SamplingSpec(top_k=3),
        None,
        VocabShard(start=0, vocab_size=6),
        torch.Generator().manual_seed(0),
    )
    assert torch.isnan(logprob_t).tolist() == [False, True, False, True]


class _FixedLogits:
    """A `DecodingModel` whose next-token logits never change."""

    def __init__(self, row, groups):
        self.groups, self.vocab_size, self.device = groups, len(row), torch.device("cpu")
        width = len(row) // groups.tp_size
        self.logits_v = torch.tensor(row)[groups.tp_rank * width : (groups.tp_rank + 1) * width]

    def start_decoding(self, num_sequences, max_length):
        pass

    def next_logits(self, ids_sl, num_seen):
        return self.logits_v.expand(ids_sl.shape[0], -1)


def _sample(rank, world_size, row, num_samples):
    groups = ParallelGroups(tp=dist.group.WORLD if world_size > 1 else None)
    sampler = PolicySampler(_FixedLogits(row, groups), SamplingSpec(), 0, 1, 8)
    rollout = sampler.generate([Prompt(ids=[1], group_id=0)], num_samples, seed=5)
    return rollout.ids_sl[:, 1]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_embedded_sampler_draws_every_shard_with_noise_of_its_own(world_size):
    """The same noise on two shards makes their columns compete as one: [.4, .1, .3, .2] then gives [.66, 0,
    0, .34].
    """
    probs_v = torch.tensor([0.4, 0.1, 0.3, 0.2])
    ids_s = run_ranks(_sample, world_size, probs_v.log().tolist(), NUM_DRAWS)[0]
    frequency_v = torch.bincount(ids_s, minlength=4) / NUM_DRAWS
    assert bool(((frequency_v - probs_v).abs() < 5 * (probs_v * (1 - probs_v) / NUM_DRAWS).sqrt()).all()), (
        frequency_v
    )
