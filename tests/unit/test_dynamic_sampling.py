"""Which samples take part, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rlcore.dynamic_sampling import groups_that_differ, select_samples

# Groups interleaved: 3 differs, 5 is equal, 9 is a group of one.
REWARDS, IDS = [1.0, 0.5, 0.0, 0.5, 1.0, 2.0], [3, 5, 3, 5, 3, 9]


def select(rewards, ids, finished, *, drop_equal_groups=False, mask_truncated=False, graded=None):
    """Samples that count, are truncated, are in an equal group; and those without a reward, where asked."""
    graded_s = torch.tensor([1] * len(rewards) if graded is None else graded).bool()
    got = select_samples(
        torch.tensor(rewards, dtype=torch.float64),
        graded_s,
        torch.tensor(ids),
        torch.tensor(finished).bool(),
        drop_equal_groups=drop_equal_groups,
        mask_truncated=mask_truncated,
    )
    masks = [got.counts_s, got.truncated_s, got.equal_group_s, got.reward_failed_s]
    together = torch.stack(masks).sum(dim=0)
    assert together.tolist() == [1] * len(rewards), "disjoint, and every sample has its reason"
    return tuple(mask_s.int().tolist() for mask_s in (masks[:3] if graded is None else masks))


def test_equal_groups_leave_and_others_stay():
    assert groups_that_differ(torch.tensor(REWARDS), torch.tensor(IDS)).int().tolist() == [1, 0, 1, 0, 1, 0]
    got = select(REWARDS, IDS, [1] * 6, drop_equal_groups=True)
    assert got == ([1, 0, 1, 0, 1, 0], [0] * 6, [0, 1, 0, 1, 0, 1])


def test_nothing_leaves_unasked():
    assert select(REWARDS, IDS, [0] * 6) == ([1] * 6, [0] * 6, [0] * 6)


def test_truncated_responses_leave():
    got = select(REWARDS, IDS, [1, 0, 1, 1, 0, 1], mask_truncated=True)
    assert got == ([1, 0, 1, 1, 0, 1], [0, 1, 0, 0, 1, 0], [0] * 6)


def test_a_group_is_judged_by_the_samples_still_there():
    """Group 3 without its 0.0 is all ones; what was truncated stays under that reason."""
    got = select(REWARDS, IDS, [1, 1, 0, 1, 1, 1], mask_truncated=True, drop_equal_groups=True)
    assert got == ([0] * 6, [0, 0, 1, 0, 0, 0], [1, 1, 0, 1, 1, 1])


def test_a_sample_without_a_reward_leaves_first():
    """Group 3 without its 0.0, which has none, is equal; group 5's truncated one without a reward has one
    reason; what stands in place of a reward is not read.
    """
    rewards = [1.0, 0.5, math.nan, 0.25, 1.0, 2.0]
    got = select(rewards, IDS, [1, 0, 1, 1, 1, 1], mask_truncated=True, graded=[1, 0, 0, 1, 1, 1])
    assert got == ([1, 0, 0, 1, 1, 1], [0] * 6, [0] * 6, [0, 1, 1, 0, 0, 0])
    got = select(rewards, IDS, [1] * 6, drop_equal_groups=True, graded=[1, 1, 0, 1, 1, 1])
    assert got == ([0, 1, 0, 1, 0, 0], [0] * 6, [1, 0, 0, 0, 1, 1], [0, 0, 1, 0, 0, 0])


def test_a_difference_of_one_rounding_is_a_difference():
    """Raw rewards are compared as they are: a mean or a variance would not see this one."""
    above = math.nextafter(0.9, 1.0)
    rewards, ids = torch.tensor([0.9, above, 0.9, 0.9], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    assert groups_that_differ(rewards, ids).tolist() == [True, True, False, False]


def test_a_bad_reward_names_the_sample():
    with pytest.raises(ValueError, match=r"sample 1 \(group 4\)"):
        select([0.0, math.nan], [4, 4], [1, 1])
