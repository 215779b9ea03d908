"""Masks: dtype, no aliasing, disjoint reasons."""

import math

import pytest
import torch

from rlcore.masks import actor_mask, keep_only, kl_mask, retained_mask, why_tokens_left


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
        "tokens/trained": 1,
        "tokens/valid": 4,
        "tokens/retained": 2,
    }


def test_reasons_add_up_for_random_masks():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        masks = [torch.rand(97, generator=generator) < 0.6 for _ in range(4)]
        counts = why_tokens_left(torch.ones(97).bool(), *masks)
        reasons = ["prompt", "sample_masked", "dropped_keep_old", "dropped_keep", "trained"]
        assert sum(int(counts[f"tokens/{name}"].value) for name in reasons) == 97
        assert int(counts["tokens/trained"].value) == int(actor_mask(*masks).sum())
