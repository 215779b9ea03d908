"""The vLLM rollout over ranks with an engine of our own making that fails in every way an engine can: each
failure is an error on every rank, or a retry where the config allows one.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time

import pytest
import torch
import torch.distributed as dist

from rlcore import waiting
from rlcore.batch import Prompt
from rlcore.groups import ParallelGroups
from rlcore.rollout import vllm_rollout
from rlcore.rollout.completions import Completion, Expected
from rlcore.rollout.vllm_engine import EngineError
from rlcore.rollout.vllm_rollout import VllmRollout, request_seed
from rlcore.weight_sync.wire import WeightsState
from tests.rank_pool import refusals, run_ranks
from tests.toy_worker import toy_config

pytestmark = pytest.mark.distributed
EOS = 1
EXPECTED = Expected(vocab_size=10, eos_id=EOS, max_new_tokens=3, max_length=6, kept=False)


class ToyEngine:
    """Answers `prompt's first id, end`; what it does instead, call by call, is in `faults`."""

    names = ("vLLM",)

    def __init__(self, faults=(), probe_logprob=0.0):
        self.faults, self.probe_logprob = list(faults), probe_logprob
        self.requests, self.calls, self.closed, self.is_alive = [], [], False, True
        self.state = WeightsState()

    def generate(self, requests):
        if requests[0].sampling:
            # The last one of several is the odd one.
            said = [0.0] * (len(requests) - 1) + [self.probe_logprob]
            return [[Completion(ids=[EOS], logprobs=[logprob], finished=True)] for logprob in said]
        self.requests.append(requests)
        fault = self.faults.pop(0) if self.faults else None
        if fault == "dies":
            raise EngineError("vLLM's engine process has died.")
        if fault in ("hangs", "silent"):
            # A call to an engine that has died may not return: only its process tells.
            self.is_alive = fault == "hangs"
            time.sleep(3.0)
        answers = [
            [Completion(ids=[request.prompt_ids[0], EOS], logprobs=[-0.5, -0.25], finished=True)]
            * request.num_samples
            for request in requests
        ]
        if fault == "nan":
            answers[-1][-1] = dataclasses.replace(answers[-1][-1], logprobs=[-0.5, math.nan])
        if fault == "restarts":
            self.state = WeightsState()
        if fault == "fewer":
            answers[-1] = answers[-1][:-1]
        return answers

    def rpc(self, method, **kwargs):
        if method == "weights_state":
            return [dataclasses.asdict(self.state)]
        self.calls.append(method)
        self.state = WeightsState(**kwargs)
        return [dataclasses.asdict(self.state)]

    def reset_prefix_cache(self):
        self.calls.append("reset")

    def check_alive(self):
        if not self.is_alive:
            raise EngineError("vLLM's engine process has died (exit code -9).")

    def close(self):
        self.closed = True


class ToySender:
    """Counts the versions it was asked to send."""

    run = "this run"

    def __init__(self):
        self.sent = []

    def write(self, export, version, link):
        self.sent.append((version, list(export()), link is not None))

    def deliver(self, link, version):
        link.rpc("load", run=self.run, version=version)


class Policy:
    """As much of a worker as the rollout sees: two replicas of `world_size / 2` ranks, or one rank."""

    device = torch.device("cpu")

    def __init__(self, rank, world_size):
        half = max(world_size // 2, 1)
        replicas = [dist.new_group(list(range(start, start + half))) for start in range(0, world_size, half)]
        columns = [dist.new_group(list(range(place, world_size, half))) for place in range(half)]
        self.groups = ParallelGroups(
            model=replicas[rank // half], dp=columns[rank % half], world=dist.group.WORLD
        )

    def export_weights(self):
        return iter([("weight", 1)])


def make_rollout(rank, world_size, engine, **vllm):
    waiting.HEARTBEAT_S = 0.2
    config = toy_config(rollout={"engine": "vllm", "max_new_tokens": 3, "vllm": vllm})
    policy, sender = Policy(rank, world_size), ToySender()
    rollout = VllmRollout(config, policy, lambda: engine, EXPECTED, sender)  # type: ignore[arg-type]
    return rollout, policy, sender


def prompts_of(dp_rank):
    return [
        Prompt(ids=[3 + dp_rank + index] * (1 + index), group_id=10 * dp_rank + index) for index in range(2)
    ]


def draw_on_rank(rank, world_size, faults, retries, timeout_s=20.0):
    """Three ids of the replica's responses, the seeds that rank 0's engine saw, and the versions sent."""
    engine = ToyEngine(faults)
    rollout, policy, sender = make_rollout(rank, world_size, engine, retries=retries, timeout_s=timeout_s)
    rollout.update_weights(0)
    rollout.begin(prompts_of(policy.groups.dp_rank), 2, seed=7 + policy.groups.dp_rank)
    drawn = rollout.collect()
    rollout.update_weights(0)
    rollout.update_weights(1)
    rollout.close()
    seeds = [[request.seed for request in requests] for requests in engine.requests]
    return drawn.ids_sl.tolist(), drawn.version_s.tolist(), seeds, sender.sent, engine.calls, engine.closed


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_replica_gets_its_own_responses(world_size):
    results = run_ranks(draw_on_rank, world_size, (), 0)
    half = max(world_size // 2, 1)
    for rank, (ids, versions, _, sent, _, _) in enumerate(results):
        first, second = 3 + rank // half, 4 + rank // half
        short, long = [first, first, EOS, 0], [second, second, second, EOS]
        assert ids == [short, short, long, long] and versions == [0] * 4
        # The second update to version 0 sends nothing.
        assert sent == [(0, [("weight", 1)], rank == 0), (1, [("weight", 1)], rank == 0)]
    _, _, seeds, _, calls, closed = results[0]
    replicas = 1 if world_size == 1 else 2
    assert seeds == [[request_seed(7 + dp, 0, index) for dp in range(replicas) for index in range(2)]]
    assert calls == ["load", "load"] and closed
    assert all(not result[2] and not result[4] for result in results[1:])


@pytest.mark.parametrize("fault", ["nan", "fewer"])
def test_what_cannot_be_trained_on_is_drawn_again(fault):
    results = run_ranks(draw_on_rank, 2, (fault,), 1)
    seeds = results[0][2]
    assert len(seeds) == 2 and not set(seeds[0]) & set(seeds[1])
    assert results[1][0] == run_ranks(draw_on_rank, 2, (), 1)[1][0]


@pytest.mark.parametrize(
    ("faults", "retries", "timeout_s", "message"),
    [
        (("dies",), 5, 20.0, "engine process has died"),
        (("silent",), 5, 20.0, "engine process has died .exit code -9"),
        (("nan", "nan"), 1, 20.0, "drawn 2 times .*retries=1.*logprob nan of the sampled id 1"),
        (("fewer",), 0, 20.0, "drawn 1 times .*prompt 3: the engine returned 1 of 2 samples"),
        (("restarts",), 5, 20.0, "serves version None of another run, expected version 0"),
        (("hangs",), 5, 0.5, "generation took longer than 0.5 s. Raise rollout.vllm.timeout_s"),
    ],
)
def test_a_failure_is_an_error_on_every_rank(faults, retries, timeout_s, message):
    for said in refusals(draw_on_rank, 2, faults, retries, timeout_s, timeout_s=30.0):
        assert re.search(message, said), said


def start_on_rank(rank, world_size, probe_logprob):
    make_rollout(rank, world_size, ToyEngine(probe_logprob=probe_logprob))


def test_raw_logprobs_are_refused_on_every_rank():
    """B18: an engine whose logprobs say nothing of the truncation."""
    assert all("vLLM returns raw logprobs: -0.7" in said for said in refusals(start_on_rank, 2, -0.7))
    run_ranks(start_on_rank, 2, -1e-8)


def test_each_of_several_servers_is_asked_for_its_logprobs():
    class Servers(ToyEngine):
        names = ("http://a", "http://b")

    assert vllm_rollout.checked(Servers).names == ("http://a", "http://b")
    with pytest.raises(ValueError, match=r"http://b returns raw logprobs: -0\.7"):
        vllm_rollout.checked(lambda: Servers(probe_logprob=-0.7))


def ask_on_rank(rank, world_size, prompts):
    rollout, policy, _ = make_rollout(rank, world_size, ToyEngine())
    rollout.update_weights(0)
    rollout.begin(prompts if policy.groups.dp_rank == 1 else prompts_of(0), 1, seed=0)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "prompt 5 is empty"),
        ([3, 10], "prompt 5 has id 10, outside the model's vocabulary"),
        ([3] * 6, "prompt 5 has 6 tokens, and the engine takes 6: no room for a response"),
    ],
)
def test_a_prompt_that_does_not_fit_is_an_error_on_every_rank(ids, message):
    prompts = [Prompt(ids=ids, group_id=5), Prompt(ids=[3], group_id=6)]
    assert all(message in said for said in refusals(ask_on_rank, 2, prompts))
