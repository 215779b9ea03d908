"""From a nested mapping to frozen dataclasses: unknown keys and wrong types are errors that name the key."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

T = TypeVar("T")


MAX_TIMEOUT_S = 1e9
"""Seconds; transports count nanoseconds in 64 bits."""


class ConfigError(ValueError):
    """A run config that cannot be run as it stands."""


def check_each(
    values: Mapping[str, float | None], is_allowed: Callable[[float], bool], expected: str
) -> None:
    """`ConfigError` for the first key whose value is set and not allowed."""
    for key, value in values.items():
        if value is not None and not is_allowed(value):
            raise ConfigError(f"{key}={value}: expected {expected}.")


def parse_dataclass(cls: type[T], values: Any) -> T:
    """An instance of `cls`. Raises `ConfigError` for keys it does not have and values of another type."""
    return _build(cls, values, path="", root=cls)


def all_key_paths(cls: type, path: str = "") -> list[str]:
    """Every key of a config class as a dotted path."""
    paths = []
    for name, hint in typing.get_type_hints(cls).items():
        here = f"{path}.{name}".lstrip(".")
        is_section = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        paths += all_key_paths(hint, here) if is_section else [here]
    return paths


def _build(cls: type, values: Any, path: str, root: type) -> Any:
    """The section at `path` of the config class `root`."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path or 'config'}={values!r}: expected a section with keys.")
    hints = typing.get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls)]
    built = {}
    for key, value in values.items():
        here = f"{path}.{key}".lstrip(".")
        if key not in known:
            raise ConfigError(_unknown_key_message(here, str(key), known, root))
        hint: Any = hints[key]
        is_section = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        built[key] = _build(hint, value, here, root) if is_section else _coerce(hint, value, here)
    return cls(**built)


def _unknown_key_message(path: str, key: str, known: list[str], root: type) -> str:
    message = f"{path}: no such key."
    close = difflib.get_close_matches(key, known, n=1)
    if close:
        message += f" Did you mean {'.'.join([*path.split('.')[:-1], close[0]])}?"
    homes = [home for home in all_key_paths(root) if home.split(".")[-1] == key]
    if homes:
        message += f" That key lives at {' or '.join(homes)}."
    return message + f" Known here: {', '.join(sorted(known))}."


def _coerce(hint: Any, value: Any, path: str) -> Any:
    """`value` as the annotated type; ints pass for floats and whole floats for ints, nothing else does."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value in choices:
            return value
        raise ConfigError(f"{path}={value!r}: expected one of {', '.join(map(repr, choices))}.")
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in choices:
            return None
        return _coerce(next(choice for choice in choices if choice is not type(None)), value, path)
    if origin is Sequence:
        if isinstance(value, Sequence) and not isinstance(value, str):
            return tuple(_coerce(choices[0], item, f"{path}[{index}]") for index, item in enumerate(value))
        raise ConfigError(f"{path}={value!r}: expected a list.")
    if origin is not None and issubclass(origin, Mapping):
        if isinstance(value, Mapping):
            return dict(value)
        raise ConfigError(f"{path}={value!r}: expected a mapping.")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool):
        return value
    raise ConfigError(f"{path}={value!r}: expected {hint.__name__}.")
