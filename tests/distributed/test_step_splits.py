"""However a step is cut over ranks and microbatches: loss, gradient and metrics are those of one piece."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.quantiles import LARGEST, RELATIVE_ERROR
from tests.loss_oracle import Outcome, step_in_one_piece
from tests.rank_pool import run_ranks
from tests.split_cases import Cut, Part, Step, cuts_of, draw_step, parts_on_rank

pytestmark = [pytest.mark.distributed, pytest.mark.megatron]

TOLERANCE = 1e-5
WORLDS = (1, 2, 4)


def expected_of(step: Step) -> Outcome:
    return step_in_one_piece(step.batch, step.scores, step.loss, step.importance, step.truncates)


def assert_close(ours: float, expected: float, hint: object, scale: float = 0.0) -> None:
    """To 1e-5 of the larger of 1, the value, and `scale`: what cancels in a sum is not lost, but not more."""
    if math.isnan(expected):
        assert math.isnan(ours), hint
        return
    assert abs(ours - expected) <= TOLERANCE * max(1.0, abs(expected), scale), (hint, ours, expected)


def check_cut(step: Step, cut: Cut, parts: list[Part], expected: Outcome) -> None:
    """All ranks' parts against the step in one piece."""
    exact = step.loss.actor_denominator == "retained_exact"
    divisor = max(1, sum(part.num_trained for part in parts)) if exact else 1
    assert sum(part.num_trained for part in parts) == expected.num_trained, cut
    scale = max(abs(value) for name, value in expected.metrics.items() if name.startswith("loss/"))
    assert_close(sum(part.value for part in parts) / divisor, expected.loss, cut, scale)
    for name, gradient_sl in expected.gradients.items():
        ours_sl = torch.zeros_like(gradient_sl)
        for rows, part in zip(cut.rows, parts, strict=True):
            mine = part.gradients[name].double() / divisor
            ours_sl[list(rows), : mine.shape[1]] = mine
        bound_sl = TOLERANCE * gradient_sl.abs().clamp(min=1e-3)
        assert bool(((ours_sl - gradient_sl).abs() <= bound_sl).all()), (name, cut)
    for part in parts:
        assert part.num_retained == expected.metrics["tokens/retained"]
        assert part.num_valid == expected.metrics["tokens/valid"]
        check_metrics(part.metrics, expected, cut, scale)


def check_metrics(ours: dict[str, float], expected: Outcome, hint: object, scale: float) -> None:
    quantiles = {name: value for name, value in ours.items() if "quantile" in name}
    assert sorted(set(ours) - set(quantiles)) == sorted(expected.metrics), hint
    for name, value in expected.metrics.items():
        assert_close(ours[name], value, (name, hint), scale if name.startswith("loss/") else 0.0)
    assert len(quantiles) == (3 if expected.num_trained else 0), hint
    for name, value in quantiles.items():
        level = float(name.rsplit("p", 1)[1]) / 100
        quantile = torch.quantile(expected.ratio_n.clamp(max=LARGEST), level).item()
        assert value == pytest.approx(quantile, rel=2 * RELATIVE_ERROR, abs=1e-7), (name, hint)


def check_step(step: Step, cuts: dict[int, list[Cut]]) -> None:
    expected = expected_of(step)
    for world_size, chosen in cuts.items():
        ranks = run_ranks(parts_on_rank, world_size, step, chosen)
        for index, cut in enumerate(chosen):
            check_cut(step, cut, [parts[index] for parts in ranks], expected)


@st.composite
def objectives(draw) -> tuple[dict, dict, bool]:
    """Any loss and importance section that the rules accept, and whether the distribution is truncated."""
    policy = draw(st.sampled_from(["clip", "gspo", "cispo", "reinforce", "on_policy"]))
    loss: dict = {"policy": policy}
    high = draw(st.sampled_from([0.2, 0.28]))
    if policy not in ("reinforce", "on_policy"):
        loss["ratio_clip_max"] = high
    denominator = draw(st.sampled_from(["retained", "valid", "retained_exact"]))
    if policy == "gspo" and denominator == "retained_exact":
        denominator = "retained"
    if policy in ("clip", "gspo"):
        loss["ratio_clip_c"] = draw(st.sampled_from([None, 3.0]))
    exact = denominator == "retained_exact"
    importance: dict = {}
    skips = policy in ("on_policy", "reinforce") and draw(st.booleans())
    if skips:
        loss["old_logprobs"] = "skip"
        denominator = "valid" if denominator == "retained" else denominator
    else:
        importance = draw(st.sampled_from(CORRECTIONS if policy != "on_policy" else [{}]))
        importance = importance | draw(st.sampled_from([{}, {}, {"sequence_error_max": 2.0}]))
    loss["actor_denominator"] = denominator
    if not exact:
        loss |= draw(st.sampled_from(AGGREGATIONS[policy == "gspo" :]))
        loss["positive_nll_coef"] = draw(st.sampled_from([0.0, 0.7]))
    kl_in = "reward" if exact else "loss"
    if not (exact and skips) and draw(st.booleans()):
        loss |= {"kl_coef": 0.3, "kl_in": kl_in, "kl_type": draw(st.sampled_from(KL_TYPES))}
        loss["kl_gradient"] = "score" if exact else draw(st.sampled_from(["score", "plain"]))
    loss["entropy_coef"] = draw(st.sampled_from([0.0, 0.5]))
    loss["entropy_metric"] = draw(st.booleans())
    return loss, importance, draw(st.sampled_from([True, True, False]))


KL_TYPES = ["k1", "k2", "k3", "abs", "mse"]
AGGREGATIONS = [
    {"aggregation": "token_mean"},
    {"aggregation": "seq_mean_token_mean"},
    {"aggregation": "seq_mean_token_sum"},
    {"aggregation": "fixed_length", "fixed_length": 7},
]
CORRECTIONS = [
    {},
    {"correction": "tis", "cap": 2.0},
    {"correction": "icepop", "low": 0.5, "high": 5.0},
    {"correction": "seq_mask_tis", "low": 0.6, "high": 1.7, "cap": 2.0},
    {"correction": "seq_mask_tis", "low": 0.2, "high": 5.0, "statistic": "sum", "raw": True},
    {"correction": "sequence", "cap": 3.0},
    {"correction": "geometric", "cap": 2.0},
]


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 10**6),
    num_rows=st.integers(4, 8),
    num_masked=st.sampled_from([0, 0, 1, 2, 4, 8]),
    sections=objectives(),
    chosen=st.tuples(*[st.integers(0, 15)] * 3),
)
def test_a_step_is_the_same_however_it_is_cut(seed, num_rows, num_masked, sections, chosen):
    """Any objective on any batch: one way per world size of the 48 (order, microbatch size, padding)."""
    step = draw_step(seed, num_rows, num_masked, *sections)
    check_step(
        step,
        {world: [cuts_of(num_rows, world)[pick]] for world, pick in zip(WORLDS, chosen, strict=True)},
    )


# A batch that holds everything: see the last test.
SEED = 25
EVERY_CUT: dict[str, tuple[dict, dict]] = {
    "gspo": (
        {"policy": "gspo", "aggregation": "seq_mean_token_mean", "ratio_clip_c": 3.0},
        CORRECTIONS[3],
    ),
    "clip_kl_nll": ({"kl_coef": 0.3, "positive_nll_coef": 0.7, "entropy_coef": 0.5}, CORRECTIONS[2]),
    "exact": ({"actor_denominator": "retained_exact", "entropy_coef": 0.5}, CORRECTIONS[1]),
    "checked": (
        {"policy": "cispo", "aggregation": "seq_mean_token_sum", "kl_coef": 0.1, "kl_type": "k2"},
        {**CORRECTIONS[5], "sequence_error_max": 2.0},
    ),
}


@pytest.mark.parametrize("name", EVERY_CUT)
def test_every_cut(name):
    """All 48 ways; the last three rows are masked: empty microbatches, and an empty last rank."""
    loss, importance = EVERY_CUT[name]
    step = draw_step(SEED, 8, 3, loss, importance, True)
    cuts = {world: cuts_of(8, world) for world in WORLDS}
    assert sum(len(chosen) for chosen in cuts.values()) == 48
    check_step(step, cuts)


def test_the_batches_hold_every_kind_of_token():
    """Otherwise the tests above would compare ways of cutting easy batches."""
    step = draw_step(SEED, 8, 3, *EVERY_CUT["clip_kl_nll"], True)
    metrics = expected_of(step).metrics
    for name in (
        "prompt",
        "sample_masked",
        "dropped_keep_old",
        "dropped_keep",
        "dropped_importance",
        "trained",
    ):
        assert metrics[f"tokens/{name}"] > 0, name
    assert metrics["ratio/clipped_low"] > 0 and metrics["ratio/clipped_high"] > 0
    assert metrics["kl/clamped"] > 0 and metrics["loss/positive_nll"] != 0 and metrics["ratio/max"] > 100
    checked = expected_of(draw_step(SEED, 8, 3, *EVERY_CUT["checked"], True))
    assert checked.metrics["tokens/dropped_sequence"] > 0 and checked.metrics["tokens/trained"] > 0
    assert torch.isinf(step.batch.sampler_logprob_sl[step.batch.token_mask_sl]).any()
