"""Where a sampler's numbers come from, by the config: does the trainer score the same distribution?"""

from __future__ import annotations

from rlcore.config import RunConfig
from rlcore.config_rules_rollout import ENGINE_ARGS, PENALTIES, SAMPLING_ARGS, TRUNCATION

BANS = ("allowed_token_ids", "min_tokens")
"""Of vLLM's `SamplingParams`: ids that the request takes out of the support, as kept ids show."""
FORCED = ("thinking_token_budget", "trace_decode_token_ids", "watermarking")
"""... tokens that are not drawn from the model's distribution."""
GENERATION_CONFIG = ("generation_config", "override_generation_config")
"""... of vLLM's engine: where it takes what a request leaves out."""


def sampling_keys(config: RunConfig, *names: str) -> tuple[str, ...]:
    """The full keys of those `rollout.vllm.sampling_args` that are set and say something."""
    args = config.rollout.vllm.sampling_args
    return tuple(f"{SAMPLING_ARGS}.{name}" for name in names if _says_something(args.get(name)))


def engine_keys(config: RunConfig, *names: str) -> tuple[str, ...]:
    """The full keys of those `rollout.vllm.engine_args` that are set and say something."""
    args = config.rollout.vllm.engine_args
    return tuple(f"{ENGINE_ARGS}.{name}" for name in names if _says_something(args.get(name)))


def _says_something(value: object) -> bool:
    """vLLM's off values of what is asked for here: None, False, 0, and whatever is empty."""
    return bool(value)


def draws_with_vllm(config: RunConfig) -> bool:
    """Is vLLM the rollout engine?"""
    return config.rollout.engine == "vllm"


def is_raw(config: RunConfig) -> bool:
    """Are the sampler's logprobs another distribution's than the one that it draws from?"""
    spec = config.sampling.spec()
    is_plain = not spec.truncates and not spec.penalises and spec.effective_temperature == 1.0
    return draws_with_vllm(config) and config.rollout.vllm.logprobs_mode == "raw_logprobs" and not is_plain


def unseen_keys(config: RunConfig) -> tuple[str, ...]:
    """Keys by which the sampler draws from a distribution that the trainer does not score under."""
    if not draws_with_vllm(config):
        return ()
    bans = () if config.sampling.support == "replay" else sampling_keys(config, *BANS)
    return (
        *sampling_keys(config, *TRUNCATION, "temperature", *PENALTIES),
        *sampling_keys(config, "logit_bias", "bad_words", "structured_outputs"),
        *bans,
        *sampling_keys(config, *FORCED, "logits_processors", "extra_args"),
        *engine_keys(config, "logits_processors", "watermark_config"),
        *generation_keys(config),
    )


def generation_keys(config: RunConfig) -> tuple[str, ...]:
    """Engine arguments that let vLLM fill in sampling parameters."""
    is_off = config.rollout.vllm.engine_args.get("generation_config") == "vllm"
    return engine_keys(config, *(GENERATION_CONFIG[1:] if is_off else GENERATION_CONFIG))


def mixed_keys(config: RunConfig) -> tuple[str, ...]:
    """Keys that make the sampler's logprobs another distribution's than the trainer's old ones."""
    raw = ("rollout.vllm.logprobs_mode",) if is_raw(config) else ()
    return (*raw, *unseen_keys(config))


def removal(keys: tuple[str, ...]) -> str:
    """`Remove a and b`."""
    return f"Remove {' and '.join(keys)}"
