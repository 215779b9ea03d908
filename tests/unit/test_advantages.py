"""Advantages against hand-computed figures."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.advantages import grpo_advantages


def advantages(rewards, groups, *, normalize_std=True, dtype=torch.float32) -> list[float]:
    return grpo_advantages(torch.tensor(rewards, dtype=dtype), torch.tensor(groups), normalize_std).tolist()


def test_sample_deviation_is_bessels():
    """CASES B37 (e): std of [1,0,0,0] is 0.5, so 1.5 and -0.5; the population figure would be 1.732051."""
    assert advantages([1.0, 0.0, 0.0, 0.0], [7, 7, 7, 7]) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-6)


def test_group_of_one_is_zero():
    """CASES B37 (c): not the reward itself, not NaN."""
    assert advantages([3.0, 1.0, 2.0], [0, 1, 1])[0] == 0.0
    assert advantages([3.0], [0], normalize_std=False) == [0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("value", [0.9, 1 / 3, 1e30, -7.1, 0.1])
@pytest.mark.parametrize("size", [2, 3, 7])  # 3, 7: a mean of equal float64 numbers can miss them
def test_equal_rewards_are_exactly_zero(dtype, normalize_std, value, size):
    """CASES B37 (d): a one-pass variance leaves a residue that the division blows up."""
    assert advantages([value] * size, [4] * size, normalize_std=normalize_std, dtype=dtype) == [0.0] * size


def test_near_equal_rewards_do_not_cancel():
    """The deviation of [1000, 1000, 1000.5] is 0.288675; E[x^2] - E[x]^2 in float32 would be 0 or noise."""
    got = advantages([1000.0, 1000.0, 1000.5], [0, 0, 0])
    assert got == pytest.approx([-0.577350, -0.577350, 1.154701], abs=1e-5)


def test_groups_by_id_not_position():
    """CASES B38 (b) centred, then interleaved rows."""
    assert advantages([1.0, 3.0, 0.0, 8.0], [0, 0, 1, 1], normalize_std=False) == [-1.0, 1.0, -4.0, 4.0]
    assert advantages([1.0, 0.0, 3.0, 8.0], [0, 1, 0, 1], normalize_std=False) == [-1.0, -4.0, 1.0, 4.0]


def test_equal_prompts_with_two_ids_stay_two_groups():
    """CASES B38 (a) for a centred estimator: each group is all equal, so everything is 0."""
    assert advantages([0.0, 0.0, 1.0, 1.0], [10, 10, 11, 11]) == [0.0, 0.0, 0.0, 0.0]


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(8)))
def test_permuting_rows_permutes_the_result(order):
    """CASES B38 (b): the same values after any permutation."""
    rewards, groups = [1.0, 3.0, 0.0, 8.0, 2.0, 2.0, 2.5, 9.0], [0, 0, 1, 1, 2, 2, 2, 3]
    straight = advantages(rewards, groups)
    shuffled = advantages([rewards[i] for i in order], [groups[i] for i in order])
    assert shuffled == pytest.approx([straight[i] for i in order], abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_names_the_sample(bad):
    with pytest.raises(ValueError, match=r"sample 2 \(group 5\)"):
        advantages([1.0, 0.0, bad, 1.0], [4, 4, 5, 5])


def test_empty_batch_is_refused():
    with pytest.raises(ValueError, match="prompts_per_step"):
        grpo_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64))


def test_inputs_are_not_modified():
    reward_s, group_id_s = torch.tensor([1.0, 2.0, 2.0]), torch.tensor([0, 0, 1])
    grpo_advantages(reward_s, group_id_s)
    assert reward_s.tolist() == [1.0, 2.0, 2.0] and group_id_s.tolist() == [0, 0, 1]
