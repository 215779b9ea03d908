"""Tasks that go wrong in the second step, for `task.name=tests.e2e.broken_tasks:...`.

A prompt carries its step to the reward, which runs in another process.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time

import rlcore.trainer
from rlcore.config_rollout import TaskConfig
from rlcore.rollout.echo_task import EchoTask


class _BreaksInSecondStep(EchoTask):
    def __init__(self, config: TaskConfig, tokenizer_path: str | None, seed: int) -> None:
        super().__init__(dataclasses.replace(config, name="echo"), seed)

    def prompts(self, step, num_prompts):
        prompts = super().prompts(step, num_prompts)
        return [
            dataclasses.replace(prompt, answer=(prompt.answer, step, index))
            for index, prompt in enumerate(prompts)
        ]

    def reward(self, prompt, response_ids):
        letter, step, index = prompt.answer
        if step == 1:
            self.go_wrong(index)
        return super().reward(dataclasses.replace(prompt, answer=letter), response_ids)

    def go_wrong(self, index):
        """In the second step, for each response to the prompt with this index."""


class RaisingTask(_BreaksInSecondStep):
    """Every reward."""

    def go_wrong(self, index):
        raise RuntimeError("the grader is down")


class UnluckyTask(_BreaksInSecondStep):
    """All rewards of the first three prompts: one way each."""

    def go_wrong(self, index):
        if index == 0:
            raise RuntimeError("this one is broken")
        if index == 1:
            os._exit(3)
        if index == 2:
            time.sleep(60)


class KilledTask(_BreaksInSecondStep):
    """One rank dies without a word, as when the system kills it."""

    def prompts(self, step, num_prompts):
        if step == 1 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().prompts(step, num_prompts)


class SlowTask(_BreaksInSecondStep):
    """The rank that grades keeps its peer waiting."""

    def go_wrong(self, index):
        time.sleep(60)


class LonelyTask(_BreaksInSecondStep):
    """Our own code breaks on the last rank alone, between two collectives."""

    def prompts(self, step, num_prompts):
        if step == 1 and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            rlcore.trainer.build_batch = _broken
        return super().prompts(step, num_prompts)


def _broken(*_):
    raise RuntimeError("the batch is gone")
