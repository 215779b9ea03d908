"""What each token counts, by hand: aggregations, denominators, filters, sequence check (B32, B34)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlcore.masks import WHY_LEFT
from rlcore.step_weights import weigh_step
from tests.split_cases import draw_step, loss_and_gradient, row, step_of

pytestmark = pytest.mark.megatron

LN = math.log
FIXED = {"aggregation": "fixed_length", "fixed_length": 8}
ICEPOP = {"correction": "icepop", "low": 0.5, "high": 5.0}


def section(aggregation: str, **others: Any) -> dict[str, Any]:
    return {**(FIXED if aggregation == "fixed_length" else {"aggregation": aggregation}), **others}


def flat(rows: list[list[float]]) -> list[float]:
    return [number for numbers in rows for number in numbers]


@pytest.mark.parametrize("microbatch_size", [1, 2, 3])
@pytest.mark.parametrize("denominator", ["retained", "valid"])
@pytest.mark.parametrize(
    ("aggregation", "loss", "first", "second"),
    [
        ("token_mean", 1.0, 1 / 6, 1 / 6),
        ("seq_mean_token_mean", 1.0, 1 / 8, 1 / 4),
        ("seq_mean_token_sum", 3.0, 1 / 2, 1 / 2),
        ("fixed_length", 6 / 16, 1 / 16, 1 / 16),
    ],
)
def test_b34a_a_masked_sample_is_in_no_denominator(
    aggregation, loss, first, second, denominator, microbatch_size
):
    """Lengths 4 and 2, and a masked one of 2: 6 / 6, not 6 / 8 or 6 / 3."""
    rows = [row(4), row(2), row(2, sample=False)]
    step = step_of(rows, section(aggregation, actor_denominator=denominator))
    value, gradient, part = loss_and_gradient(step, microbatch_size)
    assert value == pytest.approx(loss)
    assert flat(gradient) == pytest.approx([*[first] * 4, *[second] * 2, 0.0, 0.0])
    assert part.num_valid == part.num_retained == 6


@pytest.mark.parametrize(
    ("aggregation", "loss"),
    [
        ("token_mean", 1.0),
        ("seq_mean_token_mean", 1.0),
        ("seq_mean_token_sum", 4.0),
        ("fixed_length", 0.5),
    ],
)
def test_b34b_masked_rows_are_in_no_mean_over_sequences(aggregation, loss):
    """One valid row of 4 tokens, two masked rows: 4 / 4."""
    rows = [row(3, sample=False), row(4), row(5, sample=False)]
    value, gradient, _ = loss_and_gradient(step_of(rows, section(aggregation)))
    assert value == pytest.approx(loss)
    assert flat(gradient) == pytest.approx([*[0.0] * 3, *[loss / 4] * 4, *[0.0] * 5])


def test_b34c_the_mean_of_sequence_means():
    """Means 2 and 1 and a masked row: 1.5; a token mean gives 8 / 6, a mean over three rows 1."""
    rows = [row(2, a=[-1.0, -3.0]), row(4), row(3, sample=False)]
    value, gradient, _ = loss_and_gradient(step_of(rows, section("seq_mean_token_mean")))
    assert value == pytest.approx(1.5)
    assert flat(gradient) == pytest.approx([1 / 4, 3 / 4, *[1 / 8] * 4, 0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("denominator", "aggregation", "loss"),
    [
        ("retained", "token_mean", 3 / 4),
        ("valid", "token_mean", 3 / 4),
        ("retained_exact", "token_mean", 1.0),
        ("retained", "seq_mean_token_mean", 3 / 4),
        ("retained", "seq_mean_token_sum", 3.0),
        ("valid", "fixed_length", 3 / 8),
    ],
)
def test_b34d_what_icepop_drops_stays_in_the_denominator(denominator, aggregation, loss):
    """Weight 6 is above 5: its token has loss 0, and is counted except where the count is exact."""
    rows = [row(4, sampler=[0.0, -LN(6), 0.0, 0.0])]
    step = step_of(rows, section(aggregation, actor_denominator=denominator), ICEPOP)
    value, gradient, part = loss_and_gradient(step)
    assert value == pytest.approx(loss)
    assert flat(gradient) == pytest.approx([loss / 3, 0.0, loss / 3, loss / 3])
    assert part.metrics["tokens/dropped_importance"] == part.metrics["importance/dropped"] == 1


@pytest.mark.parametrize(
    ("denominator", "aggregation", "loss"),
    [
        ("retained", "token_mean", 2 / 6),
        ("retained_exact", "token_mean", 1.0),
        ("valid", "seq_mean_token_mean", 1 / 2),
        ("retained", "seq_mean_token_sum", 1.0),
        ("retained", "fixed_length", 2 / 16),
    ],
)
def test_b34d_a_sequence_that_seq_mask_rejects_stays_in_the_denominator(denominator, aggregation, loss):
    rows = [row(2), row(4, sampler=-LN(2))]
    correction = {"correction": "seq_mask_tis", "low": 0.8, "high": 1.5, "cap": 2.0}
    step = step_of(rows, section(aggregation, actor_denominator=denominator), correction)
    value, gradient, part = loss_and_gradient(step)
    assert value == pytest.approx(loss)
    assert flat(gradient) == pytest.approx([loss / 2, loss / 2, 0, 0, 0, 0])
    assert (part.num_valid, part.num_retained, part.num_trained) == (6, 6, 2)


@pytest.mark.parametrize(
    ("denominator", "aggregation", "loss"),
    [
        ("retained", "token_mean", 2 / 3),
        ("valid", "token_mean", 2 / 6),
        ("retained_exact", "token_mean", 1.0),
        ("retained", "seq_mean_token_mean", 2 / 3),
        ("valid", "seq_mean_token_mean", (2 / 4 + 0) / 2),
        ("retained", "seq_mean_token_sum", 2.0),
        ("valid", "seq_mean_token_sum", 1.0),
        ("retained", "fixed_length", 2 / 8),
        ("valid", "fixed_length", 2 / 16),
    ],
)
def test_what_each_denominator_counts(denominator, aggregation, loss):
    """Row 0: one token dropped by the old pass, one by the current; row 1 dropped by the old pass alone."""
    rows = [
        row(
            4,
            keep_old=[False, True, True, True],
            old=[-math.inf, 0.0, 0.0, 0.0],
            keep=[True, False, True, True],
        ),
        row(2, keep_old=False, old=-math.inf),
    ]
    step = step_of(rows, section(aggregation, actor_denominator=denominator))
    value, gradient, part = loss_and_gradient(step)
    assert value == pytest.approx(loss)
    assert flat(gradient) == pytest.approx([0, 0, loss / 2, loss / 2, 0, 0])
    assert (part.num_valid, part.num_retained, part.num_trained) == (6, 3, 2)


@pytest.mark.parametrize(
    ("aggregation", "loss", "kl"),
    [
        # Row 0: policy losses 1 (2 tokens) and KL .5 (3 tokens). Row 1: KL 2 (1 token), nothing else.
        ("token_mean", 1.0, (3 * 0.5 + 2) / 4),
        ("seq_mean_token_mean", 1.0, (0.5 + 2) / 2),
        ("seq_mean_token_sum", 2.0, (1.5 + 2) / 2),
        ("fixed_length", 2 / 8, (1.5 + 2) / 16),
    ],
)
def test_the_kl_term_counts_the_valid_tokens_whatever_the_actor_counts(aggregation, loss, kl):
    """keep_old and keep leave the policy term alone: the reference KL sees token & sample."""
    rows = [
        row(3, keep_old=[True, True, False], old=[0.0, 0.0, -math.inf], unfiltered=0.5),
        row(1, keep_old=False, old=-math.inf, unfiltered=2.0),
        row(2, sample=False, unfiltered=9.0),
    ]
    terms = {"kl_coef": 0.1, "kl_type": "k1", "kl_gradient": "plain"}
    value, _, part = loss_and_gradient(step_of(rows, section(aggregation, **terms)))
    assert part.metrics["loss/policy"] == pytest.approx(loss)
    assert part.metrics["loss/kl"] == pytest.approx(kl)
    assert value == pytest.approx(loss + 0.1 * kl)
    per_token = part.gradients["unfiltered"][:, 1:]
    assert float((per_token * step_of_unfiltered(rows)).sum()) == pytest.approx(0.1 * kl)
    assert not part.gradients["unfiltered"][2].any() and bool((per_token[0] > 0).all())


def step_of_unfiltered(rows: list[dict[str, Any]]) -> torch.Tensor:
    """`[S, L - 1]`, 0 in padding and masked rows: k1 is linear, so gradient x value is the term itself."""
    width = max(len(one["x"]) for one in rows)
    return torch.tensor(
        [
            [value * one["sample"] for value in one["unfiltered"]] + [0.0] * (width - len(one["x"]))
            for one in rows
        ]
    )


@pytest.mark.parametrize(
    ("aggregation", "loss", "kl"),
    [
        ("token_mean", 1.0, 0.5),
        ("seq_mean_token_mean", 1.0, 0.5),
        ("seq_mean_token_sum", 2.0, 1.0),
        ("fixed_length", 2 / 8, 1 / 8),
    ],
)
@pytest.mark.parametrize("denominator", ["retained", "valid"])
def test_a_sequence_that_fails_the_check_is_in_no_denominator(denominator, aggregation, loss, kl):
    """exp(.5) = 1.65 > 1.3: out of the policy term, the KL, the counts; with a reason of its own."""
    rows = [row(2, unfiltered=0.5), row(3, sampler=-0.5, unfiltered=0.5), row(1, sample=False)]
    terms = {"kl_coef": 0.1, "kl_type": "k1", "kl_gradient": "plain", "actor_denominator": denominator}
    step = step_of(rows, section(aggregation, **terms), {"sequence_error_max": 1.3})
    value, gradient, part = loss_and_gradient(step)
    assert value == pytest.approx(loss + 0.1 * kl)
    assert flat(gradient) == pytest.approx([loss / 2, loss / 2, 0, 0, 0, 0])
    assert (part.num_valid, part.num_retained, part.num_trained) == (2, 2, 2)
    assert part.metrics["tokens/dropped_sequence"] == 3 and part.metrics["tokens/sample_masked"] == 1


def test_the_positive_term_is_over_the_retained_tokens_with_a_positive_advantage():
    """-logprob of 1, 2 and a dropped one over three positive tokens, without the importance weight."""
    rows = [
        row(3, a=2.0, x=[-1.0, -2.0, -9.0], old=[-1.0, -2.0, -9.0], sampler=-5.0, keep=[True, True, False]),
        row(2, a=-1.0, x=-7.0, old=-7.0, sampler=-7.0),
        row(2, a=3.0, keep_old=False, old=-math.inf, x=-4.0),
        row(2, a=3.0, sample=False),
    ]
    step = step_of(rows, {"positive_nll_coef": 0.5}, {"correction": "tis", "cap": 3.0})
    value, gradient, part = loss_and_gradient(step)
    assert part.metrics["loss/positive_nll"] == pytest.approx((1 + 2) / 3)
    # Policy: weights min(exp(4), 3) = 3, min(exp(3), 3) = 3 on -2 each, and 1 on +1 twice; 5 are retained.
    assert part.metrics["loss/policy"] == pytest.approx((-2 * 3 * 2 + 2) / 5)
    assert value == pytest.approx(-10 / 5 + 0.5)
    nll = -0.5 / 3
    assert flat(gradient) == pytest.approx([-6 / 5 + nll, -6 / 5 + nll, 0, 1 / 5, 1 / 5, 0, 0, 0, 0])


@pytest.mark.parametrize("microbatch_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("aggregation", "loss", "slopes"),
    [
        ("token_mean", 2.0, [1 / 6, 1 / 6, 4 / 6]),
        ("seq_mean_token_mean", 2.0, [1 / 9, 1 / 3, 4 / 6]),
        ("seq_mean_token_sum", 4.0, [1 / 3, 1 / 3, 4 / 3]),
        ("fixed_length", 0.5, [1 / 24, 1 / 24, 4 / 24]),
    ],
)
def test_b32_no_microbatch_weighs_more_than_another(aggregation, loss, slopes, microbatch_size):
    """B32's microbatches (3, 3), (1, 1), (8, 2), (0, 0) as sequences, cut in three ways."""
    rows = [row(3), row(1), row(2, a=-4.0), row(2, a=-9.0, sample=False)]
    value, gradient, part = loss_and_gradient(step_of(rows, section(aggregation)), microbatch_size)
    assert value == pytest.approx(loss)
    assert flat(gradient) == pytest.approx([*[slopes[0]] * 3, slopes[1], *[slopes[2]] * 2, 0.0, 0.0])
    assert part.metrics["loss/total"] == pytest.approx(loss)


def test_the_importance_weight_multiplies_loss_and_gradient():
    """B27 (c) through the whole step: weight e^.2, ratio e^.5: 2.013753. A cap of 1.1 gives 1.813593."""
    for cap, expected in ((10.0, -2.013753), (1.1, -1.813593)):
        rows = [row(1, x=-0.5, old=-1.0, sampler=-1.2, a=1.0)]
        loss = {"ratio_clip_min": 0.9, "ratio_clip_max": 9.0}
        value, gradient, _ = loss_and_gradient(step_of(rows, loss, {"correction": "tis", "cap": cap}))
        assert value == pytest.approx(expected, abs=1e-5)
        assert gradient == [pytest.approx([expected], abs=1e-5)]


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        # Log weights: row 0 of 8 tokens .05 each (B29 c, the other way); row 1 of 2 tokens -.1, -.3.
        ({"correction": "geometric", "cap": 9.0}, (math.exp(0.05), math.exp(-0.2))),
        ({"correction": "sequence", "cap": 9.0}, (math.exp(0.4), math.exp(-0.4))),
        ({"correction": "sequence", "cap": 1.2}, (1.2, math.exp(-0.4))),
    ],
)
def test_one_weight_per_sequence(correction, weights):
    """Each row of the batch is a sequence of its own, also where two share a microbatch."""
    rows = [row(8, sampler=-0.05), row(2, sampler=[0.1, 0.3])]
    for microbatch_size in (1, 2):
        value, gradient, _ = loss_and_gradient(step_of(rows, {}, correction), microbatch_size)
        first, second = weights
        assert value == pytest.approx((8 * first + 2 * second) / 10, abs=1e-6)
        assert flat(gradient) == pytest.approx([first / 10] * 8 + [second / 10] * 2, abs=1e-6)


@pytest.mark.parametrize("microbatch_size", [1, 2, 5])
def test_gspo_has_one_ratio_for_each_row(microbatch_size):
    """B29 (a) and (d) as rows of one step: ratios 1.221403, 1.105171; -.610701 is the gradient of A = 1."""
    rows = [
        row(3, x=[0.1, 0.3, 9.9], keep_old=[True, True, False], old=[0.0, 0.0, -math.inf], a=1.0),
        row(3, x=[-0.2, 0.0, 0.5], a=1.0),
        row(2, sample=False),
        row(2, x=[-1.0, -2.0], old=[-1.1, -2.3], a=1.0),
    ]
    loss = {"policy": "gspo", "ratio_clip_max": 0.3, "aggregation": "seq_mean_token_mean"}
    value, gradient, part = loss_and_gradient(step_of(rows, loss), microbatch_size)
    first, second = math.exp(0.2), math.exp(0.1)
    assert value == pytest.approx(-(first + second + first) / 3, abs=1e-6)
    expected = [-first / 6, -first / 6, 0, *[-second / 9] * 3, 0, 0, -first / 6, -first / 6]
    assert flat(gradient) == pytest.approx(expected, abs=1e-6)
    assert 3 * gradient[3][0] == pytest.approx(-0.610701, abs=1e-6)
    assert part.metrics["ratio/max"] == pytest.approx(1.221403, abs=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_every_token_left_for_one_reason(seed):
    """Filters, check and masks together: the reasons add up to the tokens of all sequences."""
    importance = {**ICEPOP, "sequence_error_max": 2.0}
    step = draw_step(seed, 6, seed % 3, {}, importance, True)
    metrics = loss_and_gradient(step, 2)[2].metrics
    assert sum(metrics[name] for name in WHY_LEFT) == int((step.batch.length_s - 1).sum())


def test_the_k3_of_a_small_step_is_its_square_over_two():
    """Log ratios of +-1e-4: 5e-9. ratio - 1 - log ratio in float32 would be the rounding of the ratio."""
    rows = [row(1, x=-1.0 + sign * k * 2e-6, old=-1.0) for k in range(20, 60) for sign in (1, -1)]
    metrics = loss_and_gradient(step_of(rows, {}))[2].metrics
    gaps = [torch.tensor(one["x"][0]).sub(-1.0).double().item() for one in rows]
    expected = sum(gap * gap / 2 for gap in gaps) / len(gaps)
    assert metrics["ratio/kl_k3"] == pytest.approx(expected, rel=1e-3)


def test_an_empty_step_has_multipliers_of_zero():
    step = step_of([row(3, sample=False), row(2, sample=False)], section("seq_mean_token_mean", kl_coef=0.1))
    weights = weigh_step(step.batch, step.loss, step.importance, True, None)
    assert float(weights.num_valid) == float(weights.num_retained) == 0
    for name in ("policy", "kl", "nll"):
        assert not getattr(weights, f"{name}_multiplier_sl").any()
    assert loss_and_gradient(step)[0] == 0.0


@pytest.mark.parametrize(
    ("importance", "weights"),
    [
        ({"correction": "tis", "cap": 2.0}, [2.0, 0.0, 1.0]),
        ({"correction": "geometric", "cap": 8.0}, [math.sqrt(3.0), 0.0, math.sqrt(3.0)]),
        ({"correction": "sequence", "cap": 8.0}, [3.0, 0.0, 3.0]),
    ],
)
def test_a_token_outside_the_sampler_s_support_has_no_weight(importance, weights):
    """A sampler logprob of -inf: the token leaves under its reason and stays in the denominator; the other
    two of its sequence, of weights 3 and 1, are weighed as if it were not there.
    """
    rows = [row(3, sampler=[-LN(3), -math.inf, 0.0])]
    value, gradient, part = loss_and_gradient(step_of(rows, section("token_mean"), importance))
    assert flat(gradient) == pytest.approx([weight / 3 for weight in weights])
    assert value == pytest.approx(sum(weights) / 3)
    assert part.metrics["tokens/dropped_importance"] == part.metrics["importance/dropped"] == 1
    assert part.num_retained == 3 and part.metrics["importance/nan"] == 0
