"""The bias predicted from rollouts: B18 from the op to the factor per sequence, and what a file may hold."""

from __future__ import annotations

import json
import math

import pytest
import torch

from rlcore.cli.lint_command import bias_text
from rlcore.lint_bias import PredictedBias, predicted_bias, read_rollouts
from rlcore.ops.logprob import vocab_parallel_logprob
from rlcore.sampling import SamplingSpec

LOG_MASS = -0.126928
"""B18: log of (e + 1) / (e + 1 + 1/e + 1/e^2)."""


def test_b18_from_the_op_to_a_sequence():
    """Processed -1.313262, unfiltered -1.440190: .880797 per token, .466934 over 6."""
    logits_tv = torch.tensor([[1.0, 0.0, -1.0, -2.0]], dtype=torch.float64).repeat(6, 1)
    target_t = torch.ones(6, dtype=torch.int64)
    scores = vocab_parallel_logprob(logits_tv, target_t, SamplingSpec(top_p=0.8))
    assert scores.logprob_t.tolist() == pytest.approx([-1.313262] * 6, abs=1e-6)
    assert scores.unfiltered_logprob_t.tolist() == pytest.approx([-1.440190] * 6, abs=1e-6)
    bias = predicted_bias([scores.log_mass_t.tolist()])
    assert bias.abs_log_mass_mean == pytest.approx(-LOG_MASS, abs=1e-6)
    assert bias.token_factor == pytest.approx(0.880797, abs=1e-6)
    assert bias.sequence_factor_mean == pytest.approx(0.466934, abs=1e-6)
    assert (bias.num_sequences, bias.num_tokens, bias.longest) == (1, 6, 6)
    half = vocab_parallel_logprob(logits_tv[:1], target_t[:1], SamplingSpec(temperature=0.5))
    assert half.logprob_t.tolist() == pytest.approx([-2.145078], abs=1e-6)


def test_several_sequences_by_hand():
    """S of 0.5 twice, 0.8 once, 1 once: products 0.25, 0.8, 1; the 5th percentile is a tenth of the way from
    the first to the second.
    """
    bias = predicted_bias([[math.log(0.5), math.log(0.5)], [math.log(0.8)], [0.0]])
    assert bias == PredictedBias(
        num_sequences=3,
        num_tokens=4,
        abs_log_mass_mean=pytest.approx((2 * math.log(2) + math.log(1.25)) / 4),
        token_factor=pytest.approx(0.2**0.25),
        sequence_factor_mean=pytest.approx(2.05 / 3),
        sequence_factor_p5=pytest.approx(0.25 + 0.1 * 0.55),
        sequence_factor_min=pytest.approx(0.25),
        longest=2,
    )


def test_both_forms_of_a_line_are_the_same_prediction(tmp_path):
    """The file's log S is raw minus processed; blank lines are none."""
    path = tmp_path / "sample.jsonl"
    pair = {"sampler_logprobs": [-1.313262] * 6, "unfiltered_logprobs": [-1.44019] * 6}
    path.write_text(json.dumps({"log_mass": [LOG_MASS] * 6}) + "\n\n" + json.dumps(pair) + "\n")
    first, second = read_rollouts(path)
    assert first == pytest.approx(second, abs=1e-12) == [LOG_MASS] * 6
    assert predicted_bias([second]).sequence_factor_min == pytest.approx(0.466934, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"no response in it, expected one a line"),
        ("{", r"line 1: not JSON"),
        ("[1]", r"line 1: expected an object with log_mass, or with sampler_logprobs"),
        ('{"sampler_logprobs": [-1]}', r"line 1: expected an object with log_mass, or with"),
        ('{"log_mass": -0.1}', r"line 1: log_mass is no list of numbers"),
        ('{"log_mass": ["-0.1"]}', r"line 1: log_mass is no list of numbers"),
        ('{"log_mass": [true]}', r"line 1: log_mass is no list of numbers"),
        ('{"log_mass": [0]}\n{"log_mass": []}', r"line 2 has no token: leave it out"),
        ('{"log_mass": [0, NaN]}', r"line 1, token 1: log S is nan, expected a finite number"),
        ('{"log_mass": [-Infinity]}', r"line 1, token 0: log S is -inf"),
        (
            '{"sampler_logprobs": [-2.0], "unfiltered_logprobs": [-1.5]}',
            r"line 1, token 0: log S is 0.5, expected.*Are the two logprobs swapped",
        ),
        (
            '{"sampler_logprobs": [-2, -1], "unfiltered_logprobs": [-1]}',
            r"line 1: sampler_logprobs and unfiltered_logprobs have 2 and 1 tokens, expected equally many",
        ),
    ],
)
def test_what_is_no_sample_is_refused(tmp_path, text, message):
    path = tmp_path / "sample.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_rollouts(path)
    assert str(caught.value).startswith(f"--rollouts {path}")


def test_rounding_is_no_error_and_nothing_is_no_prediction():
    """Two float32 logprobs of one number may differ by their last bits either way."""
    assert predicted_bias([[1e-6]]).token_factor == pytest.approx(1.000001, abs=1e-9)
    with pytest.raises(ValueError, match="no response"):
        predicted_bias([])
    with pytest.raises(ValueError, match="cannot be read"):
        read_rollouts("/nowhere/sample.jsonl")


def test_the_text_has_the_reference_of_the_config():
    """ln 0.9 = -0.105 and 0.9^6 = 0.531; the config's own top-p where it has one."""
    bias = predicted_bias([[LOG_MASS] * 6])
    text = bias_text(bias, None)
    for number in ("0.1269", "0.8808", "0.467", "top_p=0.9 ", "-0.105", "0.531 over 6"):
        assert number in text
    assert "top_p=0.8 " in bias_text(bias, 0.8) and "-0.223" in bias_text(bias, 0.8)
    assert "top_p=0.9 " in bias_text(bias, 1.0)
