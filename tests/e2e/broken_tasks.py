"""Tasks that go wrong in the second step, for `task.name=tests.e2e.broken_tasks:...`."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import time

import rlcore.trainer
from rlcore.config_rollout import TaskConfig
from rlcore.rollout.echo_task import EchoTask


class _BreaksInSecondStep(EchoTask):
    def __init__(self, config: TaskConfig, tokenizer_path: str | None, seed: int) -> None:
        super().__init__(dataclasses.replace(config, name="echo"), seed)
        self._step = 0

    def prompts(self, step, num_prompts):
        self._step = step
        return super().prompts(step, num_prompts)


class RaisingTask(_BreaksInSecondStep):
    def reward(self, prompt, response_ids):
        if self._step == 1:
            raise RuntimeError("the grader is down")
        return super().reward(prompt, response_ids)


class NanTask(_BreaksInSecondStep):
    def reward(self, prompt, response_ids):
        return math.nan if self._step == 1 else super().reward(prompt, response_ids)


class KilledTask(_BreaksInSecondStep):
    """One rank dies without a word, as when the system kills it."""

    def prompts(self, step, num_prompts):
        if step == 1 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().prompts(step, num_prompts)


class SlowTask(_BreaksInSecondStep):
    """The rank that grades keeps its peer waiting."""

    def reward(self, prompt, response_ids):
        if self._step == 1:
            time.sleep(60)
        return super().reward(prompt, response_ids)


class LonelyTask(_BreaksInSecondStep):
    """Our own code breaks on the last rank alone, between two collectives."""

    def prompts(self, step, num_prompts):
        if step == 1 and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            rlcore.trainer.build_batch = _broken
        return super().prompts(step, num_prompts)


def _broken(*_):
    raise RuntimeError("the batch is gone")
