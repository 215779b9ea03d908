"""The rules of the loss and importance sections, and that every key of both reaches the loss (B31, B50)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from rlcore.cli.compose import compose_run_config
from rlcore.config import ImportanceConfig, LossConfig, load_run_config
from rlcore.config_parse import ConfigError
from tests.split_cases import MODEL, Step, loss_and_gradient, row, step_of

pytestmark = pytest.mark.megatron

ICEPOP = {"correction": "icepop", "low": 0.5, "high": 5.0}
SEQ_MASK = {"correction": "seq_mask_tis", "low": 0.5, "high": 5.0, "cap": 2.0}
RAW = {"correction": "seq_mask_tis", "low": 0.5, "high": 5.0, "raw": True}
SKIP = {"policy": "on_policy", "old_logprobs": "skip", "actor_denominator": "valid"}
EXACT = {"actor_denominator": "retained_exact"}
TIS = {"correction": "tis", "cap": 2.0}
NAN, INF = math.nan, math.inf


def load(loss: dict[str, Any] | None = None, importance: dict[str, Any] | None = None):
    return load_run_config({"model": MODEL, "loss": loss or {}, "importance": importance or {}})


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    # check_dual_clip
    ({"ratio_clip_c": 1.0}, {}, r"loss.ratio_clip_c=1.0: expected more than 1.*Remove it"),
    ({"ratio_clip_c": INF}, {}, r"loss.ratio_clip_c=inf: expected more than 1"),
    ({"ratio_clip_c": NAN}, {}, r"loss.ratio_clip_c=nan: expected more than 1"),
    *(
        (
            {"ratio_clip_c": 3.0, "policy": policy},
            {},
            rf"loss.ratio_clip_c=3.0 does nothing under loss.policy={policy}.*Remove it, or set loss.policy",
        )
        for policy in ("cispo", "reinforce", "on_policy")
    ),
    # check_clip_bounds
    *(
        (
            {"policy": policy, name: 0.1},
            {},
            rf"loss.{name}=0.1 does nothing under loss.policy={policy}.*Remove",
        )
        for policy in ("reinforce", "on_policy")
        for name in ("ratio_clip_min", "ratio_clip_max")
    ),
    # check_sequence_ratio
    (
        {"policy": "gspo"},
        {},
        r"loss.policy=gspo.*loss.aggregation=token_mean.*Set loss.aggregation=seq_mean_token_mean, or",
    ),
    # check_fixed_length
    ({"fixed_length": 8}, {}, r"loss.fixed_length=8 with loss.aggregation=token_mean. Remove it"),
    (
        {"aggregation": "fixed_length"},
        {},
        r"loss.fixed_length=None with loss.aggregation=fixed_length. Set it, for example to rollout.max_new",
    ),
    ({"aggregation": "fixed_length", "fixed_length": 0}, {}, r"loss.fixed_length=0: expected.*at least 1"),
    # check_exact_denominator
    (
        {**EXACT, "aggregation": "seq_mean_token_sum"},
        {},
        r"retained_exact.*loss.aggregation=seq_mean_token_sum.*Set loss.actor_denominator=retained",
    ),
    (
        {**EXACT, "kl_coef": 0.1},
        {},
        r"retained_exact.*loss.kl_coef=0.1 has another denominator.*Set loss.act",
    ),
    (
        {**EXACT, "positive_nll_coef": 0.2},
        {},
        r"retained_exact.*loss.positive_nll_coef=0.2.*Set loss.actor_d",
    ),
    # check_skipped_old_pass
    *(
        (
            {"policy": policy, "old_logprobs": "skip", "aggregation": "seq_mean_token_mean"},
            {},
            rf"loss.old_logprobs=skip leaves loss.policy={policy} without.*Set loss.old_logprobs=recompute",
        )
        for policy in ("clip", "gspo", "cispo")
    ),
    (
        {**SKIP, "policy": "reinforce"},
        TIS,
        r"importance.correction=tis reads old.*Set loss.old_logprobs=recomp",
    ),
    (
        SKIP,
        {"sequence_error_max": 1.2},
        r"importance.sequence_error_max=1.2 reads old.*loss.old_logprobs=recom",
    ),
    (
        {**SKIP, "kl_coef": 0.1, "kl_in": "reward"},
        {},
        r"loss.kl_in=reward reads old.*loss.old_logprobs=recomp",
    ),
    # check_old_mask
    (
        {"policy": "reinforce", "old_logprobs": "skip"},
        {},
        r"loss.actor_denominator=retained counts.*loss.old_logprobs=skip.*Set loss.actor_denominator=valid",
    ),
    # check_kl_options
    (
        {"kl_in": "reward"},
        {},
        r"loss.kl_in=reward with loss.kl_coef=0 does nothing. Set loss.kl_coef above 0",
    ),
    (
        {"kl_type": "k2"},
        {},
        r"loss.kl_type=k2 with loss.kl_coef=0 does nothing. Set loss.kl_coef above 0, or",
    ),
    ({"kl_gradient": "plain"}, {}, r"loss.kl_gradient=plain with loss.kl_coef=0 does nothing.*remove it"),
    (
        {"kl_in": "reward", "kl_coef": 0.1, "kl_gradient": "plain"},
        {},
        r"loss.kl_gradient=plain does nothing under loss.kl_in=reward.*Remove it",
    ),
    # check_importance_bounds
    (
        {},
        {"correction": "icepop", "high": 5.0},
        r"importance.correction=icepop needs importance.low, a weight",
    ),
    (
        {},
        {"correction": "icepop", "low": 0.5},
        r"importance.correction=icepop needs importance.high, a weight",
    ),
    (
        {},
        {"correction": "seq_mask_tis", "low": 0.5},
        r"importance.correction=seq_mask_tis needs importance.high",
    ),
    (
        {},
        {"low": 0.5},
        r"importance.low=0.5 does nothing under importance.correction=none. Remove it, or choose",
    ),
    (
        {},
        {**TIS, "high": 5.0},
        r"importance.high=5.0 does nothing under importance.correction=tis.*icepop, seq_m",
    ),
    ({}, {**ICEPOP, "low": 6.0}, r"importance.low=6.0 and importance.high=5.0: expected 0 <= low <= high"),
    ({}, {**ICEPOP, "low": -0.1}, r"importance.low=-0.1 and importance.high=5.0: expected 0 <= low"),
    ({}, {**ICEPOP, "high": INF}, r"importance.low=0.5 and importance.high=inf: expected"),
    ({}, {**ICEPOP, "low": NAN}, r"importance.low=nan and importance.high=5.0: expected"),
    (
        {},
        {**SEQ_MASK, "low": 0.9, "cap": 0.5},
        r"importance.cap=0.5 is below importance.low=0.9.*Raise the cap",
    ),
    # check_importance_cap
    *(
        ({}, {"correction": name}, rf"importance.correction={name} needs importance.cap.*2 is usual")
        for name in ("tis", "sequence", "geometric")
    ),
    (
        {},
        {"cap": 2.0},
        r"importance.cap=2.0 does nothing under importance.correction=none. Remove it, or choose",
    ),
    ({}, {**ICEPOP, "cap": 2.0}, r"importance.cap=2.0 does nothing under importance.correction=icepop"),
    ({}, {**TIS, "cap": 0.0}, r"importance.cap=0.0: expected a positive number"),
    ({}, {**TIS, "cap": INF}, r"importance.cap=inf: expected a positive number"),
    ({}, {**TIS, "cap": NAN}, r"importance.cap=nan: expected a positive number"),
    # check_raw_weights
    (
        {},
        {"correction": "seq_mask_tis", "low": 0.5, "high": 5.0},
        r"importance.correction=seq_mask_tis needs importance.cap.*Set importance.raw=true",
    ),
    ({}, {**RAW, "cap": 2.0}, r"importance.raw=true has no cap, and importance.cap=2.0.*Remove one"),
    ({}, {**ICEPOP, "raw": True}, r"importance.raw=true does nothing under importance.correction=icepop"),
    # check_importance_statistic
    (
        {},
        {**ICEPOP, "statistic": "sum"},
        r"importance.statistic=sum does nothing under importance.correction=icepop.*set importance.correct",
    ),
    # check_on_policy_correction
    (
        {"policy": "on_policy"},
        TIS,
        r"loss.policy=on_policy.*importance.correction=tis.*Set loss.policy=reinforce, or importance.corr",
    ),
    # check_sequence_error
    (
        {},
        {"sequence_error_max": 0.9},
        r"importance.sequence_error_max=0.9.*Set a number above 1, such as 1.1",
    ),
    ({}, {"sequence_error_max": INF}, r"importance.sequence_error_max=inf"),
    ({}, {"sequence_error_max": NAN}, r"importance.sequence_error_max=nan"),
    # keys and values (B50)
    ({"ratio_clip_mx": 0.28}, {}, r"loss.ratio_clip_mx: no such key. Did you mean loss.ratio_clip_max\?"),
    ({"cap": 2.0}, {}, r"loss.cap: no such key.*lives at importance.cap"),
    ({}, {"ratio_clip_c": 3.0}, r"importance.ratio_clip_c: no such key.*lives at loss.ratio_clip_c"),
    ({"kl_type": "k4"}, {}, r"loss.kl_type='k4': expected one of"),
    ({}, {"correction": "ppo"}, r"importance.correction='ppo': expected one of 'none', 'tis', 'icepop'"),
    ({"entropy_coef": -0.1}, {}, r"loss.entropy_coef=-0.1"),
    ({"positive_nll_coef": NAN}, {}, r"loss.positive_nll_coef=nan"),
]


@pytest.mark.parametrize(("loss", "importance", "message"), REFUSED)
def test_refused(loss, importance, message):
    """The message names the key as typed, and what to set."""
    with pytest.raises(ConfigError, match=message):
        load(loss, importance)


@pytest.mark.parametrize(
    ("loss", "importance"),
    [
        ({"ratio_clip_c": 1.01}, {}),
        ({"ratio_clip_c": 3.0, "policy": "gspo", "aggregation": "seq_mean_token_mean"}, {}),
        ({"policy": "gspo", "aggregation": "fixed_length", "fixed_length": 1}, {}),
        ({"policy": "gspo", "aggregation": "seq_mean_token_sum"}, {"correction": "geometric", "cap": 2.0}),
        ({**EXACT, "kl_coef": 0.1, "kl_in": "reward"}, ICEPOP),
        ({**EXACT, "entropy_coef": 0.1}, {}),
        ({**SKIP, "kl_coef": 0.1}, {}),
        ({**SKIP, "policy": "reinforce", "actor_denominator": "retained_exact"}, {}),
        ({"policy": "on_policy"}, {"sequence_error_max": 1.0}),
        ({"policy": "reinforce"}, TIS),
        ({"kl_coef": 0.1, "kl_gradient": "plain", "kl_type": "abs"}, {}),
        ({}, {**SEQ_MASK, "cap": 0.5}),
        ({}, {**SEQ_MASK, "statistic": "sum"}),
        ({}, RAW),
        ({}, {**ICEPOP, "low": 0.0, "high": 0.0}),
        ({}, {"correction": "sequence", "cap": 0.1}),
    ],
)
def test_what_does_something_is_accepted(loss, importance):
    """Beside each refusal, the nearest section that has a meaning."""
    config = load(loss, importance)
    assert {key: getattr(config.loss, key) for key in loss} == loss
    assert {key: getattr(config.importance, key) for key in importance} == importance


@pytest.mark.parametrize("train", [{"epochs": 2}, {"minibatch_size": 64}])
def test_on_policy_is_one_update_a_step(train):
    """Ratio 1 by definition is wrong from the second update on: the policy has moved."""
    values = {"model": MODEL, "loss": {"policy": "on_policy"}, "train": train}
    key = next(iter(train))
    with pytest.raises(ConfigError, match=rf"loss.policy=on_policy.*train.{key}=.*Set loss.policy=clip, or"):
        load_run_config(values)
    load_run_config({**values, "loss": {"policy": "reinforce"}})
    load_run_config({**values, "train": {"minibatch_size": 128}})


def one_token(ratio: float, advantage: float, **section: Any) -> Step:
    return step_of([row(1, x=math.log(ratio) - 1.0, old=-1.0, a=advantage)], section)


@pytest.mark.parametrize(
    ("ratio", "advantage", "section", "loss", "slope"),
    [
        (1.25, 1.0, {"ratio_clip_max": 0.2}, -1.2, 0.0),
        (1.25, 1.0, {"ratio_clip_max": 0.28}, -1.25, -1.25),
        (0.75, -1.0, {}, 0.8, 0.0),
        (0.75, -1.0, {"ratio_clip_min": 0.28}, 0.75, 0.75),
        (5.0, -1.0, {}, 5.0, 5.0),
        (5.0, -1.0, {"ratio_clip_c": 3.0}, 3.0, 0.0),
        (5.0, 1.0, {"ratio_clip_c": 3.0, "ratio_clip_max": 0.28}, -1.28, 0.0),
    ],
)
def test_b31_the_clip_as_configured(ratio, advantage, section, loss, slope):
    """B50's positive control among them: ratio_clip_max from .2 to .28 takes the loss from -1.2 to -1.25."""
    value, gradient, _ = loss_and_gradient(one_token(ratio, advantage, **section))
    assert value == pytest.approx(loss, abs=1e-6)
    assert gradient[0] == pytest.approx([slope], abs=1e-6)


def test_b31_the_clip_as_typed_on_the_command_line():
    """The same two numbers from words that hydra reads."""
    values = []
    for word in ("loss.ratio_clip_max=0.2", "loss.ratio_clip_max=0.28"):
        config = compose_run_config("demo", [word])
        step = dataclasses.replace(one_token(1.25, 1.0), loss=config.loss, importance=config.importance)
        values.append(loss_and_gradient(step)[0])
    assert values == pytest.approx([-1.2, -1.25], abs=1e-6)


@pytest.mark.parametrize(("current", "loss", "slope"), [(-1.0, 1.28, -1.28), (-2.0, 1.6, -0.8)])
def test_b30_cispo_as_configured(current, loss, slope):
    section = {"policy": "cispo", "ratio_clip_max": 0.28}
    value, gradient, _ = loss_and_gradient(step_of([row(1, x=current, old=-1.5, a=1.0)], section))
    assert value == pytest.approx(loss, abs=1e-6) and gradient[0] == pytest.approx([slope], abs=1e-6)


# Two sequences. Ratios 1.25, .75 | 3, 1; sampler weights exp(.1), exp(-.2) | exp(.7), exp(.9).
ROWS = [
    row(
        3, a=1.0, x=[-0.9, -1.3, -1.0], old=[-1.123144, -1.012318, -1.0], sampler=[-1.223144, -0.812318, -1.0]
    ),
    row(2, a=-1.0, x=[-0.5, -2.0], old=[-1.598612, -2.0], sampler=[-2.298612, -2.9], keep_old=[True, True]),
    row(2, a=1.0, x=-1.0, old=[-1.0, -math.inf], keep_old=[True, False], keep=[False, True]),
]
ROWS = [{**one, "unfiltered": [-1.5] * len(one["x"]), "entropy": [1.1] * len(one["x"])} for one in ROWS]
KL = {"kl_coef": 0.1}

CHANGES: list[tuple[str, dict[str, Any], dict[str, Any], Any]] = [
    # key, loss and importance sections without it, its other value
    ("loss.policy", {}, {}, "cispo"),
    ("loss.ratio_clip_min", {"policy": "cispo"}, {}, 0.3),
    ("loss.ratio_clip_max", {}, {}, 0.28),
    ("loss.ratio_clip_c", {}, {}, 2.0),
    ("loss.aggregation", {}, {}, "seq_mean_token_mean"),
    ("loss.fixed_length", {"aggregation": "fixed_length", "fixed_length": 4}, {}, 5),
    ("loss.actor_denominator", {}, {}, "valid"),
    ("loss.actor_denominator", {}, {}, "retained_exact"),
    ("loss.kl_coef", {}, {}, 0.1),
    ("loss.kl_type", KL, {}, "abs"),
    ("loss.kl_gradient", KL, {}, "plain"),
    ("loss.kl_in", KL, {}, "reward"),
    ("loss.entropy_coef", {}, {}, 0.1),
    ("loss.positive_nll_coef", {}, {}, 0.1),
    ("importance.correction", {}, {"correction": "geometric", "cap": 9.0}, "sequence"),
    ("importance.low", {}, {**SEQ_MASK, "cap": 3.0}, 1.5),
    ("importance.high", {}, ICEPOP, 1.2),
    ("importance.cap", {}, {"correction": "tis", "cap": 9.0}, 1.2),
    ("importance.statistic", {}, {**SEQ_MASK, "high": 3.0}, "sum"),
    ("importance.sequence_error_max", {}, {}, 1.5),
]


def _outcome(loss: dict[str, Any], importance: dict[str, Any]) -> list[float]:
    """The loss and both gradients."""
    step = step_of(ROWS, loss, importance)
    value, gradient, part = loss_and_gradient(step)
    unfiltered = part.gradients["unfiltered"].flatten().tolist()
    return [value, *(number for numbers in gradient for number in numbers), *unfiltered]


@pytest.mark.parametrize(("key", "loss", "importance", "other"), CHANGES)
def test_b50_every_key_does_something(key, loss, importance, other):
    """Another value of the key, and nothing else, changes the loss or its gradient."""
    section, name = key.split(".")
    changed = {"loss": loss, "importance": importance}
    changed[section] = {**changed[section], name: other}
    before, after = _outcome(loss, importance), _outcome(changed["loss"], changed["importance"])
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 1e-3


def test_b50_no_key_is_left_out():
    """A new key needs its line above. `raw` goes with no cap; the others say what is computed and shown."""
    keys = {f"loss.{field.name}" for field in dataclasses.fields(LossConfig)}
    keys |= {f"importance.{field.name}" for field in dataclasses.fields(ImportanceConfig)}
    assert keys - {key for key, *_ in CHANGES} == {
        "loss.old_logprobs",
        "loss.entropy_metric",
        "importance.raw",
    }


def test_raw_weights_have_no_cap():
    """Weight e^1 under a cap of 2 and raw: 2 and 2.718282."""
    for section, expected in ((SEQ_MASK, 2.0), (RAW, math.e)):
        value, _, _ = loss_and_gradient(step_of([row(1, sampler=-1.0)], {}, section))
        assert value == pytest.approx(expected, abs=1e-6)


def test_the_two_other_keys():
    """A skipped old pass is a batch without old logprobs; the metric appears and changes no number."""
    rows = [row(2, x=[-1.0, -3.0], a=2.0)]
    value, gradient, part = loss_and_gradient(step_of(rows, {**SKIP, "entropy_metric": True}))
    assert value == -2.0 and gradient[0] == [-1.0, -1.0]
    assert "entropy/filtered" in part.metrics
    assert "entropy/filtered" not in loss_and_gradient(step_of(rows, SKIP))[2].metrics
