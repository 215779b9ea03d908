"""One rank of `rlcore train`: builds the parts, hands them to the loop, takes everything down again."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack

from rlcore.cli.launch import record_error, silence_dependencies
from rlcore.config import RunConfig


def train_rank(config: RunConfig) -> None:
    """Runs the config on this rank of an already started run."""
    silence_dependencies()
    from megatron_worker.worker import MegatronWorker
    from rlcore.cli.progress import make_display
    from rlcore.cli.report import write_report
    from rlcore.rollout.engines import start_engine
    from rlcore.rollout.reward import InlineGrader
    from rlcore.rollout.reward_pool import RewardPool
    from rlcore.rollout.tasks import make_task
    from rlcore.run_log import RunLog, SilentLog
    from rlcore.trainer import train

    started = time.perf_counter()
    task = make_task(config.task, config.model.hf_path, config.seed)
    worker = MegatronWorker(config, task.vocab_size)
    with ExitStack() as stack:
        stack.callback(worker.close)
        stack.push(record_before_closing)
        engine = start_engine(config, worker, task.eos_id, stack)
        grader = InlineGrader(task)
        if worker.groups.is_model_leader and config.task.reward_workers > 0:
            grader = stack.enter_context(RewardPool(config.task, config.model.hf_path, config.seed))
        if os.environ["RANK"] != "0":
            train(config, worker, engine, task, grader, SilentLog())
            return
        display = stack.enter_context(make_display(config.train.steps))
        log = stack.enter_context(RunLog(config, display))
        train(config, worker, engine, task, grader, log)
    write_report(log.folder, seconds=time.perf_counter() - started)


def record_before_closing(
    kind: type[BaseException] | None, error: BaseException | None, trace: object
) -> None:
    """An exit callback: records this rank's error while its connections still stand."""
    if isinstance(error, Exception | SystemExit):
        record_error(error)
