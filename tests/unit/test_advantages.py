"""Advantages against hand-computed figures."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.advantages import grpo_advantages, reinforce_pp_advantages, rloo_advantages


def advantages(
    rewards, groups, *, dtype: torch.dtype = torch.float32, counts=None, **options: Any
) -> list[float]:
    counts_s = None if counts is None else torch.tensor(counts).bool()
    reward_s, group_id_s = torch.tensor(rewards, dtype=dtype), torch.tensor(groups)
    return grpo_advantages(reward_s, group_id_s, counts_s=counts_s, **options).tolist()


def rloo(rewards, groups, counts=None) -> list[float]:
    counts_s = None if counts is None else torch.tensor(counts).bool()
    return rloo_advantages(torch.tensor(rewards), torch.tensor(groups), counts_s).tolist()


def by_definition(rewards, groups, *, normalize_std, leave_one_out) -> list[float]:
    """Sample by sample from Python's exact fractions: no shortcut shared with the code under test."""
    out = []
    for i, (reward, id_) in enumerate(zip(rewards, groups, strict=True)):
        members = [j for j, other in enumerate(groups) if other == id_]
        compared = [j for j in members if j != i] if leave_one_out else members
        value = Fraction(reward) - statistics.mean(Fraction(rewards[j]) for j in compared or [i])
        others = [Fraction(rewards[j]) for j in compared]
        if normalize_std and len(others) > 1 and (variance := statistics.variance(others)) > 0:
            value = float(value) / math.sqrt(variance)
        out.append(0.0 if len(members) == 1 else float(value))
    return out


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


@pytest.mark.parametrize("options", [{}, {"leave_one_out": True}, {"normalize_std": False}])
@settings(max_examples=50, deadline=None)
@given(order=st.permutations(range(8)))
def test_permuting_rows_permutes_the_result(options, order):
    """CASES B38 (b): the same values after any permutation, to the last bit."""
    rewards, groups = [1.0, 3.1, 0.7, 0.1, 0.3, 2.2, 2.5, 9.0], [0, 1, 1, 1, 1, 1, 1, 3]
    options = {**options, "dtype": torch.float64}
    straight = advantages(rewards, groups, **options)
    shuffled = advantages([rewards[i] for i in order], [groups[i] for i in order], **options)
    assert shuffled == [straight[i] for i in order]


def test_leave_one_out_without_a_deviation_stays_unnormalised():
    """CASES B37 (a): the others of the first are all 0; dividing by std + 1e-6 gave a million."""
    got = advantages([1.0, 0.0, 0.0, 0.0], [7, 7, 7, 7], leave_one_out=True)
    assert got == pytest.approx([1.0, -0.577350, -0.577350, -0.577350], abs=1e-6)


def test_leave_one_out_sees_equal_float32_rewards_as_equal():
    """CASES B37 (b): a one-pass variance of the three 0.9 left 4.2e-4 and gave about -2123."""
    got = advantages([0.0, 0.9, 0.9, 0.9], [0, 0, 0, 0], leave_one_out=True)
    assert got == pytest.approx([-0.9, 0.577350, 0.577350, 0.577350], abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_leave_one_out_does_not_divide_by_a_rounding(dtype):
    """0.1 + 0.2 and 0.3 differ by a rounding of their dtype; its deviation would give 1e16."""
    near = torch.tensor([0.3, 0.3, 0.3], dtype=dtype)
    near[0] = torch.nextafter(near[0], torch.tensor(1.0, dtype=dtype))
    got = advantages([1.0, *near.tolist()], [0] * 4, dtype=dtype, leave_one_out=True)
    assert got[0] == pytest.approx(0.7, abs=1e-6)
    assert all(math.isfinite(value) for value in got)


def test_leave_one_out_edges():
    """CASES B37 (c), (d), B38 (a): a group of one, all equal, two groups of equal prompts; one other."""
    every: list[dict[str, Any]] = [{"normalize_std": True}, {"normalize_std": False}]
    for options in every:
        assert advantages([3.0], [0], leave_one_out=True, **options) == [0.0]
        assert advantages([0.9] * 3, [0] * 3, leave_one_out=True, **options) == [0.0] * 3
        assert advantages([0.0, 0.0, 1.0, 1.0], [0, 0, 1, 1], leave_one_out=True, **options) == [0.0] * 4
        assert advantages([2.0, 5.0], [0, 0], leave_one_out=True, **options) == [-3.0, 3.0]


def test_leave_one_out_keeps_a_small_deviation_beside_an_outlier():
    """The outlier's others are 0, 1e-6, 2e-6: deviation 1e-6, lost in the group's sum of squares."""
    for last in range(4):
        rewards = [0.0, 1e-6, 2e-6]
        rewards.insert(last, 1e3)
        got = advantages(rewards, [0] * 4, dtype=torch.float64, leave_one_out=True)
        assert got[last] == pytest.approx((1e3 - 1e-6) / 1e-6, rel=1e-6)


_REWARDS = st.floats(-1e6, 1e6, allow_nan=False).map(lambda value: round(value, 2))


@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("normalize_std", [True, False])
@settings(max_examples=80, deadline=None)
@given(samples=st.lists(st.tuples(_REWARDS, st.integers(0, 3)), min_size=1, max_size=12))
def test_against_the_definition(normalize_std, leave_one_out, samples):
    """Any grouping of any rewards, interleaved, sizes one to twelve."""
    rewards, groups = [reward for reward, _ in samples], [id_ for _, id_ in samples]
    options: dict[str, Any] = {"normalize_std": normalize_std, "leave_one_out": leave_one_out}
    got = advantages(rewards, groups, dtype=torch.float64, **options)
    assert got == pytest.approx(by_definition(rewards, groups, **options), rel=1e-5, abs=1e-6)


def test_tiny_differences_do_not_underflow():
    """Squares of 1e-200 are 0 in float64: the deviation must come from scaled rewards."""
    got = advantages([1e-200, 0.0, 0.0, 0.0], [0] * 4, dtype=torch.float64)
    assert got == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-6)


def test_rloo_by_hand():
    """[6, 0, 3]: less the mean of the other two. By id, interleaved with a group of two and one of one."""
    got = rloo([6.0, 1.0, 0.0, 9.0, 3.0, 2.0], [5, 6, 5, 7, 5, 6])
    assert got == pytest.approx([4.5, -1.0, -4.5, 0.0, 0.0, 1.0], abs=1e-6)
    assert rloo([1.0, 3.0, 0.0, 8.0], [0, 0, 1, 1]) == [-2.0, 2.0, -8.0, 8.0]
    assert rloo([0.9] * 5, [0] * 5) == [0.0] * 5


@pytest.mark.parametrize("outside", [math.nan, math.inf, 1e38, 5.0])
def test_samples_that_do_not_count_are_outside_the_statistics(outside):
    """[1, 0, x, 0, 0] without x is CASES B37 (e); a group of two without one is a group of one."""
    rewards, groups = [1.0, 0.0, outside, 0.0, 0.0, outside, 4.0], [7, 7, 7, 7, 7, 8, 8]
    counts = [1, 1, 0, 1, 1, 0, 1]
    expected = [1.5, -0.5, 0.0, -0.5, -0.5, 0.0, 0.0]
    assert advantages(rewards, groups, counts=counts) == pytest.approx(expected, abs=1e-6)
    left_out = advantages(rewards, groups, counts=counts, leave_one_out=True)
    assert left_out == pytest.approx([1.0, -0.577350, 0.0, -0.577350, -0.577350, 0.0, 0.0], abs=1e-6)
    third = 1 / 3
    assert rloo(rewards, groups, counts) == pytest.approx([1, -third, 0, -third, -third, 0, 0], abs=1e-6)


def test_nothing_that_counts_is_all_zero():
    every: list[dict[str, Any]] = [{}, {"leave_one_out": True}, {"normalize_std": False}]
    for options in every:
        assert advantages([1.0, math.nan], [0, 0], counts=[0, 0], **options) == [0.0, 0.0]
    assert rloo([1.0, 2.0], [0, 0], [0, 0]) == [0.0, 0.0]


def test_reinforce_pp_by_hand():
    """Rewards 1 over three tokens, 5 over one: mean 2, deviation 2 (Bessel over 4 tokens), not per sample."""
    token_mask_sl = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]]).bool()
    counts_s = torch.tensor([True, True, False])
    got_sl = reinforce_pp_advantages(torch.tensor([1.0, 5.0, math.nan]), token_mask_sl, counts_s)
    assert got_sl.tolist() == [[0.0, -0.5, -0.5, -0.5], [0.0, 1.5, 0.0, 0.0], [0.0] * 4]
    same_sl = reinforce_pp_advantages(torch.tensor([0.9, 0.9, 0.9]), token_mask_sl)
    assert same_sl.tolist() == [[0.0] * 4] * 3


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
