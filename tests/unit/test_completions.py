"""What an engine returned: the sampled token's own logprob, nothing missing, kept ids, the rollout."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from rlcore.batch import Prompt
from rlcore.rollout.completions import (
    BadCompletion,
    Completion,
    Expected,
    Request,
    check_completions,
    join_rollout,
    kept_candidates,
    sampled_logprobs,
)

EOS = 1
EXPECTED = Expected(vocab_size=10, eos_id=EOS, max_new_tokens=3, max_length=6, kept=False)


def test_the_logprob_is_that_of_the_sampled_id():
    """B17: not the first entry of the map."""
    maps = [{7: -0.15, 4: -2.05}, {7: -0.30}, {5: -0.4, 1: -1.9, 2: -3.0}]
    assert sampled_logprobs([4, 7, 2], maps) == [-2.05, -0.30, -3.0]


def test_a_map_without_the_sampled_id_names_the_position():
    with pytest.raises(BadCompletion, match="position 1: no logprob of the sampled id 7"):
        sampled_logprobs([4, 7], [{4: -1.0}, {5: -0.3}])
    with pytest.raises(BadCompletion, match="2 positions of 3 sampled ids"):
        sampled_logprobs([4, 7, 2], [{4: -1.0}, {7: -0.3}])


def test_kept_ids_are_the_finite_candidates():
    maps = [{3: -0.5, 8: -1.0, 2: -math.inf}, {4: 0.0, 1: -math.inf, 2: -math.inf}]
    assert kept_candidates(maps, 3) == [[3, 8], [4]]
    full = [{3: -0.5, 8: -1.0, 2: -3.0}]
    with pytest.raises(BadCompletion, match="position 0: all 3 candidates were kept"):
        kept_candidates(full, 3)
    # Where every id was asked for nothing can be missing.
    assert kept_candidates(full, None) == [[3, 8, 2]]


def test_a_request_asks_for_what_the_prompt_leaves():
    def asked(length):
        return EXPECTED.request(Prompt(ids=[5] * length, group_id=0), 2, seed=9).max_new_tokens

    assert [asked(length) for length in (1, 3, 4, 5)] == [3, 3, 2, 1]


GOOD = Completion(ids=[5, 6, EOS], logprobs=[-0.5, -1.0, -0.1], finished=True, kept=[[5, 2], [6], [EOS, 3]])
CUT = Completion(ids=[5, 6, 7], logprobs=[-0.5, 0.0, -0.1], finished=False)


def changed(**changes):
    return dataclasses.replace(GOOD, **changes)


def check(*samples, num_samples=None, kept=False):
    request = Request(
        prompt_ids=[4],
        num_samples=len(samples) if num_samples is None else num_samples,
        max_new_tokens=3,
        seed=0,
    )
    check_completions([request], [samples], dataclasses.replace(EXPECTED, kept=kept))


def test_good_responses_pass():
    check(GOOD, CUT)
    check(GOOD, kept=True)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (changed(logprobs=[-0.5, math.nan, -0.1]), "sample 0: position 1: logprob nan of the sampled id 6"),
        (changed(logprobs=[-0.5, -math.inf, -0.1]), "position 1: logprob -inf of the sampled id 6"),
        (changed(logprobs=[-0.5, 0.2, -0.1]), "position 1: logprob 0.2"),
        (changed(logprobs=[-0.5]), "1 logprobs for 3 tokens"),
        (changed(ids=[5, 10, EOS]), "position 1: id 10 outside the vocabulary"),
        (changed(ids=[], logprobs=[]), "0 tokens, expected 1 to 3"),
        (changed(ids=[5, 6, 7, EOS], logprobs=[-1.0] * 4), "4 tokens, expected 1 to 3"),
        (changed(finished=False), "says that it was cut off, and its last id is 1"),
        (changed(ids=[5, 6, 7]), "says that it ended by itself, and its last id is 7"),
        (changed(ids=[5, 6], logprobs=[-1.0] * 2, finished=False), "cut off after 2 of 3 tokens"),
    ],
)
def test_what_cannot_be_trained_on_is_named(sample, message):
    with pytest.raises(BadCompletion, match=message):
        check(sample)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (None, "kept ids of 0 of 3 positions"),
        ([[5], [6]], "kept ids of 2 of 3 positions"),
        ([[5], [7], [EOS]], "position 1: the sampled id 6 is not among the kept ids"),
        ([[5], [6, 10], [EOS]], "position 1: a kept id outside the vocabulary"),
    ],
)
def test_kept_ids_that_do_not_fit_are_named(kept, message):
    with pytest.raises(BadCompletion, match=message):
        check(changed(kept=kept), kept=True)
    check(changed(kept=kept))


def test_missing_samples_and_prompts_are_named():
    with pytest.raises(BadCompletion, match="prompt 0: the engine returned 1 of 2 samples"):
        check(GOOD, num_samples=2)
    request = Request(prompt_ids=[4], num_samples=1, max_new_tokens=3, seed=0)
    with pytest.raises(BadCompletion, match="answered 1 of 2 prompts"):
        check_completions([request, request], [[GOOD]], EXPECTED)


def test_rows_of_the_rollout():
    prompts = [Prompt(ids=[8, 9], group_id=7), Prompt(ids=[4], group_id=3)]
    short = Completion(ids=[EOS], logprobs=[-0.25], finished=True, kept=[[EOS, 2]])
    rollout = join_rollout(prompts, [[GOOD, short], [short, short]], version=5, kept=True)
    assert rollout.ids_sl.tolist() == [
        [8, 9, 5, 6, EOS],
        [8, 9, EOS, 0, 0],
        [4, EOS, 0, 0, 0],
        [4, EOS, 0, 0, 0],
    ]
    assert torch.equal(rollout.sampler_logprob_sl[0], torch.tensor([0, 0, -0.5, -1.0, -0.1]))
    assert rollout.sampler_logprob_sl[2].tolist() == [0, -0.25, 0, 0, 0]
    assert rollout.prompt_length_s.tolist() == [2, 2, 1, 1] and rollout.length_s.tolist() == [5, 3, 2, 2]
    assert rollout.group_id_s.tolist() == [7, 7, 3, 3] and rollout.version_s.tolist() == [5] * 4
    mask = rollout.sampling_mask
    assert mask is not None
    rows = [
        mask.token_ids[start:stop].tolist()
        for start, stop in zip(mask.offsets, mask.offsets[1:], strict=False)
    ]
    assert rows == [
        *([], [], [5, 2], [6], [EOS, 3]),
        *([], [], [EOS, 2], [], []),
        *([], [EOS, 2], [], [], []),
        *([], [EOS, 2], [], [], []),
    ]
