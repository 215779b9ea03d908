"""Prompts from a JSONL file: one object a line, checked line by line, tokenised once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlcore.config_parse import ConfigError


@dataclass(frozen=True, kw_only=True)
class JsonlPrompt:
    """One line, and what the model sees of it. Also `Prompt.answer`: all that grading a response needs."""

    line: int
    """Number of the line, from 1."""
    text: str
    """What was tokenised: after the chat template, where one was used."""
    record: Mapping[str, Any]
    """The whole line."""


class PromptEncoder:
    """Token ids of a line under a model's own tokenizer.

    `messages`, and `prompt` beside a system prompt, go through the chat template; `prompt` alone is plain
    text for the model to continue.
    """

    def __init__(self, name: str, tokenizer_path: str, system_prompt: str | None) -> None:
        self.tokenizer = load_tokenizer(name, tokenizer_path)
        if self.tokenizer.eos_token_id is None:
            raise ConfigError(
                f"model.hf_path={tokenizer_path}: task.name={name} needs a tokenizer with an end-of-text "
                "token."
            )
        self._path, self._system_prompt = tokenizer_path, system_prompt

    def encode(self, record: Mapping[str, Any]) -> tuple[str, list[int]]:
        """Text and ids of a checked line. Raises `ConfigError`, or what the chat template raises."""
        messages = record.get("messages")
        if messages is None and self._system_prompt is None:
            return record["prompt"], self.tokenizer.encode(record["prompt"])
        if messages is None:
            messages = [{"role": "user", "content": record["prompt"]}]
        if self._system_prompt is not None:
            messages = [{"role": "system", "content": self._system_prompt}, *messages]
        if self.tokenizer.chat_template is None:
            raise ConfigError(
                f"the tokenizer of model.hf_path={self._path} has no chat template for messages or a system "
                "prompt. Write `prompt` without task.args.system_prompt, or use an instruct model"
            )
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # The template already wrote the special tokens.
        return text, self.tokenizer.encode(text, add_special_tokens=False)


def read_prompts(path: str, size: int, encoder: PromptEncoder) -> list[tuple[JsonlPrompt, list[int]]]:
    """The first `size` lines with their token ids, or `ConfigError` naming file and line."""
    read = []
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if number > size:
                    break
                try:
                    record = parse_line(line)
                    text, ids = encoder.encode(record)
                except Exception as error:
                    said = (
                        str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
                    )
                    raise ConfigError(f"task.args.path={path}, line {number}: {said}.") from error
                if not ids:
                    raise ConfigError(
                        f"task.args.path={path}, line {number}: the prompt has no token; there is nothing to "
                        "continue."
                    )
                read.append((JsonlPrompt(line=number, text=text, record=record), ids))
    except OSError as error:
        raise ConfigError(f"task.args.path={path} cannot be read: {error.strerror}.") from error
    if not read:
        raise ConfigError(f"task.args.path={path} is empty: expected one JSON object a line.")
    return read


def parse_line(line: bytes) -> dict[str, Any]:
    """The object of a line, which has exactly one of `prompt` and `messages`. Raises `ConfigError`."""
    try:
        record = json.loads(line.decode("utf-8"))
    except ValueError as error:
        raise ConfigError(f"expected a JSON object, got {_shown(line)} ({error})") from error
    if not isinstance(record, dict):
        raise ConfigError(f"expected a JSON object, got {_shown(line)}")
    prompt, messages = record.get("prompt"), record.get("messages")
    if (prompt is None) == (messages is None):
        raise ConfigError("expected either `prompt` (text) or `messages` (a list of role and content)")
    if prompt is not None and not isinstance(prompt, str):
        raise ConfigError(
            f"`prompt` is a {type(prompt).__name__}, expected text. For a chat write `messages`"
        )
    if messages is not None:
        _check_messages(messages)
    return record


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise ConfigError("`messages` is not a list of at least one message")
    for index, message in enumerate(messages):
        fields = ("role", "content")
        if not isinstance(message, dict) or not all(isinstance(message.get(name), str) for name in fields):
            raise ConfigError(f"`messages[{index}]` is not an object with the texts `role` and `content`")


# Characters of a bad line that a message shows.
_MOST_SHOWN = 60


def _shown(line: bytes) -> str:
    text = line.decode("utf-8", errors="replace").strip()
    return repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...")


def load_tokenizer(name: str, tokenizer_path: str) -> Any:
    """The tokenizer of a Hugging Face folder. `name`: the task's, for the message where the package is
    missing.
    """
    try:
        import transformers
    except ImportError as error:
        raise not_installed(name, error) from error
    return transformers.AutoTokenizer.from_pretrained(tokenizer_path)


def not_installed(name: str, error: ImportError) -> ConfigError:
    """What to say where the task `name` needs a package that is missing."""
    return ConfigError(
        f"task.name={name} needs {error.name}, which is not installed. "
        "Install it with: pip install 'rlcore-megatron[megatron]'."
    )
