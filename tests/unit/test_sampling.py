"""`SamplingSpec`: off values, refused values, what both engines really use."""

import math

import pytest

from rlcore.sampling import SamplingSpec


@pytest.mark.parametrize("top_k", [None, 0, -1])
@pytest.mark.parametrize("top_p", [None, 1.0])
def test_off_values_do_not_truncate(top_k, top_p):
    spec = SamplingSpec(top_k=top_k, top_p=top_p)
    assert not spec.truncates
    assert spec.to_vllm() == {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "logprobs": 0}


@pytest.mark.parametrize("fields", [{"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_on_values_truncate(fields):
    """B05: the flag is a property of the spec alone, so a top_k above the vocabulary size still says True
    everywhere.
    """
    spec = SamplingSpec(**fields)
    assert spec.truncates
    assert not spec.unfiltered().truncates
    assert {key: spec.to_vllm()[key] for key in fields} == fields


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"top_k": -2}, "top_k=-2"),
        ({"top_k": 1.5}, "top_k=1.5"),
        ({"top_k": True}, "top_k=True"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.2}, "top_p=1.2"),
        ({"top_p": math.nan}, "top_p=nan"),
        ({"min_p": -0.1}, "min_p=-0.1"),
        ({"min_p": 1.1}, "min_p=1.1"),
        ({"temperature": 0.0}, "temperature=0.0 is greedy"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"temperature": 9e-6}, "greedy"),
        ({"ties": "first"}, "ties='first'"),
    ],
)
def test_refused_values_are_named(fields, named):
    """B05 (d), B06: a value no sampler accepts, and greedy decoding, which has no distribution."""
    with pytest.raises(ValueError, match=named):
        SamplingSpec(**fields)


def test_tiny_temperature_is_raised_like_the_sampler_does():
    """B06: at T=0.001 vLLM really divides by 0.01."""
    with pytest.warns(UserWarning, match="acts as 0.01"):
        spec = SamplingSpec(temperature=0.001)
    assert spec.effective_temperature == 0.01
    assert spec.to_vllm()["temperature"] == 0.01
