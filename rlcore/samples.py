"""A few responses of each step as a person reads them, with what sampler and trainer say of each token.

`rlcore lint --rollouts runs/x/samples.jsonl` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from rlcore.batch import Rollout, TrainBatch
from rlcore.grading import Rewards, responses
from rlcore.interfaces import Task

_DIGITS = 7


def sample_records(
    step: int, count: int, task: Task, rollout: Rollout, batch: TrainBatch, rewards: Rewards
) -> list[dict[str, Any]]:
    """The first `count` responses of this rank, one JSON object each.

    Token lists have one entry a response token, the end-of-text id included; None is a number that is not
    finite, such as the logprob of a token outside the support. Without an old pass there are no
    `old_logprobs` and no `log_mass`.
    """
    columns = {
        "sampler_logprobs": rollout.sampler_logprob_sl,
        "old_logprobs": batch.old_logprob_sl,
        "log_mass": batch.old_log_mass_sl,
    }
    records = []
    for row, (ids, _) in enumerate(zip(responses(rollout), range(count), strict=False)):
        start, stop = int(rollout.prompt_length_s[row]), int(rollout.length_s[row])
        records.append(
            {
                "step": step,
                "version": int(rollout.version_s[row]),
                "group_id": int(rollout.group_id_s[row]),
                "prompt": text_of(task, rollout.ids_sl[row, :start].tolist()),
                "response": text_of(task, ids),
                "finished": bool(rollout.finished_s[row]),
                "reward": float(rewards.reward_s[row]) if rewards.graded_s[row] else None,
                "counts": bool(batch.sample_mask_s[row]),
                **{
                    name: numbers(value_sl[row, start:stop])
                    for name, value_sl in columns.items()
                    if value_sl is not None
                },
            }
        )
    return records


def text_of(task: Task, ids: Sequence[int]) -> str | None:
    """None where a task of the user's own cannot decode them: no log is worth a run."""
    try:
        return str(task.decode(ids))
    except Exception:
        return None


def numbers(value_t: torch.Tensor) -> list[float | None]:
    """For JSON, which knows no infinity."""
    return [round(value, _DIGITS) if math.isfinite(value) else None for value in value_t.tolist()]
