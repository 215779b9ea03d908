"""What a task may answer when the loop asks it for prompts, on one rank and on several."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from rlcore.batch import Prompt
from rlcore.groups import ParallelGroups
from rlcore.rollouts import own_prompts
from tests.rank_pool import run_ranks


class PromptTask:
    """Returns, or raises, what it was made with."""

    def __init__(self, outcome):
        self.outcome = outcome

    def prompts(self, step, num_prompts):
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def numbered(ids):
    return [Prompt(ids=[3], group_id=id_) for id_ in ids]


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (numbered([0, 1]), r"gave 2 prompts, expected rollout.prompts_per_step=4"),
        (numbered(range(8)), r"gave 8 prompts, expected rollout.prompts_per_step=4"),
        ([], r"gave 0 prompts, expected rollout.prompts_per_step=4"),
        (numbered([0, 5, 2, 5]), r"2 prompts have group_id=5"),
        (None, r"prompts of step 1: the task raised TypeError"),
        (OSError("no such file"), r"prompts of step 1: the task raised OSError: no such file"),
        (SystemExit(0), r"prompts of step 1: the task raised SystemExit: 0"),
    ],
)
def test_prompts_that_cannot_be_used_are_refused(outcome, message):
    with pytest.raises(ValueError, match=message):
        own_prompts(PromptTask(outcome), 1, 4, ParallelGroups())  # type: ignore[arg-type]


def _prompt_ranks(rank, world_size):
    groups = ParallelGroups(dp=dist.group.WORLD, dp_cp=dist.group.WORLD, world=dist.group.WORLD)
    outcomes = [PromptTask(numbered(range(4))), PromptTask(numbered(range(4)))]
    if rank == 1:
        outcomes[0] = PromptTask(OSError("no such file"))
    seen = []
    for task in outcomes:
        try:
            seen.append([prompt.group_id for prompt in own_prompts(task, 0, 4, groups)])
        except ValueError as error:
            seen.append(str(error))
    return seen


@pytest.mark.distributed
def test_prompts_that_fail_on_one_rank_fail_on_all():
    """Nobody is left in a collective: the next step's prompts are cut as ever."""
    results = run_ranks(_prompt_ranks, 2)
    assert all("the task raised OSError: no such file" in result[0] for result in results)
    assert [result[1] for result in results] == [[0, 1], [2, 3]]
