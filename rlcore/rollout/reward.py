"""One reward: what the task's function returned as a finite number, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.batch import Graded, Prompt
from rlcore.interfaces import Task
from rlcore.reward_groups import MAX_REWARD

MOST_CHARS = 300
"""Of a reason: three of them and their bytes beyond ASCII fit into what ranks tell each other."""


def grade_response(task: Task, prompt: Prompt, response_ids: Sequence[int]) -> Graded:
    """Calls the task's reward. Lets nothing out but `KeyboardInterrupt`."""
    try:
        value = task.reward(prompt, response_ids)
    except KeyboardInterrupt:
        raise
    except BaseException as cause:  # a reward function may call sys.exit, or have been cancelled by asyncio
        return no_reward(f"the reward function raised {describe(cause)}")
    # float() would also read text.
    if not hasattr(type(value), "__float__"):
        return no_reward(f"the reward function returned a {type(value).__name__}; it must return a number")
    try:
        reward = float(value)
    except Exception as cause:
        return no_reward(
            f"the reward function returned a {type(value).__name__} that is no number: {describe(cause)}"
        )
    # NaN compares False. The same bound as in the estimators, which run on each rank for itself.
    if not abs(reward) <= MAX_REWARD:
        return no_reward(
            f"the reward function returned {reward}; it must return a finite number of at most "
            f"{MAX_REWARD:g} in magnitude"
        )
    return Graded(reward=reward)


def no_reward(reason: str) -> Graded:
    """A response without a reward; the reason in one line of at most `MOST_CHARS`."""
    line = " ".join(reason.split())
    return Graded(reward=None, reason=line if len(line) <= MOST_CHARS else f"{line[: MOST_CHARS - 3]}...")


def describe(error: BaseException) -> str:
    """`Class: message`. The class alone where the message cannot be had: it is the user's code too."""
    try:
        message = str(error)
    except Exception:
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


class InlineGrader:
    """Grades in this process, one response after the other: a reward that hangs hangs the run."""

    limits_time = False

    def __init__(self, task: Task) -> None:
        self._task = task

    def grade(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> list[Graded]:
        """As `Grader.grade`."""
        pairs = zip(prompts, responses, strict=True)
        return [grade_response(self._task, prompt, response_ids) for prompt, response_ids in pairs]
