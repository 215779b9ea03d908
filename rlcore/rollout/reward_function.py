"""A reward function of the user's own, named by module or by file."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rlcore.config_parse import ConfigError

GIVEN = ("response", "answer", "prompt", "record")
"""Keyword arguments that every reward function gets."""


def load_reward(name: str, reward_args: Mapping[str, Any]) -> Callable[..., float]:
    """The function, with `reward_args` filled in. Raises `ConfigError` naming `task.args.reward`."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ConfigError(
            f"task.args.reward={name}: expected package.module:function or path/to/file.py:function."
        )
    try:
        module = _load_file(place) if place.endswith(".py") else importlib.import_module(place)
        function = getattr(module, attribute)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"task.args.reward={name}: cannot be loaded: {type(error).__name__}: {error}."
        ) from error
    _check_arguments(name, function, reward_args)
    return functools.partial(function, **reward_args)


def _check_arguments(name: str, function: Any, reward_args: Mapping[str, Any]) -> None:
    """The function can be called as it will be."""
    for key in reward_args:
        if key in GIVEN:
            raise ConfigError(f"task.args.reward_args.{key}: every reward function gets its own `{key}`.")
    try:
        signature = inspect.signature(function)
    except TypeError as error:
        raise ConfigError(f"task.args.reward={name}: is not a function.") from error
    except ValueError:
        return  # written in C; only calling it will tell
    try:
        signature.bind(**dict.fromkeys(GIVEN), **reward_args)
    except TypeError as error:
        raise ConfigError(
            f"task.args.reward={name}{signature}: it is called with the keyword arguments "
            f"{', '.join((*GIVEN, *reward_args))}: {error}. Take those it does not need as **_."
        ) from error


def _load_file(place: str) -> ModuleType:
    path = Path(place).resolve()
    module_name = f"rlcore_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None, "a name that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look their module up by name.
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module
