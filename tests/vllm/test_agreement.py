"""vLLM's logprobs of what it drew are the trainer's, under every kind of sampling, over TP ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rlcore.batch import Prompt
from rlcore.rollout.completions import check_completions, join_rollout
from rlcore.sampling import SamplingSpec
from tests.rank_pool import run_ranks
from tests.vllm.tiny_engine import VOCAB_SIZE, run_config
from tools.agreement import SETTINGS, batch_of, raw_logprobs, score

PROMPTS = [Prompt(ids=[5 + index, 100, 7, 30 * index + 2], group_id=index) for index in range(4)]
TOLERANCE = 1e-4
"""Nats. Two engines in float32 agree to about 1e-5; a wrong order or temperature shows at 1e-2 and more."""


def draw(running, spec, index):
    """Two responses a prompt."""
    requests = [
        dataclasses.replace(
            running.expected.request(prompt, 2, 1000 * index + 10 * prompt.group_id), sampling=spec.to_vllm()
        )
        for prompt in PROMPTS
    ]
    completions = running.engine.generate(requests)
    check_completions(requests, completions, running.expected)
    return join_rollout(PROMPTS, completions, version=0, kept=False)


def score_on_rank(rank, world_size, config, rollouts):
    """Filtered and unfiltered scores of each rollout, of a worker over all ranks."""
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        return [
            [score(worker, batch_of(rollout), scored_as) for scored_as in (spec, spec.unfiltered())]
            for spec, rollout in rollouts
        ]
    finally:
        worker.close()


@pytest.mark.parametrize("model", ["untied", pytest.param("tied", marks=pytest.mark.slow)])
def test_both_engines_give_the_same_logprobs(model, request):
    running = request.getfixturevalue(model)
    # What the head is made of does not meet the sampler: a few settings are enough for the second model.
    names = list(SETTINGS) if model == "untied" else list(SETTINGS)[-1:]
    specs = {name: SamplingSpec(**SETTINGS[name]) for name in names}
    rollouts = [(spec, draw(running, spec, index)) for index, spec in enumerate(specs.values())]
    config = run_config(running.folder, parallel={"tp": 2, "backend": "cpu"})
    scored = run_ranks(score_on_rank, 2, config, rollouts)[0]
    for name, (spec, rollout), (filtered, whole) in zip(specs, rollouts, scored, strict=True):
        mask_sl = rollout.token_mask_sl
        assert filtered.keep_sl[mask_sl].all(), name
        difference_n = (filtered.logprob_sl - rollout.sampler_logprob_sl)[mask_sl]
        assert difference_n.abs().max() < TOLERANCE, name
        # What a trainer that ignores truncation would see is off by log S, which is no small number here.
        bias_n = (whole.logprob_sl - rollout.sampler_logprob_sl)[mask_sl]
        assert torch.allclose(bias_n, filtered.log_mass_sl[mask_sl], atol=TOLERANCE), name
        assert (bias_n.mean() < -0.01) == spec.truncates, name
        if spec.truncates and spec.effective_temperature == 1.0 and not spec.penalises:
            mass_sl = raw_logprobs(running.engine, rollout) - rollout.sampler_logprob_sl
            assert (mass_sl - filtered.log_mass_sl)[mask_sl].abs().max() < TOLERANCE, name


def test_a_wrong_temperature_or_a_missing_filter_is_seen(untied):
    """The tolerance above is no blanket: each single change of the spec breaks it."""
    spec = SamplingSpec(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.1)
    rollout = draw(untied, spec, 50)
    changes = [{"temperature": 0.81}, {"top_k": None}, {"top_p": 0.95}, {"repetition_penalty": 1.0}]
    wrong = [dataclasses.replace(spec, **change) for change in changes]
    config = run_config(untied.folder)
    scored = run_ranks(score_on_rank, 1, config, [(spec, rollout), *((other, rollout) for other in wrong)])[0]
    gaps = []
    for filtered, _ in scored:
        both_sl = rollout.token_mask_sl & filtered.keep_sl
        gaps.append(float((filtered.logprob_sl - rollout.sampler_logprob_sl)[both_sl].abs().max()))
    assert gaps[0] < TOLERANCE and min(gaps[1:]) > 100 * TOLERANCE, gaps


def test_the_engines_vocabulary_is_the_models(untied):
    """Rows that only pad the vocabulary are never drawn, nor listed among all the candidates."""
    request = dataclasses.replace(
        untied.expected.request(PROMPTS[0], 1, 0), sampling={"temperature": 1.0, "logprobs": VOCAB_SIZE}
    )
    params = untied.engine._sampling_params(**untied.engine._settings.params(request))
    (output,) = untied.engine._llm.generate([{"prompt_token_ids": [3]}], params, use_tqdm=False)
    assert all(set(at) == set(range(VOCAB_SIZE)) for at in output.outputs[0].logprobs)
