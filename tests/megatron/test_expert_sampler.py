"""The embedded sampler over experts: replicas that share them stay in step, whoever ends first."""

from __future__ import annotations

import pytest
import torch

from rlcore.batch import Prompt
from tests.megatron.expert_cases import EXPERT_LAYOUTS, expert_config
from tests.megatron.test_policy_sampler import batch_of, check_shape
from tests.rank_pool import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]

EOS, NEW_TOKENS = 0, 6
# The first replica draws 6 positions, the second 17: its prompts are of 1 and 12 tokens.
PROMPTS = [
    [Prompt(ids=[5], group_id=10), Prompt(ids=[7], group_id=11)],
    [Prompt(ids=[1], group_id=12), Prompt(ids=[3, 4, 5, 6] * 3, group_id=13)],
    [Prompt(ids=[2, 9], group_id=14), Prompt(ids=[8, 1], group_id=15)],
    [Prompt(ids=[6] * 4, group_id=16), Prompt(ids=[9], group_id=17)],
]


def generate_on_rank(rank, world_size, config):
    """Two samples of each prompt, their scores, and how often the model ran."""
    from megatron_worker.worker import MegatronWorker
    from rlcore.rollout.policy_sampler import PolicySampler

    worker = MegatronWorker(config)
    try:
        calls = []
        decoder, next_logits = worker.decoder, worker.decoder.next_logits
        decoder.next_logits = lambda ids_sl, num_seen: calls.append(0) or next_logits(ids_sl, num_seen)
        sampler = PolicySampler(decoder, worker.spec, EOS, NEW_TOKENS, worker.arch.max_position_embeddings)
        dp_rank = worker.groups.dp_rank
        rollout = sampler.generate(PROMPTS[dp_rank], 2, 3 + dp_rank)
        return rollout, worker.logprobs(batch_of(rollout)), dp_rank, len(calls)
    finally:
        worker.close()


@pytest.mark.parametrize("layout", ["ep2", "pp2ep2", "tp2ep2", "dp4ep2", "cp2dp2ep4"])
def test_replicas_that_share_experts_draw_to_the_end(layout):
    world_size = EXPERT_LAYOUTS[layout][0]
    results = run_ranks(generate_on_rank, world_size, expert_config(layout, 2), timeout_s=110)
    for rollout, scores, dp_rank, _ in results:
        check_shape(rollout, PROMPTS[dp_rank], 2, NEW_TOKENS)
        mask_sl = rollout.token_mask_sl
        assert mask_sl.any() and bool(scores.keep_sl[mask_sl].all())
        difference = (scores.logprob_sl - rollout.sampler_logprob_sl)[mask_sl]
        assert float(difference.abs().max()) < 1e-5
    # The test has a replica that ends early, and it ran the model as often as the last one.
    longest = {dp_rank: rollout.ids_sl.shape[1] for rollout, _, dp_rank, _ in results}
    assert longest[0] <= 7 and longest[1] > 12
    assert len({num_calls for *_, num_calls in results}) == 1


def test_expert_parallelism_changes_no_response():
    """Two replicas whose ranks hold all experts each, and the same two with the experts cut: the same ids."""
    import dataclasses

    config = expert_config("ep2", 2)
    whole = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, ep=1))
    cut, uncut = (run_ranks(generate_on_rank, 2, each) for each in (config, whole))
    for (ours, *_), (theirs, *_) in zip(cut, uncut, strict=True):
        assert torch.equal(ours.ids_sl, theirs.ids_sl)
        torch.testing.assert_close(ours.sampler_logprob_sl, theirs.sampler_logprob_sl, rtol=0, atol=1e-5)
    # Without experts to share nobody waits for anybody.
    assert uncut[0][3] < uncut[1][3] == cut[0][3]
