"""GSPO: one ratio per sequence; packing, filler, clamps, whole values by hand (B29)."""

import math
from dataclasses import replace

import pytest
import torch

from rlcore.ops.loss import ClipBounds, PolicyTokens
from rlcore.ops.segments import Segments
from rlcore.ops.sequence_loss import gspo_terms

WIDE = ClipBounds(low=1.0, high=1e9)


def run(log_ratio, segment, num_segments, mask=None, advantage=None, bounds=WIDE):
    """Terms and the gradient of the token mean over the mask."""
    x = torch.tensor(log_ratio, requires_grad=True)
    mask_t = torch.tensor([1] * len(log_ratio) if mask is None else mask).bool()
    tokens = PolicyTokens(
        logprob_t=x,
        old_logprob_t=torch.zeros(len(log_ratio)),
        advantage_t=torch.tensor([1.0] * len(log_ratio) if advantage is None else advantage),
        mask_t=mask_t,
    )
    segments = Segments(segment_t=torch.tensor(segment, dtype=torch.int64), num_segments=num_segments)
    terms = gspo_terms(tokens, bounds, segments)
    value = terms.loss_t.sum() / mask_t.sum().clamp(min=1)
    return terms, torch.autograd.grad(value, x)[0]


@pytest.mark.parametrize("garbage", [9.9, math.nan, math.inf, -math.inf])
def test_b29a_the_mean_runs_over_the_sequence_s_own_tokens(garbage):
    """Padding inside would give 30.98 or 1.14; the third sequence is fully masked and the last token is
    filler."""
    terms, grad = run(
        [0.1, 0.3, garbage, -0.2, 0.0, 0.5, garbage, garbage],
        [0, 0, 0, 1, 1, 1, 2, -1],
        3,
        [1, 1, 0, 1, 1, 1, 0, 0],
    )
    assert terms.ratio_t.tolist() == pytest.approx([1.221403] * 2 + [1.0] + [1.105171] * 3 + [1.0, 1.0])
    assert terms.loss_t.tolist() == pytest.approx([-1.221403] * 2 + [0.0] + [-1.105171] * 3 + [0.0, 0.0])
    assert grad.tolist() == pytest.approx([-1.221403 / 5] * 2 + [0.0] + [-1.105171 / 5] * 3 + [0.0, 0.0])


def test_b29b_the_mean_is_clamped_and_not_the_tokens():
    """A clamp of the tokens at 20 would give exp((20 - 20 - 5) / 3) = .188876."""
    terms, grad = run([30.0, -25.0, -5.0], [0, 0, 0], 1)
    assert terms.ratio_t.tolist() == [1.0] * 3
    assert grad.tolist() == pytest.approx([-1 / 3] * 3)
    far, far_grad = run([300.0, 100.0, 100.0], [0, 0, 1], 2, advantage=[-1.0, -1.0, 0.0])
    assert far.log_ratio_t.tolist() == [20.0] * 3 and far.loss_t[0].item() == pytest.approx(
        math.exp(20), rel=1e-5
    )
    assert far.clipped_high_t.tolist() == [True, True, False] and not far_grad.any()


def test_b29c_eight_tokens_of_minus_a_twentieth():
    """exp of the mean, .951229; exp of the sum would be .670320."""
    terms, _ = run([-0.05] * 8, [0] * 8, 1)
    assert terms.ratio_t.tolist() == pytest.approx([0.951229] * 8, abs=1e-6)


def test_b29d_gradient_of_a_sequence():
    x = torch.tensor([-1.0, -2.0], requires_grad=True)
    tokens = PolicyTokens(
        logprob_t=x,
        old_logprob_t=torch.tensor([-1.1, -2.3]),
        advantage_t=torch.ones(2),
        mask_t=torch.ones(2).bool(),
        multiplier_t=torch.tensor(0.5),
    )
    terms = gspo_terms(tokens, WIDE, Segments(segment_t=torch.tensor([0, 0]), num_segments=1))
    (grad,) = torch.autograd.grad(terms.total, x)
    assert grad.tolist() == pytest.approx([-0.610701, -0.610701], abs=1e-6)


def test_clipped_sequences_have_no_gradient_on_any_token():
    """Sequence means .4 and -.5 (ratios 1.49 and .61) at epsilons .2 / .28; tokens beyond them do not
    clip."""
    bounds = ClipBounds(low=0.2, high=0.28)
    log_ratio, advantage = [1.0, -0.2, -1.0, 0.0], [1.0, 1.0, -1.0, -1.0]
    terms, grad = run(log_ratio, [0, 0, 1, 1], 2, advantage=advantage, bounds=bounds)
    assert terms.clipped_high_t.tolist() == [True, True, False, False]
    assert terms.clipped_low_t.tolist() == [False, False, True, True]
    assert terms.loss_t.tolist() == pytest.approx([-1.28, -1.28, 0.8, 0.8]) and not grad.any()
    inside, inside_grad = run([1.0, -0.9, 9.0], [0, 0, 1], 2, mask=[1, 1, 0], bounds=bounds)
    assert not inside.clipped_high_t.any()
    assert inside_grad.tolist() == pytest.approx([-math.exp(0.05) / 2] * 2 + [0.0])


def test_tokens_with_their_own_advantages_get_their_own_credit():
    """GSPO-token: the ratio is the sequence's, the advantage the token's; the average of both would be -.5
    s."""
    _terms, grad = run([0.1, 0.1], [0, 0], 1, advantage=[1.0, 0.0])
    assert grad.tolist() == pytest.approx([-math.exp(0.1) / 2, 0.0])


def test_filler_and_an_empty_microbatch_contribute_nothing():
    terms, grad = run([0.1, 0.2], [-1, -1], 2)
    assert not terms.loss_t.any() and not grad.any() and terms.ratio_t.tolist() == [1.0, 1.0]
    terms, grad = run([], [], 0)
    assert terms.loss_t.sum() == 0.0 and grad.shape == (0,)


def test_segments_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="int64"):
        Segments(segment_t=torch.zeros(3), num_segments=1)
    with pytest.raises(ValueError, match="number of sequences"):
        Segments(segment_t=torch.zeros(3, dtype=torch.int64), num_segments=-1)
    segments = Segments(segment_t=torch.tensor([1, -1, 0]), num_segments=2)
    assert segments.pick(torch.tensor([5.0, 7.0])).tolist() == [7.0, 0.0, 5.0]
    assert replace(segments, num_segments=3).pick(torch.tensor([5.0, 7.0, 9.0])).tolist() == [7.0, 0.0, 5.0]
