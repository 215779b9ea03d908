"""Mathematical questions from a JSONL file, graded by math-verify: 1 for an equal answer, 0 for any other."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from rlcore.config_parse import ConfigError
from rlcore.config_rollout import TaskConfig
from rlcore.rollout.jsonl_prompts import not_installed
from rlcore.rollout.jsonl_task import JsonlTask


class MathTask(JsonlTask):
    """As `JsonlTask`; each line's `answer` is the right one, as text (LaTeX or plain) or a number.

    Raises `ConfigError` naming the line whose answer math-verify cannot read: its samples could earn nothing.
    """

    known_args = ("path", "system_prompt")
    needed_args = ("path",)

    def __init__(self, config: TaskConfig, tokenizer_path: str, seed: int, grades_only: bool = False) -> None:
        _import_extras(config.name)
        super().__init__(config, tokenizer_path, seed, grades_only)
        for line, _ in self._prompts:
            if not parse_answer(answer_text(line.record.get("answer"))):
                raise ConfigError(
                    f"task.args.path={self.args.path}, line {line.line}: math-verify cannot read "
                    f"answer={line.record.get('answer')!r}. Write it as LaTeX or as a number, or grade with "
                    "task.name=jsonl and a reward function."
                )

    def _load_reward(self) -> Callable[..., float]:
        return grade_math


def grade_math(*, response: str, answer: object, **_: object) -> float:
    """1.0 where the response's answer (the last box or formula that math-verify finds) equals the right one.

    Its time-outs are off: they use signals, which only a main thread has. The reward process's own holds.
    """
    import math_verify

    found = math_verify.parse(response, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    right = list(parse_answer(answer_text(answer)))
    return float(math_verify.verify(right, found, timeout_seconds=None))


def answer_text(answer: object) -> str:
    """The right answer as math-verify reads it; "" for what is neither text nor a number."""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        # Without an exponent: 1e-05 would be read as a difference.
        return format(Decimal(repr(answer)), "f")
    return ""


@functools.lru_cache(maxsize=4096)
def parse_answer(text: str) -> tuple[Any, ...]:
    """What math-verify reads in a right answer; empty where that is no expression.

    Read whole, as if it stood in a box; also as plain text where the box gives nothing but its text back, as
    for a percentage.
    """
    import math_verify

    delimited = any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))
    found: list[Any] = []
    for form in (text,) if delimited else (f"\\boxed{{{text}}}", text):
        found += math_verify.parse(form, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        if any(not isinstance(one, str) for one in found):
            return tuple(found)
    return ()


def _import_extras(name: str) -> None:
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise not_installed(name, error) from error
    # It warns that its time-outs are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
