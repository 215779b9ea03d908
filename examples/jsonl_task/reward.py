"""A reward for `task.name=jsonl`: does the right number stand in the response?"""

from __future__ import annotations

import re


def has_number(*, response: str, answer: str, record: dict, partial: float = 0.0, **_: object) -> float:
    """1 for the answer alone, `partial` for the answer among other text, 0 otherwise; times the line's
    weight, where it has one.
    """
    numbers = re.findall(r"-?\d+", response)
    if answer not in numbers:
        return 0.0
    return record.get("weight", 1.0) * (1.0 if response.strip() == answer else partial)
