"""When prompts are asked for, when weights are sent and when a step trains: in step, and one step ahead."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rlcore.rollout.policy_sampler import PolicySampler
from rlcore.rollout.reward import InlineGrader
from rlcore.rollout.tasks import make_task
from rlcore.rollouts import rollout_seed
from rlcore.trainer import train
from tests.toy_worker import ToyWorker, toy_config

STEPS = 3


class Worker(ToyWorker):
    def __init__(self, config, vocab_size, events):
        super().__init__(config, vocab_size)
        self.events = events

    def train_step(self, batch):
        self.events.append(("train", batch))
        return super().train_step(batch)


class Engine(PolicySampler):
    """Draws when asked, as an engine does that runs beside the trainer, from a copy of the weights."""

    def __init__(self, worker, config, eos_id, events):
        copy = ToyWorker(config, worker.vocab_size)
        super().__init__(copy, config.sampling.spec(), eos_id, config.rollout.max_new_tokens, 16)
        self.policy, self.events, self.drawn = worker, events, None

    def update_weights(self, version):
        super().update_weights(version)
        self.decoder.table.data.copy_(self.policy.table.data)
        self.events.append(("update", version))

    def begin(self, prompts, samples_per_prompt, seed):
        self.events.append(("begin", seed))
        self.drawn = self.generate(prompts, samples_per_prompt, seed)

    def collect(self):
        self.events.append(("collect", None))
        assert self.drawn is not None
        drawn, self.drawn = self.drawn, None
        return drawn


class Log:
    def __init__(self):
        self.records = []

    def step(self, step, metrics, updates, *_):
        self.records.append(metrics)


def run(one_step_off):
    config = toy_config(train={"steps": STEPS, "microbatch_size": 8})
    config = dataclasses.replace(
        config, rollout=dataclasses.replace(config.rollout, one_step_off=one_step_off)
    )
    task = make_task(config.task, None, config.seed)
    events: list = []
    worker = Worker(config, task.vocab_size, events)
    log = Log()
    train(config, worker, Engine(worker, config, task.eos_id, events), task, InlineGrader(task), log)
    return events, log.records


def names(events):
    return [name for name, _ in events]


@pytest.mark.parametrize("one_step_off", [False, True])
def test_what_is_drawn_when(one_step_off):
    events, records = run(one_step_off)
    if one_step_off:
        # The next step's responses are under way while a step trains; the last step starts none.
        ahead = ["collect", "update", "begin", "train"]
        assert names(events) == ["update", "begin", *ahead, *ahead, "collect", "train"]
        assert [value for name, value in events if name == "update"] == [0, 0, 1]
        assert [record["rollout/staleness"] for record in records] == [0, 1, 1]
    else:
        assert names(events) == ["update", "begin", "collect", "train"] * STEPS
        assert [value for name, value in events if name == "update"] == [0, 1, 2]
        assert [record["rollout/staleness"] for record in records] == [0, 0, 0]
    seeds = [value for name, value in events if name == "begin"]
    assert seeds == [rollout_seed(0, step, 0) for step in range(STEPS)]


def test_stale_responses_are_scored_under_the_policy_that_trains():
    """One step off, the sampler's logprobs are the older policy's and the old logprobs the newer one's."""
    fresh, _ = run(False)
    ahead, records = run(True)

    def gaps(events):
        batches = [value for name, value in events if name == "train"]
        return [
            float(
                (batch.old_logprob_sl - batch.sampler_logprob_sl)[batch.token_mask_sl & batch.keep_old_sl]
                .abs()
                .max()
            )
            for batch in batches
        ]

    assert max(gaps(fresh)) < 1e-5
    assert gaps(ahead)[0] < 1e-5 and min(gaps(ahead)[1:]) > 1e-3
    # The first step draws and trains as without the overlap.
    first, same = (next(value for name, value in events if name == "train") for events in (fresh, ahead))
    assert torch.equal(first.ids_sl, same.ids_sl)
    assert records[1]["mismatch/abs_mean"] > 1e-4
