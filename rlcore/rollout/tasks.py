"""Picks the task of a run by name. Each family lives in a file of its own; all satisfy `interfaces.Task`."""

from __future__ import annotations

import importlib

from rlcore.config_parse import ConfigError
from rlcore.config_rollout import TaskConfig
from rlcore.interfaces import Task
from rlcore.rollout.echo_task import EchoTask

_REASONING_GYM = "reasoning_gym/"


def make_task(
    config: TaskConfig, tokenizer_path: str | None, seed: int, *, grades_only: bool = False
) -> Task:
    """The task `config.name` asks for.

    - `echo`: characters, no tokenizer (`tokenizer_path` must be None);
    - `reasoning_gym/<dataset>`, `jsonl`, `math`: need the tokenizer folder of a Hugging Face model;
    - `package.module:factory`: your own; called as `factory(config, tokenizer_path, seed)`.

    `seed` fixes the prompts. `grades_only`: no prompts will be asked for, which some tasks make use of.
    Raises `ConfigError` naming `task.name` or `task.args` when the task cannot be built.
    """
    if config.name == "echo":
        if tokenizer_path is not None:
            raise ConfigError(
                "task.name=echo has its own character vocabulary and cannot be put to a pretrained model "
                f"({tokenizer_path}). Set model.hf_path=null, or choose a reasoning_gym/<dataset> task."
            )
        return EchoTask(config, seed)
    if ":" in config.name:
        return _load_factory(config.name)(config, tokenizer_path, seed)
    if config.name not in ("jsonl", "math") and not config.name.startswith(_REASONING_GYM):
        raise ConfigError(
            f"task.name={config.name}: expected echo, reasoning_gym/<dataset>, jsonl, math, or "
            "package.module:factory of your own."
        )
    if tokenizer_path is None:
        raise ConfigError(
            f"task.name={config.name} needs a tokenizer. Set model.hf_path to a Hugging Face model folder."
        )
    if config.name == "jsonl":
        from rlcore.rollout.jsonl_task import JsonlTask

        return JsonlTask(config, tokenizer_path, seed, grades_only)
    if config.name == "math":
        from rlcore.rollout.math_task import MathTask

        return MathTask(config, tokenizer_path, seed, grades_only)
    from rlcore.rollout.reasoning_gym_task import ReasoningGymTask

    return ReasoningGymTask(config, tokenizer_path, seed, dataset=config.name.removeprefix(_REASONING_GYM))


def _load_factory(name: str):
    module_name, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"task.name={name}: cannot be loaded: {error}.") from error
