"""One thing that the linter says about a run config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What is wrong, where, and what to set."""

    level: Level
    """`error`: the run would train on wrong numbers, or cannot run. `warning`: biased or wasteful, but
    defined.
    """
    rule: str
    """Name of the rule, in kebab case: that of its function."""
    keys: tuple[str, ...]
    """The config keys that it is about, as typed on the command line."""
    reason: str
    """What goes wrong."""
    fix: str
    """What to set or remove; `key=value` words where that is mechanical."""


def kebab_case(name: str) -> str:
    """`check_dual_clip` -> `dual-clip`: the rule that a function is."""
    return name.removeprefix("check_").replace("_", "-")
