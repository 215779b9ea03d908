"""Masks: dtype, no aliasing, disjoint reasons."""

import math

import pytest
import torch

from rlcore.masks import (
    WHY_LEFT,
    actor_mask,
    keep_only,
    kl_mask,
    retained_mask,
    sequence_check,
    why_tokens_left,
)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_b24_the_mask_keeps_its_dtype_and_its_original(dtype):
    """A narrowed mask in another dtype is refused downstream; one written in place narrows the next epoch
    too.
    """
    mask = torch.tensor([[0, 1, 1, 1, 0]]).to(dtype)
    original = mask.clone()
    first = keep_only(mask, torch.isfinite(torch.tensor([[0.0, -1.0, -math.inf, -2.0, 0.0]])))
    assert first.dtype == dtype and first.tolist() == torch.tensor([[0, 1, 0, 1, 0]]).to(dtype).tolist()
    assert torch.equal(mask, original)
    second = keep_only(mask, torch.ones(1, 5, dtype=torch.bool))
    assert torch.equal(second, original) and int(second.sum()) == 3


def test_masks_and_reasons_by_hand():
    real = torch.tensor([1, 1, 1, 1, 1, 1, 0]).bool()
    token = torch.tensor([0, 1, 1, 1, 1, 1, 0]).bool()
    sample = torch.tensor([1, 1, 1, 1, 1, 0, 1]).bool()
    keep_old = torch.tensor([1, 1, 0, 1, 0, 0, 1]).bool()
    keep = torch.tensor([1, 1, 1, 0, 0, 1, 1]).bool()
    assert kl_mask(token, sample).tolist() == [False, True, True, True, True, False, False]
    assert retained_mask(token, sample, keep_old).tolist() == [False, True, False, True, False, False, False]
    assert retained_mask(token, sample, None).tolist() == kl_mask(token, sample).tolist()
    assert actor_mask(token, sample, keep_old, keep).tolist() == [
        False,
        True,
        False,
        False,
        False,
        False,
        False,
    ]
    counts = {
        name: int(metric.value)
        for name, metric in why_tokens_left(real, token, sample, keep_old, keep).items()
    }
    assert counts == {
        "tokens/prompt": 1,
        "tokens/sample_masked": 1,
        "tokens/dropped_keep_old": 2,
        "tokens/dropped_keep": 1,
        "tokens/dropped_importance": 0,
        "tokens/dropped_sequence": 0,
        "tokens/trained": 1,
        "tokens/valid": 4,
        "tokens/retained": 2,
    }


def test_filters_have_reasons_of_their_own():
    """A token leaves under the first reason: what an importance filter drops stays in both denominators, what
    the sequence check drops is in neither.
    """
    yes = torch.ones(5).bool()
    keep_old = torch.tensor([1, 1, 0, 1, 1]).bool()
    importance_keep = torch.tensor([1, 0, 1, 0, 1]).bool()
    sequence_keep = torch.tensor([1, 1, 0, 0, 0]).bool()
    counts = {
        name.removeprefix("tokens/"): int(metric.value)
        for name, metric in why_tokens_left(
            yes, yes, yes, keep_old, yes, importance_keep, sequence_keep
        ).items()
        if int(metric.value)
    }
    assert counts == {
        "dropped_keep_old": 1,
        "dropped_importance": 2,
        "dropped_sequence": 1,
        "trained": 1,
        "valid": 2,
        "retained": 2,
    }


def test_reasons_add_up_for_random_masks():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        masks = [torch.rand(97, generator=generator) < 0.6 for _ in range(6)]
        counts = why_tokens_left(torch.ones(97).bool(), *masks)
        assert sum(int(counts[name].value) for name in WHY_LEFT) == 97
        assert int(counts["tokens/trained"].value) == int(actor_mask(*masks).sum())


INF = math.inf


@pytest.mark.parametrize(
    ("sampler", "old", "truncates", "passes"),
    [
        # |difference| .1 and .3: mean of exp = (1.105171 + 1.349859) / 2 = 1.227515.
        ([-1.0, -2.0], [-1.1, -1.7], True, True),
        # One more of .4: mean 1.315618, above 1.3.
        ([-1.0, -2.0, -1.0], [-1.1, -1.7, -1.4], True, False),
        # -inf says nothing about the engines where the distribution is truncated, and everything where not.
        ([-1.0, -2.0], [-1.1, -INF], True, True),
        ([-1.0, -2.0], [-1.1, -INF], False, False),
        ([-INF, -2.0], [-INF, -2.0], True, True),
        ([-1.0, math.nan], [-1.1, -1.7], True, False),
        # Differences far beyond what exp can hold.
        ([-1.0, -1e4], [-1.1, -1.0], True, False),
    ],
)
def test_the_sequence_check(sampler, old, truncates, passes):
    given = [torch.tensor([[9.0, *values, math.nan]]) for values in (sampler, old)]
    mask = torch.tensor([[0, *[1] * len(sampler), 0]]).bool()
    assert sequence_check(*given, mask, 1.3, truncates).tolist() == [passes]


def test_a_sequence_without_a_token_passes_the_check():
    nan = torch.full((1, 3), math.nan)
    assert sequence_check(nan, nan, torch.zeros(1, 3).bool(), 1.0, False).tolist() == [True]
