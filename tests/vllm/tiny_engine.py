"""A tiny Llama under vLLM, and the same folder under the Megatron worker."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlcore.config import RunConfig, load_run_config
from rlcore.rollout.completions import Expected
from rlcore.rollout.vllm_engine import LocalEngine
from rlcore.rollout.vllm_settings import engine_arguments, engine_settings, expected_of

VOCAB_SIZE, NUM_POSITIONS, EOS = 203, 128, 1


@dataclass(frozen=True, kw_only=True)
class Running:
    """An engine and what it was started on."""

    engine: LocalEngine
    folder: str
    expected: Expected


def write_folder(folder: str, tied: bool, seed: int = 0) -> None:
    """A Llama with grouped queries, heads as wide as vLLM's CPU attention needs, an odd vocabulary, and
    weights large enough that its distributions are far from flat.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=NUM_POSITIONS,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def run_config(folder: str, **sections) -> RunConfig:
    """A run of that folder against vLLM."""
    rollout = {"engine": "vllm", "max_new_tokens": 12} | sections.pop("rollout", {})
    parallel = {"backend": "cpu"} | sections.pop("parallel", {})
    values = {"model": {"hf_path": folder}, "rollout": rollout, "parallel": parallel}
    return load_run_config(values | sections)


def start(folder: str, **sections) -> Running:
    """Starts vLLM on the folder (about half a minute)."""
    config = run_config(folder, **sections)
    expected = expected_of(config, VOCAB_SIZE, NUM_POSITIONS, EOS)
    settings = engine_settings(config, expected, has_accelerator=False)
    # Candidates of one test are more than those of another; the engine has one bound for all. Blocks that are
    # shorter than the prompts of a test let it see what a cached prefix does.
    arguments = engine_arguments(config, expected, settings, has_accelerator=False)
    arguments |= {"max_logprobs": VOCAB_SIZE, "block_size": 32}
    return Running(engine=LocalEngine(folder, arguments, settings), folder=folder, expected=expected)
