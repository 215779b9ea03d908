"""From a run config to what vLLM is told: sampling parameters of every request, arguments of the engine."""

from __future__ import annotations

from typing import Any, Literal

from rlcore.config import RunConfig
from rlcore.rollout.completions import Expected
from rlcore.rollout.vllm_engine import EngineSettings

TIE_MARGIN = 16
"""Candidates beyond top_k: vLLM's PyTorch path keeps ids tied at the k-th value; bfloat16 has many ties."""


def expected_of(config: RunConfig, vocab_size: int, num_positions: int, eos_id: int) -> Expected:
    """What the run's responses look like. `ValueError` for more positions than the model has."""
    asked = config.rollout.vllm.max_model_len
    if asked is not None and not 1 < asked <= num_positions:
        raise ValueError(
            f"rollout.vllm.max_model_len={asked}, and the model has {num_positions} positions: expected 2 to "
            f"{num_positions}."
        )
    return Expected(
        vocab_size=vocab_size,
        eos_id=eos_id,
        max_new_tokens=config.rollout.max_new_tokens,
        max_length=num_positions if asked is None else asked,
        kept=config.sampling.reads_kept_ids,
    )


def engine_settings(config: RunConfig, expected: Expected, has_accelerator: bool) -> EngineSettings:
    """What each request says. Kept ids come as vLLM's own mask from an engine of this run's own on a GPU,
    else from the candidates with the largest logprobs. `ValueError` for kept ids without a top-k to bound
    them.
    """
    vllm, spec = config.rollout.vllm, config.sampling.spec()
    own_mask = expected.kept and has_accelerator and not vllm.urls
    if expected.kept and spec.effective_top_k is None:
        raise ValueError(
            f"sampling.support={config.sampling.support} needs sampling.top_k with rollout.engine=vllm: vLLM "
            "lists the kept ids of a top-k only. Set sampling.top_k, or sampling.support=recompute."
        )
    candidates = 0
    if expected.kept and not own_mask:
        candidates = min((spec.effective_top_k or 0) + TIE_MARGIN, expected.vocab_size)
    return EngineSettings(
        sampling={
            **spec.to_vllm(),
            # The task's end of text, and no other that a model folder may name.
            "stop_token_ids": [expected.eos_id],
            "ignore_eos": True,
            "detokenize": False,
            **vllm.sampling_args,
        },
        num_candidates=candidates,
        lists_all=candidates == expected.vocab_size,
        sampling_mask=own_mask,
        start_timeout_s=vllm.start_timeout_s,
        timeout_s=vllm.timeout_s,
    )


def transfer_of(config: RunConfig, has_accelerator: bool) -> Literal["folder", "nccl", "ipc"]:
    """`rollout.vllm.transfer`, chosen where it is `auto`. `ValueError`: it needs a GPU that is not there."""
    vllm = config.rollout.vllm
    on_gpus = has_accelerator and config.parallel.backend != "cpu"
    if vllm.transfer == "auto":
        # One process group with one server: vLLM numbers each server's workers from 1.
        return "folder" if not on_gpus or len(vllm.urls) > 1 else "nccl" if vllm.urls else "ipc"
    if vllm.transfer != "folder" and not on_gpus:
        raise ValueError(
            f"rollout.vllm.transfer={vllm.transfer} needs a GPU, and there is none. Set it to folder or auto."
        )
    return vllm.transfer


def engine_arguments(
    config: RunConfig, expected: Expected, settings: EngineSettings, has_accelerator: bool
) -> dict[str, Any]:
    """Arguments of vLLM's engine by name; `rollout.vllm.engine_args` come last."""
    vllm = config.rollout.vllm
    arguments: dict[str, Any] = {
        "dtype": config.model.dtype,
        "max_model_len": expected.max_length,
        "logprobs_mode": vllm.logprobs_mode,
        "max_logprobs": max(settings.num_candidates, 1),
        "seed": config.seed % 2**31,
        # Ids in, ids out.
        "skip_tokenizer_init": True,
        # Not the sampling defaults of a model folder: the config is the one description of the distribution.
        "generation_config": "vllm",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if not has_accelerator:
        arguments["enforce_eager"] = True
    transfer = transfer_of(config, has_accelerator)
    if transfer != "folder":
        arguments["weight_transfer_config"] = {"backend": transfer}
    if settings.sampling_mask:
        arguments["return_sampling_mask"] = True
    return arguments | dict(vllm.engine_args)
