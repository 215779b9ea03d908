"""What a trainer that ignores the truncation would be off by, predicted from a sample of rollouts.

With identical weights its logprob of a sampled token is the sampler's plus log S, where S is the mass of the
truncated support: a factor of S in every token's ratio, and of the product of them in a sequence's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROUNDING = 1e-3
"""A log S above 0 by more than this is no rounding of two float32 logprobs."""
_FORMS = (("log_mass",), ("sampler_logprobs", "unfiltered_logprobs"))


@dataclass(frozen=True, kw_only=True)
class PredictedBias:
    """Factors on the ratio of a trainer that does not truncate. 1 is no bias."""

    num_sequences: int
    num_tokens: int
    abs_log_mass_mean: float
    """Mean over tokens of |log S|."""
    token_factor: float
    """exp of the mean over tokens of log S: the geometric mean of S."""
    sequence_factor_mean: float
    """Mean over sequences of exp(sum of log S), which is S^T at one S."""
    sequence_factor_p5: float
    """5th percentile of the same, linear between neighbours."""
    sequence_factor_min: float
    """Smallest of the same."""
    longest: int
    """Tokens of the longest sequence."""


def predicted_bias(log_mass: Sequence[Sequence[float]]) -> PredictedBias:
    """The bias over a sample: one list of log S per response. `ValueError` for no response, an empty one, and
    a log S that is not finite or above 0.
    """
    if not log_mass:
        raise ValueError("no response: expected at least one list of log S.")
    for row, response in enumerate(log_mass):
        check_response(response, f"response {row}")
    token_t = np.concatenate([np.asarray(response, dtype=np.float64) for response in log_mass])
    factor_s = np.exp([math.fsum(response) for response in log_mass])
    return PredictedBias(
        num_sequences=len(log_mass),
        num_tokens=len(token_t),
        abs_log_mass_mean=float(np.abs(token_t).mean()),
        token_factor=float(np.exp(token_t.mean())),
        sequence_factor_mean=float(factor_s.mean()),
        sequence_factor_p5=float(np.percentile(factor_s, 5)),
        sequence_factor_min=float(factor_s.min()),
        longest=max(len(response) for response in log_mass),
    )


def check_response(log_mass: Sequence[float], place: str) -> None:
    """`ValueError`, naming place and token, for a list that cannot be log S of a response's tokens."""
    if not log_mass:
        raise ValueError(f"{place} has no token: leave it out.")
    for token, value in enumerate(log_mass):
        if not math.isfinite(value) or value > ROUNDING:
            raise ValueError(
                f"{place}, token {token}: log S is {value}, expected a finite number <= 0, the log of a "
                "mass. Are the two logprobs swapped, at two temperatures, or of another run?"
            )


def read_rollouts(path: str | Path) -> list[list[float]]:
    """log S of each response of a sample: JSON lines of `log_mass`, or of `sampler_logprobs` (processed) and
    `unfiltered_logprobs` (before truncation, after temperature and penalties), a number per response token.

    `ValueError` naming the line for anything else.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--rollouts {path}: cannot be read ({error}).") from error
    responses = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            place = f"--rollouts {path}, line {number}"
            response = log_mass_of(line, place)
            check_response(response, place)
            responses.append(response)
    if not responses:
        raise ValueError(f"--rollouts {path}: no response in it, expected one a line.")
    return responses


def log_mass_of(line: str, place: str) -> list[float]:
    """log S of each token of one line."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: not JSON ({error}).") from error
    form = next((form for form in _FORMS if isinstance(record, dict) and set(form) <= set(record)), None)
    if form is None:
        raise ValueError(
            f"{place}: expected an object with log_mass, or with sampler_logprobs and unfiltered_logprobs."
        )
    columns = [_numbers(record, name, place) for name in form]
    if len({len(column) for column in columns}) > 1:
        lengths = " and ".join(str(len(column)) for column in columns)
        raise ValueError(f"{place}: {' and '.join(form)} have {lengths} tokens, expected equally many.")
    if len(columns) == 1:
        return columns[0]
    return [unfiltered - sampler for sampler, unfiltered in zip(*columns, strict=True)]


def _numbers(record: Mapping[str, Any], name: str, place: str) -> list[float]:
    values = record[name]
    is_list = isinstance(values, list)
    if not is_list or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        raise ValueError(f"{place}: {name} is no list of numbers, one per response token.")
    return [float(value) for value in values]
