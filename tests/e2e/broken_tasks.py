"""Tasks whose reward goes wrong in the second step, for `task.name=tests.e2e.broken_tasks:...`."""

from __future__ import annotations

import dataclasses
import math

from rlcore.config import TaskConfig
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


class DyingTask(_BreaksInSecondStep):
    """One rank dies without a word, as when the system kills it."""

    def reward(self, prompt, response_ids):
        if self._step == 1:
            import os

            os._exit(7)
        return super().reward(prompt, response_ids)
