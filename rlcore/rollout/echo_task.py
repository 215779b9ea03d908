"""A task that a tiny policy learns from scratch in minutes: repeat the letter that the prompt shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlcore.batch import Prompt
from rlcore.config_parse import ConfigError
from rlcore.config_rollout import TaskConfig

PAD, EOS, ASK = "_", ".", "="
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, kw_only=True)
class EchoArgs:
    """`task.args` of the echo task."""

    letters: int = 12
    """Size of the alphabet, 2 to 26. The vocabulary is that plus padding, end and question mark."""
    length: int = 4
    """How often the letter must be repeated."""
    max_shown: int = 2
    """The prompt shows the letter 1 to this many times, so prompts differ in length."""


class EchoTask:
    """Prompt `cc=`; the answer `cccc` earns 1, whether the end token or the length limit ends it.

    Reward: matching letters among the first `length`, over the longer of `length` and the response. Every
    letter that is right earns its share, so a random policy already sees better and worse samples.
    """

    def __init__(self, config: TaskConfig, seed: int) -> None:
        self.args = _parse_args(config)
        self.vocabulary = PAD + EOS + ASK + _LETTERS[: self.args.letters]
        self.vocab_size = len(self.vocabulary)
        self.eos_id = self.vocabulary.index(EOS)
        rng = np.random.default_rng([seed, config.size])
        letter_n = rng.integers(0, self.args.letters, config.size)
        shown_n = rng.integers(1, self.args.max_shown + 1, config.size)
        self._texts = [_LETTERS[c] * int(n) + ASK for c, n in zip(letter_n, shown_n, strict=True)]
        self._seed = seed

    def prompts(self, step: int, num_prompts: int) -> list[Prompt]:
        """Drawn with replacement; a pure function of the seed and the arguments."""
        rng = np.random.default_rng([self._seed, step, 1])
        prompts = []
        for index, row in enumerate(rng.integers(0, len(self._texts), num_prompts)):
            text = self._texts[row]
            prompts.append(Prompt(ids=self.encode(text), group_id=step * num_prompts + index, answer=text[0]))
        return prompts

    def reward(self, prompt: Prompt, response_ids: Sequence[int]) -> float:
        """In [0, 1]."""
        text = self.decode(response_ids)
        matches = sum(letter == prompt.answer for letter in text[: self.args.length])
        return matches / max(self.args.length, len(text))

    def encode(self, text: str) -> list[int]:
        """Ids of a text over this vocabulary."""
        return [self.vocabulary.index(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        """One character an id."""
        return "".join(self.vocabulary[i] for i in ids)


def _parse_args(config: TaskConfig) -> EchoArgs:
    known = EchoArgs.__dataclass_fields__
    for key in config.args:
        if key not in known:
            raise ConfigError(
                f"task.args.{key}: the echo task has no such argument. Known: {', '.join(known)}."
            )
    args = EchoArgs(**config.args)
    for key, low, high in (("letters", 2, len(_LETTERS)), ("length", 1, 1000), ("max_shown", 1, 1000)):
        value = getattr(args, key)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"task.args.{key}={value!r}: expected an integer from {low} to {high}.")
    return args
