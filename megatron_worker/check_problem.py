"""The problem of `rlcore check`: a run's architecture, loss and sampling made tiny, and a batch with every
kind of token.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from megatron_worker.architecture import Architecture, architecture_from_config, architecture_from_hf
from megatron_worker.hf_bridge import INIT_STD
from megatron_worker.model_setup import check_layout
from rlcore.batch import ScoredTokens, TrainBatch
from rlcore.config import ModelConfig, ParallelConfig, RunConfig
from rlcore.config_rollout import SamplingConfig
from rlcore.config_rules import check_microbatch_groups, check_run_config
from rlcore.config_rules_experts import check_expert_ranks
from rlcore.layout.balancing import balance
from rlcore.layout.packing import length_multiples
from rlcore.sampling_mask import SamplingMask

HEAD_DIM = 8
FFN_PER_RANK = 24
LENGTH = 12
"""Tokens of the longest sequence."""
MIN_SEQUENCES = 16
POSITIONS = 32
DROPPED_SHARE = 0.1
"""Of the old pass's tokens: those that it dropped although the policy keeps them."""
KEPT_SHARE = 0.6
"""Of the tiny vocabulary: what its top-k keeps."""
KEPT_MASS = 0.8
"""Most that a nucleus without a top-k holds."""
NOISE = 0.6
"""Standard deviation of old against current logprob: enough for ratios on both sides of every clip."""


@dataclass(frozen=True, kw_only=True)
class CheckLayout:
    """The layout to check."""

    tp: int = 1
    """Tensor parallel size."""
    pp: int = 1
    """Pipeline parallel size."""
    vpp: int = 1
    """Virtual stages a pipeline rank."""
    cp: int = 1
    """Context parallel size."""
    dp: int = 1
    """Data parallel size."""
    ep: int = 1
    """Expert parallel size, over ranks of data x context parallel."""
    adds_experts: bool = False
    """The run's model is dense and its tiny one has experts, so that EP has something to cut."""
    sequence_parallel: bool = False
    """See `ParallelConfig`."""
    num_microbatches: int = 2
    """Microbatches of each data-parallel rank; packed: at most."""
    packed: bool = False
    """Packed rows; always so where cp > 1."""
    token_budget: int | None = None
    """Packed rows of so many tokens. None: what gives `num_microbatches`."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "cp", "dp", "ep", "num_microbatches", "token_budget"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: expected a count of at least 1.")

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def packs(self) -> bool:
        """Are sequences laid end to end?"""
        return self.packed or self.cp > 1 or self.token_budget is not None

    @property
    def num_sequences(self) -> int:
        """S over all data-parallel ranks."""
        rows = self.dp * self.num_microbatches
        return rows * max(2, -(-MIN_SEQUENCES // rows))

    @property
    def sp_size(self) -> int:
        """What sequence parallelism cuts tokens by; 1 without."""
        return self.tp if self.sequence_parallel else 1


def tiny_config(run: RunConfig, layout: CheckLayout) -> RunConfig:
    """The run's config with a tiny model of its architecture in float32, cut as `layout` says.

    Loss, sampling (its top-k is a share of the tiny vocabulary) and importance correction stay the run's.
    Gradients are read after the step, so nothing clips them and no optimizer shards them. `ValueError` for a
    layout that the run's own architecture does not allow.
    """
    arch = run_architecture(run)
    if layout.adds_experts:
        arch = dataclasses.replace(arch, num_moe_experts=2 * layout.ep, moe_router_topk=2, qkv_bias=False)
    parallel = dataclasses.replace(
        run.parallel,
        tp=layout.tp,
        pp=layout.pp,
        vpp=layout.vpp,
        cp=layout.cp,
        ep=layout.ep,
        sequence_parallel=layout.sequence_parallel,
        distributed_optimizer=False,
    )
    check_layout(arch, parallel)
    check_expert_ranks(layout.ep, layout.dp, layout.cp)
    model = tiny_model(arch, layout, run.model)
    config = dataclasses.replace(
        run,
        nproc=layout.world_size,
        model=model,
        parallel=parallel,
        sampling=_within_vocabulary(run.sampling, model),
        loss=dataclasses.replace(run.loss, entropy_metric=True),
        rollout=dataclasses.replace(
            run.rollout,
            prompts_per_step=layout.dp,
            samples_per_prompt=layout.num_sequences // layout.dp,
            # With a prompt token.
            max_new_tokens=LENGTH - 1,
        ),
        optimizer=dataclasses.replace(run.optimizer, clip_grad=0.0, warmup_steps=0),
        train=dataclasses.replace(
            run.train,
            steps=3,
            epochs=1,
            minibatch_size=None,
            microbatch_size=layout.num_sequences // (layout.dp * layout.num_microbatches),
            token_budget=token_budget(layout),
            # The check has a line of its own for it.
            check_loss_scale=False,
        ),
    )
    check_run_config(config)
    check_microbatch_groups(config, layout.num_microbatches)
    return config


def run_architecture(run: RunConfig) -> Architecture:
    """The architecture of a run's config or folder. A vocabulary that the config leaves open counts as one
    id.
    """
    if run.model.hf_path:
        return architecture_from_hf(run.model.hf_path)
    return architecture_from_config(run.model, run.model.vocab_size or 1)


def tiny_experts(arch: Architecture, ep: int) -> dict[str, Any]:
    """Experts of the tiny model: at least two on each EP rank, and more than a token takes."""
    if arch.num_moe_experts is None:
        return {}
    topk = arch.moe_router_topk
    return {"num_moe_experts": ep * max(2, -(-(topk + 1) // ep)), "moe_router_topk": topk}


def tiny_model(arch: Architecture, layout: CheckLayout, run: ModelConfig) -> ModelConfig:
    """The smallest model with the parts of `arch` that `layout` cuts. Its vocabulary does not divide by TP,
    so there are padding rows.
    """
    groups = 1 if arch.num_query_groups == 1 else max(2, layout.tp)
    heads = groups * (arch.num_attention_heads // arch.num_query_groups)
    return ModelConfig(
        vocab_size=max(21, 10 * layout.tp + 1),
        num_layers=max(2, layout.pp * layout.vpp),
        hidden_size=heads * HEAD_DIM,
        num_attention_heads=heads,
        num_query_groups=groups,
        ffn_hidden_size=FFN_PER_RANK * layout.tp,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=arch.tie_word_embeddings,
        qkv_bias=arch.qkv_bias,
        rope_theta=arch.rope_theta,
        rms_norm_eps=arch.rms_norm_eps,
        fused_head=run.fused_head,
        # Several chunks a microbatch.
        fused_head_tokens=min(run.fused_head_tokens, 7),
        **tiny_experts(arch, layout.ep),
    )


def single_process(config: RunConfig) -> RunConfig:
    """The same problem on one process: one padded microbatch, nothing cut."""
    rollout = config.rollout
    return dataclasses.replace(
        config,
        nproc=1,
        parallel=ParallelConfig(backend=config.parallel.backend, timeout_s=config.parallel.timeout_s),
        train=dataclasses.replace(
            config.train,
            token_budget=None,
            microbatch_size=rollout.prompts_per_step * rollout.samples_per_prompt,
        ),
    )


def token_budget(layout: CheckLayout) -> int | None:
    """Tokens of a packed microbatch: the least that needs no more than the microbatches asked for on any
    data-parallel rank. None without packing. `ValueError` for a given budget that a sequence does not fit.
    """
    if not layout.packs:
        return None

    def num_rows(budget: int) -> int:
        """Of the data-parallel rank that needs most."""
        shares = _lengths(layout).view(layout.dp, -1)
        sizes = {"cp_size": layout.cp, "tp_size": layout.sp_size}
        return max(len(balance(own, budget, **sizes)) for own in shares)

    if layout.token_budget is not None:
        num_rows(layout.token_budget)
        return layout.token_budget
    multiple = length_multiples(layout.cp, layout.sp_size)[1]
    budget = -(-LENGTH // multiple) * multiple
    while num_rows(budget) > layout.num_microbatches:
        budget += multiple
    return budget


def plain_batch(config: RunConfig, layout: CheckLayout) -> TrainBatch:
    """The whole batch without old logprobs: uneven lengths, advantages of both signs, and the last two
    samples masked.
    """
    assert config.model.vocab_size is not None
    generator = torch.Generator().manual_seed(config.seed + 1)
    length_s = _lengths(layout)
    num_sequences = layout.num_sequences
    prompt_s = 1 + (torch.arange(num_sequences) * 3) % (length_s - 1).clamp(max=5)
    position_l = torch.arange(LENGTH)
    token_mask_sl = (position_l >= prompt_s[:, None]) & (position_l < length_s[:, None])
    advantage_s = torch.randn(num_sequences, 1, generator=generator).abs() + 0.1
    advantage_s[1::2] *= -1
    return TrainBatch(
        ids_sl=torch.randint(0, config.model.vocab_size, (num_sequences, LENGTH), generator=generator),
        length_s=length_s,
        token_mask_sl=token_mask_sl,
        sample_mask_s=torch.arange(num_sequences) < num_sequences - 2,
        advantage_sl=torch.where(token_mask_sl, advantage_s, 0.0),
        sampler_logprob_sl=torch.zeros(num_sequences, LENGTH),
        sampling_mask=drawn_kept_ids(config, token_mask_sl) if config.sampling.reads_kept_ids else None,
    )


def drawn_kept_ids(config: RunConfig, token_mask_sl: torch.Tensor) -> SamplingMask:
    """Random kept ids for every response token, from one id to about half of the vocabulary."""
    assert config.model.vocab_size is not None
    vocab_size, generator = config.model.vocab_size, torch.Generator().manual_seed(config.seed + 3)
    return SamplingMask.from_lists(
        [
            torch.randperm(vocab_size, generator=generator)[: 1 + row % (vocab_size // 2)].tolist()
            if is_response
            else []
            for row, is_response in enumerate(token_mask_sl.flatten().tolist())
        ]
    )


def scored_batch(batch: TrainBatch, scores: ScoredTokens, seed: int) -> TrainBatch:
    """The batch with old, sampler and reference logprobs near the policy's. Tokens are dropped by the old
    pass alone (old = -inf), by the current pass alone, and by both.
    """
    generator = torch.Generator().manual_seed(seed + 2)
    shape = batch.ids_sl.shape
    noise_sl, sampler_noise_sl, reference_noise_sl = (
        torch.randn(shape, generator=generator) * size for size in (NOISE, NOISE / 4, NOISE)
    )
    dropped_sl = torch.rand(shape, generator=generator) < DROPPED_SHARE
    finite_sl = torch.where(scores.keep_sl, scores.logprob_sl, -3.0)
    odd_sl = (torch.arange(shape[1]) % 2 == 1).expand(shape)
    keep_old_sl = ~dropped_sl & (scores.keep_sl | odd_sl)
    old_sl = torch.where(scores.keep_sl, finite_sl + noise_sl, finite_sl)
    return dataclasses.replace(
        batch,
        old_logprob_sl=torch.where(keep_old_sl, old_sl, -math.inf),
        keep_old_sl=keep_old_sl,
        old_log_mass_sl=scores.log_mass_sl,
        sampler_logprob_sl=torch.where(batch.token_mask_sl, old_sl + sampler_noise_sl, 0.0),
        reference_logprob_sl=torch.where(
            batch.token_mask_sl, finite_sl.clamp(min=-4.0) + reference_noise_sl, 0.0
        ),
    )


def _lengths(layout: CheckLayout) -> torch.Tensor:
    """`[S]` int64 from 3 to LENGTH, the longest first."""
    return LENGTH - (torch.arange(layout.num_sequences) * 7) % (LENGTH - 2)


def _within_vocabulary(sampling: SamplingConfig, model: ModelConfig) -> SamplingConfig:
    """A filter that cuts the tiny distribution where the run has one. The tiny model is all but uniform and
    the batch's ids are random, so a share of them stays in the support and a share leaves it; a nucleus of
    0.99 or a min-p of 0.05 would keep every id, and no fault of a support could show.
    """
    assert model.vocab_size is not None and model.hidden_size is not None
    spec = sampling.spec()
    if spec.effective_top_k is not None:
        return dataclasses.replace(sampling, top_k=int(KEPT_SHARE * model.vocab_size))
    if sampling.top_p is not None and sampling.top_p < 1.0:
        return dataclasses.replace(sampling, top_p=min(sampling.top_p, KEPT_MASS))
    if sampling.min_p > 0.0:
        # Drawn weights give logits around 0 of deviation std x sqrt(D); the largest is two of them above, or
        # under a tied head that of the position's own id, std x D. About half of the ids are above 0.
        size = model.hidden_size
        depth = INIT_STD * (size if model.tie_word_embeddings else 2 * math.sqrt(size))
        return dataclasses.replace(
            sampling, min_p=max(sampling.min_p, math.exp(-depth / sampling.temperature))
        )
    return sampling
