"""The ids that vLLM itself kept, replayed and audited by the trainer."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from rlcore.batch import Prompt
from rlcore.rollout.completions import check_completions, join_rollout
from rlcore.rollout.vllm_settings import engine_settings, expected_of
from tests.rank_pool import run_ranks
from tests.vllm.tiny_engine import EOS, NUM_POSITIONS, VOCAB_SIZE, run_config
from tools.agreement import batch_of

PROMPTS = [Prompt(ids=[9 + index, 50, 7], group_id=index) for index in range(4)]
TOLERANCE = 1e-4
SAMPLING = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}


def config_of(folder, support, **sampling):
    return run_config(
        folder,
        sampling={**SAMPLING, **sampling, "support": support},
        rollout={"prompts_per_step": 4, "samples_per_prompt": 2},
        parallel={"tp": 2},
        train={"microbatch_size": 4},
    )


@pytest.fixture
def rollout(untied):
    """Two responses a prompt, with the ids that vLLM kept at each token."""
    config = config_of(untied.folder, "replay")
    expected = expected_of(config, VOCAB_SIZE, NUM_POSITIONS, EOS)
    engine = copy.copy(untied.engine)
    engine._settings = engine_settings(config, expected, has_accelerator=False)
    requests = [expected.request(prompt, 2, 70 + prompt.group_id) for prompt in PROMPTS]
    completions = engine.generate(requests)
    check_completions(requests, completions, expected)
    return join_rollout(PROMPTS, completions, version=0, kept=True)


def scored_on_rank(rank, world_size, config, batch):
    """Scores of the batch, then the metrics of a step on them."""
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        scores = worker.logprobs(batch)
        batch = dataclasses.replace(
            batch,
            advantage_sl=torch.where(batch.token_mask_sl, 1.0, 0.0),
            old_logprob_sl=scores.logprob_sl,
            keep_old_sl=scores.keep_sl,
            old_log_mass_sl=scores.log_mass_sl,
        )
        return scores, worker.train_step(batch)
    finally:
        worker.close()


def scored(untied, rollout, support, **sampling):
    batch = dataclasses.replace(batch_of(rollout), sampling_mask=rollout.sampling_mask)
    return run_ranks(scored_on_rank, 2, config_of(untied.folder, support, **sampling), batch)[0]


def test_replayed_and_recomputed_supports_are_one(untied, rollout):
    mask_sl = rollout.token_mask_sl
    counts_t = rollout.sampling_mask.offsets.diff()
    assert (counts_t[mask_sl.flatten()] >= 1).all() and counts_t.max() <= 20
    assert not counts_t[~mask_sl.flatten()].any()
    replayed, step = scored(untied, rollout, "replay")
    searched, audited = scored(untied, rollout, "audit")
    for scores in (replayed, searched):
        assert scores.keep_sl[mask_sl].all()
        assert (scores.logprob_sl - rollout.sampler_logprob_sl)[mask_sl].abs().max() < TOLERANCE
    assert (replayed.log_mass_sl - searched.log_mass_sl)[mask_sl].abs().max() < TOLERANCE
    assert step.stepped and step.metrics["ratio/min"] == pytest.approx(1, abs=TOLERANCE)
    assert audited.metrics["audit/jaccard"] == 1.0 and audited.metrics["audit/out_of_support"] == 0.0
    mean = float(counts_t[mask_sl.flatten()].double().mean())
    assert audited.metrics["audit/num_replayed"] == pytest.approx(mean)
    assert audited.metrics["audit/num_recomputed"] == pytest.approx(mean)


def test_a_trainer_with_another_truncation_is_told_by_the_audit_and_mended_by_replay(untied, rollout):
    """The trainer's config says top-p 0.6 where vLLM drew with 0.9."""
    mask_sl = rollout.token_mask_sl
    replayed, _ = scored(untied, rollout, "replay", top_p=0.6)
    searched, audited = scored(untied, rollout, "audit", top_p=0.6)
    assert (replayed.logprob_sl - rollout.sampler_logprob_sl)[mask_sl].abs().max() < TOLERANCE
    both_sl = mask_sl & searched.keep_sl
    assert (searched.logprob_sl - rollout.sampler_logprob_sl)[both_sl].mean() > 0.1
    assert audited.metrics["audit/jaccard"] < 0.7 and audited.metrics["audit/out_of_support"] > 0.05
    assert audited.metrics["audit/log_mass_difference"] > 0.1
