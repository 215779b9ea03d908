"""Prompts of your own from a JSONL file, graded by a Python function of your own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlcore.batch import Prompt
from rlcore.config_parse import ConfigError
from rlcore.config_rollout import TaskConfig
from rlcore.rollout.jsonl_prompts import JsonlPrompt, PromptEncoder, read_prompts
from rlcore.rollout.reward_function import load_reward


@dataclass(frozen=True, kw_only=True)
class JsonlArgs:
    """`task.args` of the task `jsonl`; `math` has those without a reward."""

    path: str
    """JSONL file, from the folder in which the run is started."""
    reward: str | None = None
    """`package.module:function` or `path/to/file.py:function`."""
    system_prompt: str | None = None
    """Put before every prompt, through the chat template."""
    reward_args: Mapping[str, Any] = field(default_factory=dict)
    """More keyword arguments of the reward function."""


class JsonlTask:
    """The first `task.size` lines of a file, in an order of its own for each pass over them.

    `grades_only`: for a reward process, which needs no prompts. Raises `ConfigError` naming file and line, or
    the argument.
    """

    known_args = tuple(JsonlArgs.__dataclass_fields__)
    needed_args = ("path", "reward")

    def __init__(self, config: TaskConfig, tokenizer_path: str, seed: int, grades_only: bool = False) -> None:
        self.args = self._parse_args(config)
        self._reward = self._load_reward()
        encoder = PromptEncoder(config.name, tokenizer_path, self.args.system_prompt)
        self._tokenizer = encoder.tokenizer
        self.eos_id: int = self._tokenizer.eos_token_id
        self.vocab_size = len(self._tokenizer)
        self._prompts = [] if grades_only else read_prompts(self.args.path, config.size, encoder)
        self._seed = seed

    def prompts(self, step: int, num_prompts: int) -> list[Prompt]:
        """Every line once, then every line once more in another order; a pure function of the seed and the
        arguments.
        """
        drawn = []
        orders: dict[int, np.ndarray] = {}
        for index in range(step * num_prompts, (step + 1) * num_prompts):
            epoch, place = divmod(index, len(self._prompts))
            if epoch not in orders:
                rng = np.random.default_rng([self._seed, epoch, 2])
                orders[epoch] = rng.permutation(len(self._prompts))
            line, ids = self._prompts[orders[epoch][place]]
            drawn.append(Prompt(ids=ids, group_id=index, answer=line))
        return drawn

    def reward(self, prompt: Prompt, response_ids: Sequence[int]) -> float:
        """What the reward function returns."""
        line = prompt.answer
        assert isinstance(line, JsonlPrompt)
        return self._reward(
            response=self.decode(response_ids),
            answer=line.record.get("answer"),
            prompt=line.text,
            record=dict(line.record),
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def _load_reward(self) -> Callable[..., float]:
        assert self.args.reward is not None
        return load_reward(self.args.reward, self.args.reward_args)

    def _parse_args(self, config: TaskConfig) -> JsonlArgs:
        for key in config.args:
            if key not in self.known_args:
                raise ConfigError(
                    f"task.args.{key}: task.name={config.name} has no such argument. Known: "
                    f"{', '.join(self.known_args)}."
                )
        for key in self.needed_args:
            if config.args.get(key) is None:
                raise ConfigError(f"task.args.{key} is not set: task.name={config.name} needs it.")
        for key in ("path", "reward", "system_prompt"):
            if not isinstance(config.args.get(key), str | None):
                raise ConfigError(f"task.args.{key}={config.args[key]!r}: expected text.")
        if not isinstance(config.args.get("reward_args", {}), Mapping):
            raise ConfigError(f"task.args.reward_args={config.args['reward_args']!r}: expected a mapping.")
        return JsonlArgs(**config.args)
