"""The rules of the rollout and task sections: one function per rule, named after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rlcore.config_parse import MAX_TIMEOUT_S, ConfigError, check_each

if TYPE_CHECKING:
    from rlcore.config import RunConfig

SAMPLING_ARGS = "rollout.vllm.sampling_args"
ENGINE_ARGS = "rollout.vllm.engine_args"

TRUNCATION = ("top_k", "top_p", "min_p")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")

OWNED_SAMPLING_ARGS = {
    # vLLM's name -> our key, or None: what the engine needs to return logprobs of token ids
    "n": "rollout.samples_per_prompt",
    "max_tokens": "rollout.max_new_tokens",
    "seed": "seed",
    "logprobs": None,
    "logprob_token_ids": None,
    "flat_logprobs": None,
    "detokenize": None,
    # Responses end with the task's end-of-text id, and no other.
    "stop_token_ids": None,
    "ignore_eos": None,
    "output_kind": None,
    "repetition_detection": None,
}

OWNED_ENGINE_ARGS = {
    "model": "model.hf_path",
    "dtype": "model.dtype",
    "seed": "seed",
    "max_model_len": "rollout.vllm.max_model_len",
    "logprobs_mode": "rollout.vllm.logprobs_mode",
    "return_sampling_mask": "sampling.support",
    "weight_transfer_config": "rollout.vllm.transfer",
    "max_logprobs": None,
    "worker_extension_cls": None,
    "worker_cls": None,
    # Replicas of an engine answer for their weights with one voice: `rollout.vllm.urls` names several.
    "data_parallel_size": None,
}


def check_rollout_ranges(config: RunConfig) -> None:
    """What vLLM is waited for, and asked again; counts and the task's are in `check_ranges`."""
    vllm = config.rollout.vllm
    timeouts = {
        "rollout.vllm.start_timeout_s": vllm.start_timeout_s,
        "rollout.vllm.timeout_s": vllm.timeout_s,
    }
    check_each(timeouts, lambda value: 0 < value <= MAX_TIMEOUT_S, "seconds above 0, at most 1e9")
    retries = {"rollout.vllm.retries": vllm.retries}
    check_each(retries, lambda value: value >= 0, "a count of at least 0")


def check_vllm_unused(config: RunConfig) -> None:
    """Keys of an engine that does not run do nothing."""
    vllm = config.rollout.vllm
    if config.rollout.engine == "vllm":
        return
    for name, default in dataclasses.asdict(type(vllm)()).items():
        if getattr(vllm, name) != default:
            raise ConfigError(
                f"rollout.vllm.{name}={getattr(vllm, name)} does nothing under "
                f"rollout.engine={config.rollout.engine}. Set rollout.engine=vllm, or remove it."
            )


def check_server_urls(config: RunConfig) -> None:
    """Each server has an address of its own."""
    urls = config.rollout.vllm.urls
    for url in urls:
        if not is_http_url(url):
            raise ConfigError(
                f"rollout.vllm.urls={list(urls)}: {url!r} is no address of a server. Set addresses such as "
                "http://node7:8000."
            )
    if len({url.rstrip("/") for url in urls}) < len(urls):
        raise ConfigError(
            f"rollout.vllm.urls={list(urls)} names a server twice: it would draw for two, and be sent its "
            "weights twice. Remove one of them."
        )


def is_http_url(url: str) -> bool:
    """`http(s)://host[:port][/path]`?"""
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and parts.port != 0  # a port that is no number raises
    except ValueError:
        return False
    is_plain = not (parts.query or parts.fragment or any(letter.isspace() for letter in url))
    return parts.scheme in ("http", "https") and named and is_plain


def check_engine_args_of_servers(config: RunConfig) -> None:
    """A server has the arguments that it was started with."""
    vllm = config.rollout.vllm
    if vllm.urls and vllm.engine_args:
        raise ConfigError(
            f"{ENGINE_ARGS}={dict(vllm.engine_args)} does nothing with rollout.vllm.urls: the servers run "
            "already. Remove it, and start the servers with those arguments."
        )


def check_transfer(config: RunConfig) -> None:
    """The way that weights take exists between the two engines."""
    vllm = config.rollout.vllm
    key = f"rollout.vllm.transfer={vllm.transfer}"
    if vllm.transfer == "ipc" and vllm.urls:
        raise ConfigError(
            f"{key} shares GPU memory with an engine of this run's own, and rollout.vllm.urls names servers. "
            "Set rollout.vllm.transfer=nccl, or rollout.vllm.transfer=folder."
        )
    if vllm.transfer in ("nccl", "ipc") and config.parallel.backend == "cpu":
        raise ConfigError(
            f"{key} goes from GPU to GPU, and parallel.backend=cpu keeps the weights in host memory. Set "
            "rollout.vllm.transfer=folder."
        )
    if vllm.transfer == "nccl" and len(vllm.urls) != 1:
        raise ConfigError(
            f"{key} goes to one server, and rollout.vllm.urls names {len(vllm.urls)}: vLLM would give the "
            "workers of all the same place. Set rollout.vllm.transfer=folder, or auto."
        )
    if vllm.transfer in ("nccl", "ipc") and vllm.transfer_folder != type(vllm).transfer_folder:
        raise ConfigError(
            f"rollout.vllm.transfer_folder={vllm.transfer_folder} does nothing under {key}. Set "
            "rollout.vllm.transfer=folder, or remove it."
        )


def check_max_model_len(config: RunConfig) -> None:
    """The engine's sequences hold the longest response and a prompt token."""
    limit, longest = config.rollout.vllm.max_model_len, config.rollout.max_new_tokens
    if limit is not None and limit <= longest:
        raise ConfigError(
            f"rollout.vllm.max_model_len={limit} leaves no room for a prompt beside "
            f"rollout.max_new_tokens={longest}. Raise the one or lower the other."
        )


def check_owned_engine_args(config: RunConfig) -> None:
    """What the config says, or the run needs, is not said again to the engine."""
    _refuse_owned(ENGINE_ARGS, config.rollout.vllm.engine_args, OWNED_ENGINE_ARGS)


def check_owned_sampling_args(config: RunConfig) -> None:
    """What the config says, or the run needs, is not said again to a request."""
    _refuse_owned(SAMPLING_ARGS, config.rollout.vllm.sampling_args, OWNED_SAMPLING_ARGS)


def _refuse_owned(section: str, args: Mapping[str, Any], owned: Mapping[str, str | None]) -> None:
    for name in args:
        if name in owned:
            home = owned[name]
            fix = "the run sets it itself" if home is None else f"that is {home} here"
            instead = "" if home is None else f", and set {home}"
            raise ConfigError(f"{section}.{name}={args[name]}: {fix}. Remove {section}.{name}{instead}.")


def check_unseen_truncation(config: RunConfig) -> None:
    """The sampler draws from the truncated distribution that the trainer scores under, and no other."""
    _refuse_unseen(
        config,
        TRUNCATION,
        "the trainer would score under another support, and every ratio carry the mass cut",
    )


def check_unseen_temperature(config: RunConfig) -> None:
    """One temperature for both engines."""
    _refuse_unseen(config, ("temperature",), "the trainer would divide its logits by another temperature")


def check_unseen_penalty(config: RunConfig) -> None:
    """Penalties change logits: both engines apply them, or neither."""
    _refuse_unseen(config, PENALTIES, "the trainer would score logits without that penalty")


def _refuse_unseen(config: RunConfig, names: Collection[str], consequence: str) -> None:
    args = config.rollout.vllm.sampling_args
    for name in args:
        if name in names:
            raise ConfigError(
                f"{SAMPLING_ARGS}.{name}={args[name]} reaches the sampler only: {consequence}. Remove "
                f"{SAMPLING_ARGS}.{name}, and set sampling.{name}={args[name]}, which both read."
            )


def check_one_step_off(config: RunConfig) -> None:
    """Responses of the weights before the last update need an engine of their own, and a correction."""
    rollout = config.rollout
    if not rollout.one_step_off:
        return
    if rollout.engine != "vllm":
        raise ConfigError(
            f"rollout.one_step_off=true draws while the policy trains, and rollout.engine={rollout.engine} "
            "draws from the policy itself. Set rollout.engine=vllm, or rollout.one_step_off=false."
        )
    if config.importance.correction == "none" and config.loss.old_logprobs != "sampler":
        raise ConfigError(
            "rollout.one_step_off=true trains on responses that are one update old, as if they were the old "
            "policy's own. Set importance.correction=tis importance.cap=2, or rollout.one_step_off=false."
        )


def check_stale_denominator(config: RunConfig) -> None:
    """The denominator of the ratio is the policy before this update, not the one before the last."""
    if config.rollout.one_step_off and config.loss.old_logprobs == "sampler":
        raise ConfigError(
            "loss.old_logprobs=sampler with rollout.one_step_off=true: the sampler's logprobs are those of "
            "the weights before the last update, so the clip would bound two updates in one. Set "
            "loss.old_logprobs=recompute importance.correction=tis importance.cap=2, or "
            "rollout.one_step_off=false."
        )


def check_replay_top_k(config: RunConfig) -> None:
    """vLLM returns the ids that it kept only where top-k bounds their number."""
    sampling = config.sampling
    if config.rollout.engine != "vllm" or not sampling.reads_kept_ids:
        return
    if sampling.spec().effective_top_k is None:
        raise ConfigError(
            f"sampling.support={sampling.support} needs the ids that vLLM kept, which it returns only with a "
            f"top-k: sampling.top_k={sampling.top_k} is off. Set sampling.top_k=1024 or another bound that "
            "rarely cuts, or sampling.support=recompute."
        )


ROLLOUT_RULES: tuple[Callable[[RunConfig], None], ...] = (
    check_rollout_ranges,
    check_vllm_unused,
    check_server_urls,
    check_engine_args_of_servers,
    check_transfer,
    check_max_model_len,
    check_owned_engine_args,
    check_owned_sampling_args,
    check_unseen_truncation,
    check_unseen_temperature,
    check_unseen_penalty,
    check_one_step_off,
    check_stale_denominator,
    check_replay_top_k,
)
