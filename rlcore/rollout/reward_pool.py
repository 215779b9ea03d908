"""Reward processes that grade a batch: a response that raises, hangs or kills its process costs itself alone.

Started once per run, on the first rank of each model replica. Processes that are lost are replaced.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import wait

from rlcore.batch import Graded, Prompt
from rlcore.config_rollout import TaskConfig
from rlcore.rollout.reward import describe, no_reward
from rlcore.rollout.reward_process import ProcessLost, RewardProcess

LEAVE_TIMEOUT_S = 2.0
"""For all processes together, to run what they do at their end."""


class RewardPool:
    """`task.reward_workers` processes, each with the task that `make_task` builds from the same arguments. A
    context: ends them on the way out. They also end when this process does, however it ends.

    The constructor does not wait for them. Collectives: none.
    """

    limits_time = True

    def __init__(self, config: TaskConfig, tokenizer_path: str | None, seed: int) -> None:
        self._setup = pickle.dumps((config, tokenizer_path, seed))
        self._timeout_s = config.reward_timeout_s
        self._processes = [self._start() for _ in range(config.reward_workers)]

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def grade(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> list[Graded]:
        """One outcome a response, in order. Each response has `task.reward_timeout_s` from when a process
        starts on it.

        Raises `ValueError` when a process cannot build the task; the pool is then closed.
        """
        if not self._processes:
            raise ValueError("the reward processes have ended: this pool was closed.")
        batch = list(zip(prompts, responses, strict=True))
        graded: dict[int, Graded] = {}
        waiting = deque(range(len(batch)))
        try:
            while len(graded) < len(batch):
                if not self._processes:
                    raise ValueError("the reward processes have ended: this pool was closed.")
                for place, process in enumerate(self._processes):
                    if waiting and process.is_idle:
                        job = waiting.popleft()
                        self._hand_over(place, job, batch[job], graded)
                self._take_back(graded)
        except BaseException:
            self.close()
            raise
        return [graded[job] for job in range(len(batch))]

    def close(self) -> None:
        """Ends every process. May be called again."""
        processes, self._processes = self._processes, []
        for process in processes:
            process.ask_to_leave()
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        for process in processes:
            process.kill(deadline if process.is_idle else 0.0)

    def _start(self) -> RewardProcess:
        return RewardProcess(self._setup, self._timeout_s)

    def _hand_over(
        self, place: int, job: int, response: tuple[Prompt, Sequence[int]], graded: dict[int, Graded]
    ) -> None:
        """Starts a job, or notes why it cannot be."""
        try:
            self._processes[place].start(job, *response)
        except ProcessLost as lost:
            self._lose(place, job, str(lost), graded)
        except Exception as error:
            graded[job] = no_reward(
                f"Prompt.answer cannot be sent to a reward process ({describe(error)}); set "
                "task.reward_workers=0 or make it picklable"
            )

    def _take_back(self, graded: dict[int, Graded]) -> None:
        """Waits until a process has something to say or is late, and handles all that have or are."""
        at_work = {place: process for place, process in enumerate(self._processes) if not process.is_idle}
        if not at_work:
            return
        first = min(process.deadline for process in at_work.values())
        said = wait([process.channel for process in at_work.values()], max(first - time.monotonic(), 0.0))
        for place, process in at_work.items():
            if process.channel not in said and time.monotonic() < process.deadline:
                continue
            if process.job is None:
                process.finish_start()
                continue
            job = process.job
            try:
                reward, reason = process.finish()
                graded[job] = Graded(reward=reward, reason=reason)
            except ProcessLost as lost:
                self._lose(place, job, str(lost), graded)

    def _lose(self, place: int, job: int, how: str, graded: dict[int, Graded]) -> None:
        """The response whose process is gone has no reward; another process takes its place."""
        hint = " (task.reward_timeout_s)" if how.startswith("took") else ""
        graded[job] = no_reward(f"the reward function {how}{hint}" if hint else f"the reward process {how}")
        self._processes[place] = self._start()
