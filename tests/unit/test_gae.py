"""GAE over the policy's own tokens, against hand-computed figures and a recursion without observations."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.gae import gae_advantages


def estimate(rewards, values, mask, gamma=1.0, lam=0.9, dtype=torch.float32):
    """One row's advantages and returns."""
    reward_sl, value_sl = torch.tensor([rewards], dtype=dtype), torch.tensor([values], dtype=dtype)
    got = gae_advantages(reward_sl, value_sl, torch.tensor([mask]).bool(), gamma, lam)
    return got.advantage_sl[0].tolist(), got.return_sl[0].tolist()


B41 = {"values": [0.2, 0.4, 0.9, -0.5, 0.5], "mask": [1, 1, 0, 0, 1]}


def test_observation_tokens_are_not_steps():
    """CASES B41: as steps they would decay twice and leak the critic's value: [.57305, .4145, ..., .5]."""
    advantages, returns = estimate([0, 0, 0, 0, 1], **B41)
    assert advantages == pytest.approx([0.695, 0.55, 0.0, 0.0, 0.5], abs=1e-6)
    assert returns == pytest.approx([0.895, 0.95, 0.0, 0.0, 1.0], abs=1e-6)


@pytest.mark.parametrize("padding", [0.0, math.nan, -math.inf])
def test_a_reward_at_a_trailing_masked_position_is_not_lost(padding):
    """CASES B41: the reward stands on a token after the last one that counts; padding after it is none."""
    values, mask = [*B41["values"], math.nan, 7.0, math.inf], [*B41["mask"], 0, 0, 0]
    advantages, _ = estimate([0, 0, 0, 0, 0, 0, 1, padding], values, mask)
    assert advantages == pytest.approx([0.695, 0.55, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0], abs=1e-6)


def test_a_reward_between_turns_belongs_to_the_turn_before():
    """A tool's reward of 2 at position 3 is that of token 1, undiscounted: gamma .5, lam 0, values 0."""
    advantages, _ = estimate([0, 1, 0, 2, 4], [0.0] * 5, [1, 1, 0, 0, 1], gamma=0.5, lam=0.0)
    assert advantages == [0.0, 3.0, 0.0, 0.0, 4.0]


def test_masked_values_never_meet_an_operation():
    values = [0.2, 0.4, math.nan, -math.inf, 0.5]
    assert estimate([0, 0, 0, 0, 1], values, B41["mask"]) == estimate([0, 0, 0, 0, 1], **B41)


def test_rows_without_tokens_and_prompts():
    """A row whose mask is empty, and a reward before the first token: nobody to credit."""
    assert estimate([1, 1], [3.0, 3.0], [0, 0]) == ([0.0, 0.0], [0.0, 0.0])
    assert estimate([9, 0, 1], [3.0, 0.0, 0.5], [0, 1, 1], lam=1.0)[0] == [0.0, 1.0, 0.5]


_NUMBERS = st.floats(-10, 10, width=32)
_TOKENS = st.lists(st.tuples(_NUMBERS, _NUMBERS, st.booleans()), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(_TOKENS, st.floats(0, 1), st.floats(0, 1))
def test_cutting_the_observations_out_changes_nothing(tokens, gamma, lam):
    """The plain backward recursion in Python over the tokens that count, rewards credited by hand."""
    rewards, values, kept = [], [], [i for i, token in enumerate(tokens) if token[2]]
    for index, position in enumerate(kept):
        end = kept[index + 1] if index + 1 < len(kept) else len(tokens)
        rewards.append(sum(token[0] for token in tokens[position:end]))
        values.append(tokens[position][1])
    expected, advantage, next_value = [0.0] * len(tokens), 0.0, 0.0
    for position, reward, value in reversed(list(zip(kept, rewards, values, strict=True))):
        advantage = reward + gamma * next_value - value + gamma * lam * advantage
        next_value, expected[position] = value, advantage
    columns = [list(column) for column in zip(*tokens, strict=True)]
    got, _ = estimate(*columns, gamma=gamma, lam=lam)
    assert got == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_rows_do_not_see_each_other():
    generator = torch.Generator().manual_seed(0)
    reward_sl, value_sl = torch.randn(2, 6, 7, generator=generator)
    mask_sl = torch.rand(6, 7, generator=generator) < 0.6
    whole = gae_advantages(reward_sl, value_sl, mask_sl, 0.9, 0.8)
    for row in range(6):
        one = slice(row, row + 1)
        alone = gae_advantages(reward_sl[one], value_sl[one], mask_sl[one], 0.9, 0.8)
        assert torch.equal(alone.advantage_sl[0], whole.advantage_sl[row])


def test_finite_input_gives_finite_output():
    """Differences of float32's largest numbers leave float32: capped, not inf."""
    top = torch.finfo(torch.float32).max
    advantages, returns = estimate([top, 0.0], [-top, top], [1, 1], lam=1.0)
    assert all(math.isfinite(value) for value in (*advantages, *returns)) and advantages[0] == top


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gamma": 1.5}, r"gamma=1.5, lam=0.9"),
        ({"lam": math.nan}, r"lam=nan"),
        ({"rewards": [0.0, math.nan]}, r"reward of sample 0 at position 1 is nan"),
        ({"values": [math.inf, 0.0]}, r"value of sample 0 at position 0 is inf"),
        ({"mask": [1]}, r"expected one shape"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        estimate(**{"rewards": [0.0, 0.0], "values": [0.0, 0.0], "mask": [1, 1]} | changes)
