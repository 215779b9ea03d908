"""Importance corrections: caps, bounds, rejection, overflow, operands (B27, B29 c, B34 d, B36 e)."""

import math

import pytest
import torch

from rlcore.metrics import reduce_metrics
from rlcore.ops.importance import (
    SequenceFilter,
    WeightBounds,
    geometric,
    icepop,
    importance_metrics,
    seq_mask_tis,
    sequence,
    tis,
)
from rlcore.ops.loss import ClipBounds, PolicyTokens, clip_terms, token_sum_over
from rlcore.ops.segments import Segments
from tests.loss_cases import CORRECTIONS

LN = math.log


def given(log_weight, mask=None):
    """Old and sampler logprobs with these log weights, and the mask."""
    log_weight_t = torch.tensor(log_weight)
    mask_t = torch.ones(len(log_weight)).bool() if mask is None else torch.tensor(mask).bool()
    return log_weight_t, torch.zeros(len(log_weight)), mask_t


def of(*segment):
    return Segments(segment_t=torch.tensor(segment), num_segments=max(segment) + 1)


def test_b27a_tis_caps_and_an_overflow_is_the_cap():
    weights = tis(*given([100.0, LN(3), -0.2, -1.6]), cap=2.0)
    assert weights.weight_t.tolist() == pytest.approx([2.0, 2.0, 0.818731, 0.201897], abs=1e-6)
    assert weights.weight_t[0] == 2.0 and weights.kept_t.all()
    assert weights.log_weight_t.tolist() == pytest.approx([100.0, LN(3), -0.2, -1.6])


def test_b27b_icepop_drops_what_is_outside_and_stays_finite():
    """inf * False is NaN; here the loss sum is -1 and the gradient finite."""
    weights = icepop(*given([1000.0, 0.0, LN(6), LN(0.4)]), bounds=WeightBounds(low=0.5, high=5.0))
    assert weights.weight_t.tolist() == [0.0, 1.0, 0.0, 0.0]
    assert weights.kept_t.tolist() == [False, True, False, False]
    x = torch.zeros(4, requires_grad=True)
    tokens = PolicyTokens(
        logprob_t=x,
        old_logprob_t=torch.zeros(4),
        advantage_t=torch.ones(4),
        mask_t=weights.kept_t,
        weight_t=weights.weight_t,
    )
    loss = clip_terms(tokens, ClipBounds(low=0.2, high=0.2)).loss_t.sum()
    assert loss.item() == -1.0 and torch.autograd.grad(loss, x)[0].tolist() == [0.0, -1.0, 0.0, 0.0]


def test_b27b_the_bounds_themselves_are_inside():
    """Closed on both sides; a lower bound of 0 keeps even a weight that underflows to it."""
    args = given([0.0, 1e-3, -1e-3])
    assert icepop(*args, bounds=WeightBounds(low=1.0, high=1.0)).kept_t.tolist() == [True, False, False]
    zero = icepop(*given([-1e4, 1.0]), bounds=WeightBounds(low=0.0, high=5.0))
    assert zero.kept_t.tolist() == [True, True] and zero.weight_t[0] == 0.0


def test_b27c_old_against_sampler_times_the_ratio_and_no_gradient_through_the_weight():
    """Current against sampler would give -3.320117, an attached weight a gradient of -6.640234."""
    x = torch.tensor([-0.5], requires_grad=True)
    old, gen = torch.tensor([-1.0], requires_grad=True), torch.tensor([-1.2], requires_grad=True)
    weights = tis(old, gen, torch.tensor([True]), cap=10.0)
    assert weights.weight_t.item() == pytest.approx(1.221403, abs=1e-6)
    assert not weights.weight_t.requires_grad and not weights.log_weight_t.requires_grad
    tokens = PolicyTokens(
        logprob_t=x,
        old_logprob_t=old,
        advantage_t=torch.ones(1),
        mask_t=torch.tensor([True]),
        weight_t=weights.weight_t,
    )
    terms = clip_terms(tokens, ClipBounds(low=1.0, high=1e9))
    assert terms.ratio_t.item() == pytest.approx(1.648721, abs=1e-6)
    assert terms.loss_t.item() == pytest.approx(-2.013753, abs=1e-5)
    assert torch.autograd.grad(terms.loss_t.sum(), x)[0].item() == pytest.approx(-2.013753, abs=1e-5)


def test_b29c_geometric_and_sum():
    """The pin: GSPO's rollout weight is the geometric mean; the sum shrinks with the length of a reply."""
    args = (*given([-0.05] * 8), of(*[0] * 8), 2.0)
    assert geometric(*args).weight_t.tolist() == pytest.approx([0.951229] * 8)
    assert sequence(*args).weight_t.tolist() == pytest.approx([0.670320] * 8)


def test_sequence_weights_by_hand():
    """Two interleaved sequences, one masked token: means .2 and -.3, sums .4 and -.3; caps 1.2 and 1.4."""
    args = (*given([0.1, -0.3, 0.3, math.nan], [1, 1, 1, 0]), of(0, 1, 0, 1))
    mean, total = geometric(*args, 1.2), sequence(*args, 1.4)
    assert mean.weight_t.tolist() == pytest.approx([1.2, math.exp(-0.3), 1.2, 1.0])
    assert total.weight_t.tolist() == pytest.approx([1.4, math.exp(-0.3), 1.4, 1.0])
    assert mean.kept_t.all() and mean.log_weight_t.tolist() == pytest.approx([0.1, -0.3, 0.3, 0.0])


@pytest.mark.parametrize(("cap", "expected"), [(2.0, [2.0, math.exp(-1.5)]), (None, [4.481689, 0.223130])])
def test_seq_mask_tis_rejects_by_the_mean_and_clamps_the_tokens_of_the_others(cap, expected):
    """Sequence 0: mean 0, tokens e^1.5 and e^-1.5 (capped at 2, or raw). Sequence 1: mean ln 6, out."""
    rule = SequenceFilter(bounds=WeightBounds(low=0.5, high=5.0), cap=cap)
    weights = seq_mask_tis(*given([1.5, -1.5, LN(6), LN(6)]), of(0, 0, 1, 1), rule)
    assert weights.weight_t.tolist() == pytest.approx([*expected, 0.0, 0.0], abs=1e-6)
    assert weights.kept_t.tolist() == [True, True, False, False]


def test_seq_mask_tis_by_the_sum():
    """Eight tokens of .25: the mean e^.25 is inside [.5, 5], the sum e^2 is not."""
    args = (*given([0.25] * 8), of(*[0] * 8))
    bounds = WeightBounds(low=0.5, high=5.0)
    assert seq_mask_tis(*args, SequenceFilter(bounds=bounds, cap=2.0)).kept_t.all()
    assert not seq_mask_tis(*args, SequenceFilter(bounds=bounds, cap=2.0, statistic="sum")).kept_t.any()


def test_raw_weights_are_finite():
    rule = SequenceFilter(bounds=WeightBounds(low=0.0, high=math.inf), cap=None)
    weights = seq_mask_tis(*given([1e4, -1e4, math.inf]), of(0, 0, 1), rule)
    assert weights.weight_t.tolist() == pytest.approx([math.exp(20), 0.0, math.exp(20)], rel=1e-6)


EXTREME = [1e4, -1e4, math.inf, -math.inf]


@pytest.mark.parametrize("name", [name for name in CORRECTIONS if name != "none"])
def test_extreme_log_weights_and_masked_nan(name):
    """Overflow is the cap, underflow 0; infinities of both signs in one sequence are no NaN; masked slots say
    nothing.
    """
    log_weight_t = torch.tensor([*EXTREME, 0.1, math.nan, 0.1, 1e4, math.inf])
    mask_t = torch.tensor([1, 1, 1, 1, 1, 0, 1, 1, 1]).bool()
    segments = of(0, 0, 0, 0, 0, 0, 1, 2, 2)
    weights = CORRECTIONS[name](log_weight_t, torch.zeros(9), mask_t, segments)
    for value in (weights.weight_t, weights.log_weight_t):
        assert torch.isfinite(value).all()
    assert weights.weight_t[5] == 1.0 and weights.kept_t[5] and weights.log_weight_t[5] == 0.0
    assert (weights.weight_t >= 0).all() and (weights.weight_t[~weights.kept_t] == 0).all()
    if name in ("sequence", "geometric", "tis"):
        assert weights.weight_t[7:].tolist() == [2.0, 2.0]
    else:
        assert not weights.kept_t[7:].any()
    assert weights.weight_t[6].item() == pytest.approx(math.exp(0.1))


@pytest.mark.parametrize("name", [name for name in CORRECTIONS if name != "none"])
def test_a_token_that_neither_side_can_draw_is_dropped(name):
    """-inf on both sides: no weight exists; it must neither be NaN nor count in its sequence's mean."""
    old, gen = torch.tensor([-math.inf, -1.0]), torch.tensor([-math.inf, -1.2])
    weights = CORRECTIONS[name](old, gen, torch.ones(2).bool(), of(0, 0))
    assert weights.kept_t.tolist() == [False, True]
    assert weights.weight_t.tolist() == pytest.approx([0.0, math.exp(0.2)], rel=1e-5)
    assert weights.log_weight_t.tolist() == pytest.approx([0.0, 0.2])


def test_a_nan_of_a_counting_token_is_handed_on_or_rejected():
    args = (torch.tensor([math.nan, -1.0]), torch.tensor([-1.0, -1.0]), torch.ones(2).bool())
    assert torch.isnan(tis(*args, cap=2.0).weight_t[0])
    assert torch.isnan(geometric(*args, of(0, 0), 2.0).weight_t).all()
    assert not icepop(*args, bounds=WeightBounds(low=0.5, high=5.0)).kept_t[0]
    rule = SequenceFilter(bounds=WeightBounds(low=0.5, high=5.0), cap=2.0)
    assert not seq_mask_tis(*args, of(0, 0), rule).kept_t.any()


def test_b34d_rejected_tokens_stay_in_the_denominator():
    """The pin: the original count. Four tokens of loss 1, a sequence of two rejected: 2 / 4, not 2 / 2."""
    rule = SequenceFilter(bounds=WeightBounds(low=0.5, high=5.0), cap=2.0)
    old, gen, mask_t = given([0.0, 0.0, LN(6), LN(6)])
    weights = seq_mask_tis(old, gen, mask_t, of(0, 0, 1, 1), rule)
    x = torch.zeros(4, requires_grad=True)
    tokens = PolicyTokens(
        logprob_t=x,
        old_logprob_t=torch.zeros(4),
        advantage_t=-torch.ones(4),
        mask_t=mask_t & weights.kept_t,
        weight_t=weights.weight_t,
    )
    loss = token_sum_over(clip_terms(tokens, ClipBounds(low=0.2, high=0.2)).loss_t, mask_t.sum())
    assert loss.item() == 0.5
    assert torch.autograd.grad(loss, x)[0].tolist() == [0.25, 0.25, 0.0, 0.0]


def test_b36e_the_raw_mean_and_the_effective_sample_size():
    """Raw weights .5, 3, 1 with cap 2: raw mean 1.5 (capped 1.166667); 3.5^2 / 5.25 effective samples."""
    weights = tis(*given([LN(0.5), LN(3), 0.0, math.nan], [1, 1, 1, 0]), cap=2.0)
    mask_t = torch.tensor([1, 1, 1, 0]).bool()
    metrics = reduce_metrics(importance_metrics(weights, mask_t))
    assert metrics["importance/raw_mean"] == pytest.approx(1.5)
    assert metrics["importance/effective_size"] == pytest.approx(3.5**2 / 5.25)
    assert metrics["importance/weight"] == pytest.approx(3.5 / 3)
    assert metrics["importance/dropped"] == 0.0
    bounds = WeightBounds(low=0.6, high=2.0)
    weights = icepop(*given([LN(0.5), LN(3), 0.0, math.nan], [1, 1, 1, 0]), bounds=bounds)
    metrics = reduce_metrics(importance_metrics(weights, mask_t))
    assert metrics["importance/dropped"] == 2.0 and metrics["importance/raw_mean"] == pytest.approx(1.5)
    extreme = importance_metrics(tis(*given(EXTREME), cap=2.0), torch.ones(4).bool())
    assert all(math.isfinite(value) for value in reduce_metrics(extreme).values())


@pytest.mark.parametrize("cap", [0.0, -1.0, math.inf, math.nan])
def test_caps_that_mean_nothing_are_refused(cap):
    with pytest.raises(ValueError, match="cap"):
        tis(*given([0.0]), cap=cap)
    with pytest.raises(ValueError, match="cap"):
        SequenceFilter(bounds=WeightBounds(low=0.5, high=2.0), cap=cap)


@pytest.mark.parametrize(("low", "high"), [(0.9, 0.5), (-0.1, 1.0), (math.nan, 1.0)])
def test_bounds_that_mean_nothing_are_refused(low, high):
    with pytest.raises(ValueError, match="0 <= low <= high"):
        WeightBounds(low=low, high=high)


def test_nan_is_in_no_mean_and_counted():
    """icepop drops the NaN; the means are those of the other two, the dropped one weighing 0."""
    bounds = WeightBounds(low=0.5, high=2.0)
    weights = icepop(*given([0.0, math.nan, LN(1.5)], [1, 1, 1]), bounds=bounds)
    metrics = reduce_metrics(importance_metrics(weights, torch.ones(3).bool()))
    assert metrics["importance/raw_mean"] == pytest.approx(1.25)
    assert metrics["importance/weight"] == pytest.approx(2.5 / 3)
    assert metrics["importance/nan"] == metrics["importance/dropped"] == 1.0
