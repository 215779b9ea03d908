"""`rlcore lint`: what in a run config will bias or break training, and by how much; also at a run's start."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from rlcore.config import RunConfig
from rlcore.config_parse import ConfigError, parse_dataclass
from rlcore.lint import as_finding, as_plain, lint
from rlcore.lint_bias import PredictedBias, predicted_bias, read_rollouts
from rlcore.lint_finding import Finding

CLEAN, ERRORS = 0, 1
_WIDTH = 110
_UNKNOWN, _VALUE = "unknown-key", "wrong-type"


def add_lint_parser(commands: Any) -> None:
    """Registers the command."""
    command = commands.add_parser(
        "lint",
        help="say what in a run config will bias or break training",
        usage="rlcore lint [options] [key=value ...]",
        epilog="Exit codes: 0 no error (warnings allowed), 1 at least one error, 2 the words make no sense.",
    )
    command.add_argument("--config-name", default="demo", help="the run's config, without .yaml (demo)")
    command.add_argument("--config-dir", help="folder of your own configs (those that come with the package)")
    command.add_argument(
        "--rollouts", metavar="FILE", help="a sample of responses, JSON lines: also predict the bias"
    )
    command.add_argument("--json", action="store_true", help="print JSON instead of text")


def run_lint(args: argparse.Namespace) -> int:
    """Prints what is found; returns the exit code. `ValueError` for words or a file that cannot be read."""
    from rlcore.cli.compose import compose_values

    values = compose_values(args.config_name, args.overrides, args.config_dir)
    bias = None if args.rollouts is None else predicted_bias(read_rollouts(args.rollouts))
    config, found = parse_leniently(values)
    if config is not None:
        found = [*found, *lint(config)]
    if args.json:
        plain = None if bias is None else dataclasses.asdict(bias)
        print(json.dumps({"findings": [as_plain(finding) for finding in found], "bias": plain}, indent=1))
    else:
        print(text_of(found))
        if bias is not None:
            print(bias_text(bias, None if config is None else config.sampling.top_p))
    return ERRORS if has_error(found) else CLEAN


def parse_leniently(values: dict[str, Any]) -> tuple[RunConfig | None, list[Finding]]:
    """The config as far as it can be read, unchecked, and a finding for each key that does not exist or has a
    value of the wrong type. None after a wrong type: what the rest then says would be of another config.
    """
    found: list[Finding] = []
    is_whole = True
    while True:
        try:
            config = parse_dataclass(RunConfig, values)
            return (config if is_whole else None), found
        except ConfigError as error:
            is_unknown = ": no such key." in str(error)
            is_whole &= is_unknown
            found.append(as_finding(error, _UNKNOWN if is_unknown else _VALUE))
            # A key that does not exist is left out; so is a wrong value, to find those after it.
            values = without_key(values, re.split(r"[^\w.]", str(error))[0].split("."))


def without_key(values: dict[Any, Any], path: Sequence[str]) -> dict[Any, Any]:
    """A copy of nested dicts without the key at `path`."""
    copy = dict(values)
    # A key may be a number in YAML.
    key = next(key for key in copy if str(key) == path[0])
    if len(path) > 1:
        copy[key] = without_key(copy[key], path[1:])
    else:
        del copy[key]
    return copy


def lint_before_start(config: RunConfig, speaks: bool) -> None:
    """The same checks at the start of a run: `ConfigError` where one is an error. Whoever `speaks` prints
    each finding to stderr: one process of the run.
    """
    found = lint(config)
    if found and speaks:
        print(text_of(found), file=sys.stderr)
    if has_error(found):
        rules = ", ".join(finding.rule for finding in found if finding.level == "error")
        raise ConfigError(
            f"this run would train on wrong numbers ({rules}). `rlcore lint` with the same words says why "
            "and what to set."
        )


def has_error(found: Sequence[Finding]) -> bool:
    """Is any of them an error?"""
    return any(finding.level == "error" for finding in found)


def text_of(found: Sequence[Finding]) -> str:
    """The findings as text: level, rule and keys in one line each, reason and fix under it."""
    lines = []
    for finding in found:
        lines += [f"{finding.level}: {finding.rule}: {', '.join(finding.keys)}"]
        lines += _wrapped(finding.reason, "    ")
        lines += _wrapped(f"fix: {finding.fix}", "    ")
    num_errors = sum(finding.level == "error" for finding in found)
    lines.append(f"{num_errors} error(s), {len(found) - num_errors} warning(s).")
    return "\n".join(lines)


def bias_text(bias: PredictedBias, top_p: float | None) -> str:
    """What a trainer that ignores the truncation would be off by, and the bound that top-p alone gives."""
    p = 0.9 if top_p is None or top_p >= 1 else top_p
    return "\n".join(
        [
            f"predicted bias of a trainer that ignores the truncation, from {bias.num_sequences} responses "
            f"and {bias.num_tokens} tokens (longest: {bias.longest}):",
            f"    per token     mean |log S| = {bias.abs_log_mass_mean:.4f}, "
            f"factor exp(mean log S) = {bias.token_factor:.4f}",
            f"    per sequence  S^T: mean {bias.sequence_factor_mean:.3g}, 5th percentile "
            f"{bias.sequence_factor_p5:.3g}, least {bias.sequence_factor_min:.3g}",
            f"    reference     top_p={p:g} with the mass exactly at the cut: log S = {math.log(p):.3f} a "
            f"token, S^T = {p**bias.longest:.3g} over {bias.longest} tokens",
        ]
    )


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
