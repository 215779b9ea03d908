"""One `train_step` of SmolLM2-135M's size on sequences of uneven length: padded rows against packed ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import torch

from rlcore.batch import TrainBatch
from rlcore.collectives import Group
from rlcore.config import RunConfig, load_run_config
from tools.bench.case_train_step import Row, make_row, open_worker, timed_steps
from tools.bench.options import BenchOptions
from tools.bench.ranks import CheckFailed

# SmolLM2-135M's config.json. Drawn weights: what they are does not change the time.
SMOLLM2 = {
    "vocab_size": 49_152,
    "num_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_query_groups": 3,
    "ffn_hidden_size": 1536,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
NUM_SEQUENCES = 8
# Sequences of a padded microbatch; a packed row may have as many positions.
PER_MICROBATCH = 4
# Steps take seconds each.
MOST_REPEATS = 3
# Response lengths spread like a log-normal of this sigma; half of a padded batch is padding.
SIGMA, REAL_SHARE = 0.8, 0.5
# Both sum the same float32 numbers in another order.
TOLERANCE = 1e-4


def packing_rank(group: Group, options: BenchOptions, model: Mapping[str, Any] = SMOLLM2) -> list[Row]:
    """The rows `smollm2_padded` and `smollm2_packed`; `CheckFailed` where their losses differ."""
    longest = max(16, options.tokens // NUM_SEQUENCES)
    lengths = length_mix(NUM_SEQUENCES, longest)
    rows, losses = [], []
    for name, budget in (("smollm2_padded", None), ("smollm2_packed", PER_MICROBATCH * longest)):
        with open_worker(_config(options, model, budget)) as worker:
            batch = _batch(worker, lengths, longest, model["vocab_size"])
            steps, metrics = timed_steps(worker, batch, min(options.repeats, MOST_REPEATS), group)
        rows.append(make_row(name, steps, sum(lengths)))
        losses.append((metrics["loss/total"], metrics["optimizer/grad_norm"]))
    for padded, packed in zip(*losses, strict=True):
        if abs(padded - packed) > TOLERANCE * max(1.0, abs(padded)):
            raise CheckFailed(f"train_step: padded rows gave {padded}, packed ones {packed}")
    rows[1]["vs_padded"] = rows[1]["tokens_per_s"] / rows[0]["tokens_per_s"]
    return rows


def length_mix(num_sequences: int, longest: int) -> list[int]:
    """Lengths at the quantiles of a log-normal, scaled so that their mean is `REAL_SHARE` of the longest
    allowed; none is longer, and each has a prompt and a response token.
    """
    quantiles = [(index + 0.5) / num_sequences for index in range(num_sequences)]
    spread = torch.tensor([NormalDist().inv_cdf(share) for share in quantiles]).mul(SIGMA).exp()
    low, high = 0.0, float(longest)
    for _ in range(50):
        scale = (low + high) / 2
        lengths = (spread * scale).round().clamp(2, longest)
        low, high = (scale, high) if lengths.mean() < REAL_SHARE * longest else (low, scale)
    return (spread * high).round().clamp(2, longest).int().tolist()


def _config(options: BenchOptions, model: Mapping[str, Any], token_budget: int | None) -> RunConfig:
    # Top-p alone: the op's dearest search, and most random ids are inside the support of drawn weights.
    return load_run_config(
        {
            "model": dict(model),
            "parallel": {"backend": "cuda" if options.device == "cuda" else "cpu"},
            "sampling": {"top_p": 0.95},
            "optimizer": {"lr": 0.0},
            "train": {"microbatch_size": PER_MICROBATCH, "token_budget": token_budget},
        }
    )


def _batch(worker: Any, lengths: list[int], longest: int, vocab_size: int) -> TrainBatch:
    """Random ids, a quarter of each sequence a prompt; scored by the worker."""
    generator = torch.Generator().manual_seed(0)
    length_s = torch.tensor(lengths)
    position_l = torch.arange(longest)
    prompt_s = (length_s // 4).clamp(min=1)
    token_mask_sl = (position_l >= prompt_s[:, None]) & (position_l < length_s[:, None])
    shape = (len(lengths), longest)
    advantage_sl = torch.randn(shape, generator=generator)
    batch = TrainBatch(
        ids_sl=torch.randint(0, vocab_size, shape, generator=generator),
        length_s=length_s,
        token_mask_sl=token_mask_sl,
        sample_mask_s=torch.ones(len(lengths), dtype=torch.bool),
        advantage_sl=torch.where(token_mask_sl, advantage_sl, 0.0),
        sampler_logprob_sl=torch.zeros(shape),
    )
    on_device = {
        field.name: value.to(worker.device)
        for field in dataclasses.fields(batch)
        if (value := getattr(batch, field.name)) is not None
    }
    batch = TrainBatch(**on_device)
    old = worker.logprobs(batch)
    return dataclasses.replace(batch, old_logprob_sl=old.logprob_sl, keep_old_sl=old.keep_sl)
