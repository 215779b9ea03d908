"""What an engine is told, and by which way its weights come."""

from __future__ import annotations

import pytest

from rlcore.rollout.vllm_settings import (
    TIE_MARGIN,
    engine_arguments,
    engine_settings,
    expected_of,
    transfer_of,
)
from tests.toy_worker import toy_config


def config_of(backend="auto", sampling=None, **vllm):
    return toy_config(
        parallel={"backend": backend},
        sampling=sampling or {},
        rollout={"engine": "vllm", "max_new_tokens": 4, "vllm": vllm},
    )


@pytest.mark.parametrize(
    ("backend", "urls", "has_gpu", "expected"),
    [
        ("auto", [], False, "folder"),
        ("auto", [], True, "ipc"),
        ("auto", ["http://a:1"], True, "nccl"),
        # vLLM numbers the workers of every server from 1.
        ("auto", ["http://a:1", "http://b:1"], True, "folder"),
        # The weights are on the host, whatever the machine has.
        ("cpu", [], True, "folder"),
        ("cpu", ["http://a:1"], True, "folder"),
    ],
)
def test_weights_go_the_way_that_there_is(backend, urls, has_gpu, expected):
    config = config_of(backend, urls=urls)
    assert transfer_of(config, has_gpu) == expected
    expectation = expected_of(config, 30, 16, 1)
    settings = engine_settings(config, expectation, has_gpu)
    arguments = engine_arguments(config, expectation, settings, has_gpu)
    way = arguments.get("weight_transfer_config")
    assert way == (None if expected == "folder" else {"backend": expected})


def test_a_way_that_needs_a_gpu_is_refused_without_one():
    config = config_of(transfer="ipc")
    assert transfer_of(config, True) == "ipc"
    with pytest.raises(ValueError, match=r"rollout.vllm.transfer=ipc needs a GPU, and there is none"):
        transfer_of(config, False)


@pytest.mark.parametrize(
    ("support", "urls", "has_gpu", "candidates", "own_mask"),
    [
        ("recompute", [], False, 0, False),
        ("replay", [], False, 5 + TIE_MARGIN, False),
        ("audit", [], True, 0, True),
        # A server's own mask is not asked for: it may run anywhere.
        ("replay", ["http://a:1"], True, 5 + TIE_MARGIN, False),
    ],
)
def test_where_kept_ids_come_from(support, urls, has_gpu, candidates, own_mask):
    config = config_of(sampling={"top_k": 5, "support": support}, urls=urls)
    expected = expected_of(config, 100, 16, 1)
    settings = engine_settings(config, expected, has_gpu)
    assert (settings.num_candidates, settings.sampling_mask, settings.lists_all) == (
        candidates,
        own_mask,
        False,
    )
    assert expected.kept == (support != "recompute")
    assert engine_arguments(config, expected, settings, has_gpu)["max_logprobs"] == max(candidates, 1)
    few = engine_settings(config, expected_of(config, 12, 16, 1), has_gpu)
    assert few.num_candidates == min(candidates, 12) and few.lists_all == (candidates > 0)
