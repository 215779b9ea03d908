"""The linter: every rule that refuses a config, and every rule of what it would train on."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from rlcore.config import RunConfig
from rlcore.config_parse import ConfigError, all_key_paths
from rlcore.config_rules import FIRST_RULES, RULES, check_world
from rlcore.lint_finding import Finding, kebab_case
from rlcore.lint_rules import LINT_RULES


def lint(config: RunConfig) -> list[Finding]:
    """What is wrong with the config, errors first.

    Pure: it reads neither the disk nor a device. A config from `load_run_config` has passed every refusal
    already; one from `parse_dataclass` may break any rule, and all that it breaks are told.
    """
    with warnings.catch_warnings():
        # A tiny temperature is a finding here.
        warnings.simplefilter("ignore", UserWarning)
        # What is out of range breaks the arithmetic of the other rules.
        found = refusals(config, FIRST_RULES)
        if not found:
            found = refusals(config, (*RULES, *_world_rules(config)))
            found += [finding for rule in LINT_RULES if (finding := rule(config)) is not None]
    return sorted(found, key=lambda finding: finding.level != "error")


def refusals(config: RunConfig, rules: Iterable[Callable[[RunConfig], None]]) -> list[Finding]:
    """One error for each of the rules that refuses the config."""
    found = []
    for rule in rules:
        try:
            rule(config)
        except ConfigError as error:
            found.append(as_finding(error, kebab_case(rule.__name__)))
    return found


_SENTENCE = re.compile(r"(?<=[.?]) (?=[A-Z])")
_ADVICE = ("Set", "Remove", "Raise", "Lower", "Change", "Did", "Choose")
_KEY = re.compile(r"[a-z_]+(?:\.\w+)*")


def as_finding(error: ConfigError, rule: str) -> Finding:
    """A refusal as a finding: the advice that its message ends with is the fix, its keys are those that the
    rest names.
    """
    sentences = _SENTENCE.split(str(error))
    advice = [i for i, sentence in enumerate(sentences) if sentence.split()[0] in _ADVICE]
    cut = advice[0] if advice and advice[0] > 0 else len(sentences)
    reason = " ".join(sentences[:cut])
    keys = keys_in(reason)
    return Finding(
        level="error",
        rule=rule,
        keys=keys,
        reason=reason,
        fix=" ".join(sentences[cut:]) or f"Change {' or '.join(keys[:2])}.",
    )


def keys_in(message: str) -> tuple[str, ...]:
    """The config keys that a message names, in order. The first word counts even where it is no key."""
    known = set(all_key_paths(RunConfig))
    found = [word for word in _KEY.findall(message) if word in known or _is_inside(word, known)]
    first = re.match(_KEY, message)
    if first is not None and not any(key.startswith(first[0]) for key in found[:1]):
        found.insert(0, first[0])
    return tuple(dict.fromkeys(found))


def _is_inside(word: str, known: set[str]) -> bool:
    """Is the word a key of one of the config's mappings?"""
    mappings = ("task.args.", "rollout.vllm.sampling_args.", "rollout.vllm.engine_args.")
    return word.startswith(mappings) and word.rpartition(".")[0] in known


def _world_rules(config: RunConfig) -> tuple[Callable[[RunConfig], None], ...]:
    """The rules of the number of processes, where the config says it: one that leaves `nproc` at 1 and cuts
    its model is for a launcher of its own.
    """
    parallel = config.parallel
    replica = parallel.tp * parallel.pp * parallel.cp
    return (check_processes,) if config.nproc > 1 or replica == 1 else ()


def check_processes(config: RunConfig) -> None:
    """`check_world` with the config's own number of processes."""
    check_world(config, config.nproc)


def as_plain(finding: Finding) -> dict[str, Any]:
    """The finding for JSON."""
    return {**vars(finding), "keys": list(finding.keys)}
