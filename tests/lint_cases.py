"""Words on the command line, and what the linter says of them."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from rlcore.cli.compose import compose_values
from rlcore.cli.lint_command import parse_leniently
from rlcore.lint import lint
from rlcore.lint_finding import Finding

VLLM = "rollout.engine=vllm"
ARGS, ENGINE = "rollout.vllm.sampling_args", "rollout.vllm.engine_args"
TIS = "importance.correction=tis importance.cap=2"


def findings(words: Sequence[str], config_name: str = "demo") -> list[Finding]:
    """All that `rlcore lint` finds."""
    config, found = parse_leniently(values_of(tuple(words), config_name))
    return found if config is None else [*found, *lint(config)]


@functools.cache
def values_of(words: tuple[str, ...], config_name: str = "demo") -> dict[str, Any]:
    """As `compose_values`, which takes 70 ms a call: composed once, each word read by hydra's parser."""
    if not words:
        return compose_values(config_name)
    values = copy.deepcopy(values_of((), config_name))
    for override in OverridesParser.create().parse_overrides(list(words)):
        section = values
        *path, key = override.key_or_group.split(".")
        for name in path:
            section = section.setdefault(name, {})
        section[key] = override.value()
    return values


def found_by(rule: str, words: Sequence[str]) -> list[Finding]:
    """The findings of one rule."""
    return [finding for finding in findings(words) if finding.rule == rule]


def after_fix(words: Sequence[str], fix: str) -> list[str]:
    """The words, and what the fix says to set or remove in its first alternative."""
    first = re.split(r", or |; ", fix)[0]
    given = [word.rstrip(".,") for word in first.split()]
    settings = [word for word in given if "=" in word]
    removed = {word for word in given if "." in word and "=" not in word} if "Remove" in first else set()
    replaced = {word.partition("=")[0] for word in settings} | removed
    kept = [word for word in words if word.partition("=")[0] not in replaced]
    assert settings or len(kept) < len(words), f"nothing to do in: {fix}"
    return [*kept, *settings]
