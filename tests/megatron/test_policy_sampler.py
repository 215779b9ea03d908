"""The embedded sampler over a real Megatron policy: agreement with the trainer, uneven prompts, limits,
errors.
"""

import math
import re

import pytest
import torch

from rlcore.batch import Prompt
from rlcore.config import load_run_config
from tests.rank_pool import RankError, refusals, run_ranks
from tools.agreement import batch_of

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]

VOCAB_SIZE, EOS = 21, 0
PROMPTS = [
    Prompt(ids=[5, 6, 7], group_id=10),
    Prompt(ids=[1], group_id=11),
    Prompt(ids=[3, 3, 3, 3, 3, 2], group_id=12),
    Prompt(ids=[8, 9], group_id=13),
]
LAYOUTS = {
    "tp1": (1, 1, 1, False),
    "tp2pp2": (4, 2, 2, False),
    "tp2+sp": (2, 2, 1, True),
    "dp2": (2, 1, 1, False),
    "tp2cp2+sp": (4, 2, 1, True),
    "pp2cp2": (4, 1, 2, False),
    "pp2+packed": (2, 1, 2, False),
    "tp2pp2+vpp": (4, 2, 2, False),
    "pp2cp2+vpp": (4, 1, 2, False),
}


def make_config(layout, *, num_layers=2, **sampling):
    _, tp, pp, sp = LAYOUTS[layout]
    vpp = 2 if layout.endswith("+vpp") else 1
    return load_run_config(
        {
            "model": {
                "vocab_size": VOCAB_SIZE,
                "num_layers": pp * vpp if vpp > 1 else num_layers,
                "hidden_size": 32,
                "num_attention_heads": 4,
                "num_query_groups": 2,
                "ffn_hidden_size": 48,
                "max_position_embeddings": 24,
            },
            "parallel": {
                "tp": tp,
                "pp": pp,
                "vpp": vpp,
                "cp": 2 if "cp2" in layout else 1,
                "sequence_parallel": sp,
                "backend": "cpu",
            },
            "sampling": {"temperature": 0.9, "top_k": 12, "top_p": 0.9, **sampling},
            "rollout": {"max_new_tokens": 16},
            "train": {
                "microbatch_size": 4,
                "token_budget": 64 if "cp2" in layout or "packed" in layout else None,
            },
        }
    )


def _generate(rank, world_size, config, prompts, seed, max_new_tokens, broken=False):
    from megatron_worker.worker import MegatronWorker
    from rlcore.rollout.policy_sampler import PolicySampler

    worker = MegatronWorker(config)
    try:
        if broken and worker.groups.dp_rank == 0:
            next(worker.model.parameters()).data.fill_(math.nan)
        sampler = PolicySampler(
            worker.decoder, worker.spec, EOS, max_new_tokens, worker.arch.max_position_embeddings
        )
        rollout = sampler.generate(prompts, 4, seed + worker.groups.dp_rank)
        return rollout, worker.logprobs(batch_of(rollout)), worker.groups.dp_rank
    finally:
        worker.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trainer_and_sampler_agree_for_an_unchanged_policy(layout):
    """Every sampled token is in the trainer's support and the two logprobs differ by rounding only."""
    results = run_ranks(_generate, LAYOUTS[layout][0], make_config(layout), PROMPTS, 3, 9)
    by_replica = {}
    for rollout, scores, dp_rank in results:
        first = by_replica.setdefault(dp_rank, rollout)
        assert torch.equal(rollout.ids_sl, first.ids_sl), "all ranks of a replica hold the same responses"
        mask_sl = rollout.token_mask_sl
        assert mask_sl.any() and bool(scores.keep_sl[mask_sl].all())
        assert float((scores.logprob_sl - rollout.sampler_logprob_sl)[mask_sl].abs().max()) < 1e-5
        assert float(scores.log_mass_sl[mask_sl].max()) < 0.0, "truncation was on"
        check_shape(rollout, PROMPTS, 4, 9)


@pytest.mark.parametrize(("layout", "other"), [("tp2pp2+vpp", "tp2pp2"), ("pp2cp2+vpp", "tp1")])
def test_virtual_stages_draw_what_the_model_without_them_draws(layout, other):
    """The same seed, token for token: with a cache, and with whole sequences at every step. Each TP rank has
    noise of its own, so TP stays.
    """
    without = make_config(other, num_layers=4)
    alone, _, _ = run_ranks(_generate, LAYOUTS[other][0], without, PROMPTS, 3, 9)[0]
    for rollout, _, _ in run_ranks(_generate, 4, make_config(layout), PROMPTS, 3, 9):
        assert torch.equal(rollout.ids_sl, alone.ids_sl)
        gap_sl = (rollout.sampler_logprob_sl - alone.sampler_logprob_sl)[alone.token_mask_sl]
        assert float(gap_sl.abs().max()) < 1e-5


PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.5}


@pytest.mark.parametrize("layout", ["tp1", "tp2pp2"])
def test_trainer_and_sampler_agree_under_penalties(layout):
    """Both count the same tokens at every position; scored without penalties, the same responses
    score otherwise."""
    config = make_config(layout, **PENALTIES)
    for rollout, scores, _ in run_ranks(_generate, LAYOUTS[layout][0], config, PROMPTS, 3, 9):
        mask_sl = rollout.token_mask_sl
        assert bool(scores.keep_sl[mask_sl].all())
        assert float((scores.logprob_sl - rollout.sampler_logprob_sl)[mask_sl].abs().max()) < 1e-5
    plain = run_ranks(_score, 1, make_config("tp1"), rollout)[0]
    kept_sl = mask_sl & plain.keep_sl
    # A fresh model is nearly flat: penalised ids are never drawn, and what is drawn gained their mass.
    assert float((plain.logprob_sl - rollout.sampler_logprob_sl)[kept_sl].abs().max()) > 0.03


def _score(rank, world_size, config, rollout):
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        return worker.logprobs(batch_of(rollout))
    finally:
        worker.close()


def check_shape(rollout, prompts, samples_per_prompt, max_new_tokens):
    """Prompts are intact, responses end at end-of-text or at the limit, and samples of a prompt stand
    together.
    """
    for row in range(len(prompts) * samples_per_prompt):
        prompt = prompts[row // samples_per_prompt]
        assert int(rollout.group_id_s[row]) == prompt.group_id
        start, stop = int(rollout.prompt_length_s[row]), int(rollout.length_s[row])
        assert rollout.ids_sl[row, :start].tolist() == list(prompt.ids)
        response = rollout.ids_sl[row, start:stop].tolist()
        assert EOS not in response[:-1] and max(response) < VOCAB_SIZE
        assert bool(rollout.finished_s[row]) == (response[-1] == EOS)
        assert rollout.finished_s[row] or len(response) == max_new_tokens
        assert not rollout.ids_sl[row, stop:].any() and not rollout.sampler_logprob_sl[row, stop:].any()


def test_the_same_seed_draws_the_same_responses_and_another_one_others():
    config = make_config("tp1")
    (first, _, _), (again, _, _), (other, _, _) = (
        run_ranks(_generate, 1, config, PROMPTS, seed, 6)[0] for seed in (1, 1, 2)
    )
    assert torch.equal(first.ids_sl, again.ids_sl)
    assert first.ids_sl.shape != other.ids_sl.shape or not torch.equal(first.ids_sl, other.ids_sl)


def test_a_response_stops_at_the_model_s_last_position():
    long = [Prompt(ids=[4] * 22, group_id=0), Prompt(ids=[4], group_id=1)]
    rollout, _, _ = run_ranks(_generate, 1, make_config("tp1"), long, 0, 20)[0]
    assert int(rollout.length_s.max()) <= 24


def test_more_new_tokens_than_positions_are_refused():
    with pytest.raises(RankError, match=r"rollout.max_new_tokens=24, and the model has 24 positions"):
        run_ranks(_generate, 1, make_config("tp1"), PROMPTS, 0, 24)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "no prompts"),
        ([Prompt(ids=[], group_id=4)], "prompt 4 is empty"),
        ([Prompt(ids=[1] * 24, group_id=5)], "prompt 5 has 24 tokens"),
        (
            [Prompt(ids=[3, 500], group_id=6)],
            r"prompt 6 has id 500, outside the model's vocabulary \[0, 21\)",
        ),
        ([Prompt(ids=[-1], group_id=7)], "prompt 7 has id -1"),
    ],
)
def test_prompts_that_cannot_be_answered_are_named(prompts, message):
    (said,) = refusals(_generate, 1, make_config("tp1"), prompts, 0, 4)
    assert re.search(message, said), said


@pytest.mark.parametrize("layout", ["tp1", "tp2pp2", "dp2"])
def test_nan_weights_are_an_error_on_every_rank(layout):
    """With DP 2 only the first replica is broken; the other one must not wait for it forever."""
    world_size = LAYOUTS[layout][0]
    said = refusals(_generate, world_size, make_config(layout), PROMPTS, 0, 4, True, timeout_s=60)
    assert len(said) == world_size
    assert all(message.startswith("ValueError: ") and "logits are NaN" in message for message in said)
