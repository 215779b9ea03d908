"""Procedural reasoning problems with verifiers, put to a chat model through its own template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlcore.batch import Prompt
from rlcore.config_parse import ConfigError
from rlcore.config_rollout import TaskConfig


class ReasoningGymTask:
    """Problems of one reasoning-gym dataset; the dataset's own scorer grades the response.

    `task.args` is passed to the dataset (`min_digits`, ...), except `system_prompt`: text put before the
    question. A response is graded on what stands between `<answer>` and `</answer>`, or as a whole where it
    has no such tags.
    """

    def __init__(self, config: TaskConfig, tokenizer_path: str, seed: int, dataset: str) -> None:
        reasoning_gym, transformers = _import_extras(config.name)
        args = dict(config.args)
        system_prompt = args.pop("system_prompt", None)
        try:
            self._dataset = reasoning_gym.create_dataset(dataset, size=config.size, seed=seed, **args)
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(f"task.name={config.name} with task.args={args}: {error}") from error
        self._extract_answer = reasoning_gym.utils.extract_answer
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_path)
        if self._tokenizer.chat_template is None or self._tokenizer.eos_token_id is None:
            raise ConfigError(
                f"model.hf_path={tokenizer_path}: task.name={config.name} needs a tokenizer with a chat "
                "template and an end-of-text token. Use an instruct model."
            )
        self.eos_id: int = self._tokenizer.eos_token_id
        self.vocab_size = len(self._tokenizer)
        self._system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        self._seed = seed

    def prompts(self, step: int, num_prompts: int) -> list[Prompt]:
        """Drawn with replacement; a pure function of the seed and the arguments."""
        rng = np.random.default_rng([self._seed, step, 1])
        rows = rng.integers(0, len(self._dataset), num_prompts)
        return [self._prompt(int(row), step * num_prompts + index) for index, row in enumerate(rows)]

    def _prompt(self, row: int, group_id: int) -> Prompt:
        entry = self._dataset[row]
        messages = [*self._system, {"role": "user", "content": entry["question"]}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # The template already wrote the special tokens.
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return Prompt(ids=ids, group_id=group_id, answer=entry)

    def reward(self, prompt: Prompt, response_ids: Sequence[int]) -> float:
        """The scorer's verdict, usually in [0, 1]."""
        text = self.decode(response_ids)
        answer = self._extract_answer(text)
        entry: Any = prompt.answer
        return float(self._dataset.score_answer(text.strip() if answer is None else answer, entry))

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def _import_extras(name: str) -> tuple[Any, Any]:
    try:
        import reasoning_gym
        import reasoning_gym.utils
        import transformers
    except ImportError as error:
        raise ValueError(
            f"task.name={name} needs {error.name}, which is not installed. "
            "Install it with: pip install 'rlcore-megatron[megatron]'."
        ) from error
    return reasoning_gym, transformers
