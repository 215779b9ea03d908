"""What a run config may say and still train on biased or wrong numbers: one function per rule, named after
it. What can never run is refused at load (`config_rules`).

Each returns its finding, or None. They take for granted that `config_rules.FIRST_RULES` hold.
"""

from __future__ import annotations

from collections.abc import Callable

from rlcore.config import RunConfig
from rlcore.lint_finding import Finding, Level, kebab_case
from rlcore.lint_sources import (
    BANS,
    FORCED,
    draws_with_vllm,
    engine_keys,
    generation_keys,
    mixed_keys,
    removal,
    sampling_keys,
)
from rlcore.sampling import MIN_TEMPERATURE

_RAW = "rollout.vllm.logprobs_mode"
_PROCESSED = "Set rollout.vllm.logprobs_mode=processed_logprobs"
_CORRECTION = "importance.correction=tis importance.cap=2"


def raw_logprobs(config: RunConfig) -> Finding | None:
    """The sampler's logprobs are those of the distribution that it draws from."""
    if not draws_with_vllm(config) or config.rollout.vllm.logprobs_mode != "raw_logprobs":
        return None
    return _finding(
        "error",
        raw_logprobs,
        (_RAW,),
        "the sampler's logprobs would be the model's own, before temperature and truncation, and the trainer "
        "scores the distribution that was drawn from: each mismatch, weight and ratio carries the mass cut "
        "(a token of a nucleus that holds 0.88 of the mass: 0.88 a token, 0.47 over 6 tokens). Where nothing "
        "is cut they are the same numbers, but a run asks its engine at the start and refuses raw ones.",
        f"{_PROCESSED}.",
    )


def mixed_sources(config: RunConfig) -> Finding | None:
    """An importance weight divides two numbers of one distribution."""
    keys, correction = mixed_keys(config), config.importance.correction
    if not keys or (correction == "none" and config.loss.old_logprobs != "sampler"):
        return None
    is_weight = correction != "none"
    reader = "importance.correction" if is_weight else "loss.old_logprobs"
    value, name = (correction, "importance weight") if is_weight else ("sampler", "ratio")
    return _finding(
        "error",
        mixed_sources,
        (reader, *keys),
        f"{reader}={value} compares the trainer's logprobs with the sampler's, which are another "
        f"distribution's: with identical weights each token's {name} would be off by the mass cut, S or 1/S, "
        "and a sequence's by S^T (0.9 over 100 tokens: 2.7e-5).",
        _one_distribution(keys),
    )


def unfiltered_threshold(config: RunConfig) -> Finding | None:
    """A threshold on |sampler - old| judges engines, not a truncation that one side does not apply."""
    keys, bound = mixed_keys(config), config.importance.sequence_error_max
    if not keys or bound is None:
        return None
    return _finding(
        "error",
        unfiltered_threshold,
        ("importance.sequence_error_max", *keys),
        f"importance.sequence_error_max={bound} bounds the mean of exp|sampler - old|, and one of the two is "
        "not filtered: with identical weights that mean is already 1/S (1.11 at S=0.9), so good sequences "
        "would leave the step.",
        _one_distribution(keys),
    )


def logit_bias(config: RunConfig) -> Finding | None:
    """A bias on logits is part of the distribution."""
    keys = _drawn_with(config, "logit_bias")
    return _finding(
        "error",
        logit_bias,
        keys,
        "the trainer scores the model's logits without the bias: a bias of 1 on an id is a ratio of up to e "
        "for it, whatever the support.",
        f"{removal(keys)}.",
    )


def bad_words(config: RunConfig) -> Finding | None:
    """Words that the request bans are mass that the trainer still counts."""
    keys = _drawn_with(config, "bad_words")
    return _finding(
        "error",
        bad_words,
        keys,
        "the trainer still counts what the sampler could not draw: each ratio carries the banned mass. An "
        "engine of the run's own has no tokenizer to read words with, and bans nothing.",
        f"{removal(keys)}.",
    )


def guided_decoding(config: RunConfig) -> Finding | None:
    """A grammar bans ids at each position."""
    keys = _drawn_with(config, "structured_outputs")
    return _finding(
        "error",
        guided_decoding,
        keys,
        "the trainer still counts the ids that the grammar bans at each position: each ratio carries their "
        "mass. An engine of the run's own has no tokenizer, without which vLLM refuses grammars.",
        f"{removal(keys)}.",
    )


def allowed_ids(config: RunConfig) -> Finding | None:
    """Ids that the request bans are mass that the trainer still counts."""
    return _banned(config, allowed_ids, "allowed_token_ids")


def min_tokens(config: RunConfig) -> Finding | None:
    """A least length bans the ids that end a response."""
    return _banned(config, min_tokens, "min_tokens")


def custom_logits_processors(config: RunConfig) -> Finding | None:
    """Code of the engine's that changes logits is not run by the trainer."""
    if not draws_with_vllm(config):
        return None
    keys = (
        *engine_keys(config, "logits_processors"),
        *sampling_keys(config, "logits_processors", "extra_args"),
    )
    return _finding(
        "error",
        custom_logits_processors,
        keys,
        "the trainer does not run the engine's logits processors (extra_args are their arguments), so it "
        "scores other logits; vLLM returns no kept ids with them either.",
        f"{removal(keys)}.",
    )


def forced_tokens(config: RunConfig) -> Finding | None:
    """A token that was not drawn has no logprob to train on."""
    if not draws_with_vllm(config):
        return None
    keys = (*sampling_keys(config, *FORCED), *engine_keys(config, "watermark_config"))
    return _finding(
        "error",
        forced_tokens,
        keys,
        "some tokens would be forced or drawn by another rule than the model's distribution, and the trainer "
        "would score them as drawn.",
        f"{removal(keys)}.",
    )


def stop_strings(config: RunConfig) -> Finding | None:
    """A response ends with an id that was drawn, which the policy can learn to draw."""
    keys = _drawn_with(config, "stop", "include_stop_str_in_output")
    return _finding(
        "error",
        stop_strings,
        keys,
        "runs exchange ids and leave detokenize off, with which vLLM refuses stop strings; a response that "
        "ends at a string has no end-of-text id either, so the policy is not trained to end.",
        f"{removal(keys)}.",
    )


def other_model(config: RunConfig) -> Finding | None:
    """The engine runs the trainer's architecture."""
    keys = engine_keys(config, "hf_overrides", "hf_config_path") if draws_with_vllm(config) else ()
    return _finding(
        "error",
        other_model,
        keys,
        "the engine would make another model of the same weights (positions, scaling, heads) than the "
        "trainer: its logprobs are that model's, and no correction makes up for it.",
        f"{removal(keys)}; change the model folder, which both read.",
    )


def engine_numbers(config: RunConfig) -> Finding | None:
    """An engine that computes with other numbers than the trainer is corrected for."""
    if not draws_with_vllm(config) or config.importance.correction != "none":
        return None
    keys = engine_keys(config, "quantization", "quantization_config")
    cache = config.rollout.vllm.engine_args.get("kv_cache_dtype")
    if cache not in (None, "auto", config.model.dtype):
        keys = (*keys, *engine_keys(config, "kv_cache_dtype"))
    return _finding(
        "warning",
        engine_numbers,
        keys,
        "the engine computes other logits than the trainer does from the same weights, so responses are off "
        "policy from the first update on, and nothing corrects for it.",
        f"Set {_CORRECTION}, or remove {' and '.join(keys)}.",
    )


def speculative_decoding(config: RunConfig) -> Finding | None:
    """A draft model neither changes the distribution nor learns."""
    keys = engine_keys(config, "speculative_config") if draws_with_vllm(config) else ()
    if not keys:
        return None
    draft = config.rollout.vllm.engine_args["speculative_config"]
    if isinstance(draft, dict) and draft.get("rejection_sample_method") == "synthetic":
        return _finding(
            "error",
            speculative_decoding,
            keys,
            "rejection_sample_method=synthetic accepts draft tokens at a set rate: they are not drawn from "
            "the policy, and would be trained on as if they were.",
            f"{removal(keys)}.",
        )
    if config.sampling.min_p > 0:
        return _finding(
            "error",
            speculative_decoding,
            (*keys, "sampling.min_p"),
            f"vLLM refuses every request with sampling.min_p={config.sampling.min_p} under speculative "
            "decoding.",
            f"{removal(keys)}, or set sampling.min_p=0.",
        )
    return _finding(
        "warning",
        speculative_decoding,
        keys,
        "the distribution is the same, but a draft model keeps its weights while the policy moves: ever "
        "fewer of its tokens are accepted, and the engine gets slower than without it.",
        f"{removal(keys)}.",
    )


def generation_config(config: RunConfig) -> Finding | None:
    """Sampling parameters come from this config, not from a file beside the weights."""
    keys = generation_keys(config) if draws_with_vllm(config) else ()
    return _finding(
        "error",
        generation_config,
        keys,
        "vLLM takes sampling parameters that a request leaves out (a repetition penalty, a top-k, a longest "
        "response) and ids that end it from there, and the trainer does not see them.",
        f"{removal(keys)}.",
    )


def tiny_temperature(config: RunConfig) -> Finding | None:
    """The temperature is the one that the sampler divides by."""
    temperature = config.sampling.temperature
    if temperature >= MIN_TEMPERATURE:
        return None
    return _finding(
        "warning",
        tiny_temperature,
        ("sampling.temperature",),
        f"sampling.temperature={temperature} acts as {MIN_TEMPERATURE} in both engines: vLLM raises it, so "
        "the trainer does.",
        f"Set sampling.temperature={MIN_TEMPERATURE} or more.",
    )


def engine_ties(config: RunConfig) -> Finding | None:
    """Ids tied at the cut are treated as the engine treats them."""
    sampling = config.sampling
    if not draws_with_vllm(config) or sampling.ties != "all" or not sampling.spec().truncates:
        return None
    return _finding(
        "warning",
        engine_ties,
        ("sampling.ties",),
        "sampling.ties=all keeps every id that is tied at the cut, and vLLM on a GPU keeps exactly k of them "
        "(a nucleus its least count on any device): the trainer's logprob is lower by up to the log of the "
        "tied group's size wherever bfloat16 logits tie.",
        "Set sampling.ties=share.",
    )


def replay_without_mask(config: RunConfig) -> Finding | None:
    """Replaying needs an engine that returns the ids which it kept."""
    support = config.sampling.support
    if support == "recompute" or draws_with_vllm(config):
        return None
    return _finding(
        "error",
        replay_without_mask,
        ("sampling.support", "rollout.engine"),
        f"sampling.support={support} reads the ids that the sampler kept, and rollout.engine="
        f"{config.rollout.engine} returns none: it draws with the trainer's own search.",
        "Set sampling.support=recompute, or rollout.engine=vllm.",
    )


def _finding(
    level: Level,
    rule: Callable[[RunConfig], Finding | None],
    keys: tuple[str, ...],
    reason: str,
    fix: str,
) -> Finding | None:
    """The finding of a rule about those keys; None where there is none."""
    if not keys:
        return None
    return Finding(level=level, rule=kebab_case(rule.__name__), keys=keys, reason=reason, fix=fix)


def _drawn_with(config: RunConfig, *names: str) -> tuple[str, ...]:
    """Keys of those sampling arguments that a run with vLLM draws with."""
    return sampling_keys(config, *names) if draws_with_vllm(config) else ()


def _banned(config: RunConfig, rule: Callable[[RunConfig], Finding | None], name: str) -> Finding | None:
    """What is said of an argument that takes ids out of the support."""
    assert name in BANS
    keys = _drawn_with(config, name)
    if config.sampling.support == "replay":
        return _finding(
            "warning",
            rule,
            keys,
            "the kept ids carry the ban to the trainer's logprob; its unfiltered one, which the reference KL "
            "reads, still counts the banned ids.",
            f"{removal(keys)}.",
        )
    return _finding(
        "error",
        rule,
        keys,
        "the trainer still counts the ids that the sampler could not draw: each ratio carries the banned "
        "mass, wherever the policy wanted one of them.",
        f"{removal(keys)}, or set sampling.support=replay.",
    )


def _one_distribution(keys: tuple[str, ...]) -> str:
    """The fix for sources that differ by those keys."""
    others = tuple(key for key in keys if key != _RAW)
    steps = [_PROCESSED] if len(others) < len(keys) else []
    return f"{'. '.join([*steps, removal(others)] if others else steps)}."


LINT_RULES: tuple[Callable[[RunConfig], Finding | None], ...] = (
    raw_logprobs,
    mixed_sources,
    unfiltered_threshold,
    logit_bias,
    bad_words,
    guided_decoding,
    allowed_ids,
    min_tokens,
    custom_logits_processors,
    forced_tokens,
    stop_strings,
    other_model,
    engine_numbers,
    speculative_decoding,
    generation_config,
    tiny_temperature,
    engine_ties,
    replay_without_mask,
)
