"""The same batch in every layout: loss, gradient of every parameter and metrics agree, and equal an unsharded
reference.

Truncation is on, tokens are dropped on both sides, samples are masked, lengths are uneven, one rank's share
is empty.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from rlcore.batch import ScoredTokens, StepResult, TrainBatch
from rlcore.config import RunConfig, load_run_config
from rlcore.ops.logprob import TokenLogprobs
from rlcore.ops.reference import reference_logprob, reference_replay
from rlcore.quantiles import RELATIVE_ERROR
from rlcore.sampling_mask import SamplingMask
from rlcore.trainer import minibatches

# V = 21 does not divide by 2: the vocabulary is padded. Tied embeddings live on two stages.
MODEL = {
    "vocab_size": 21,
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
    "qkv_bias": True,
}
NUM_SEQUENCES, LENGTH = 8, 12

# name -> (world size, tp, pp, sequence parallel, distributed optimizer)
LAYOUTS = {
    "tp1": (1, 1, 1, False, False),
    "tp2": (2, 2, 1, False, False),
    "tp2+sp": (2, 2, 1, True, False),
    "pp2": (2, 1, 2, False, False),
    "dp2": (2, 1, 1, False, False),
    "dp2+distopt": (2, 1, 1, False, True),
    "tp2pp2": (4, 2, 2, False, False),
    "tp2pp2+sp": (4, 2, 2, True, False),
    "pp2dp2": (4, 1, 2, False, False),
    "tp1+fused": (1, 1, 1, False, False),
    "tp2pp2+fused": (4, 2, 2, False, False),
    "tp2pp2+sp+fused": (4, 2, 2, True, False),
    "tp1+packed": (1, 1, 1, False, False),
    "tp2pp2+sp+packed": (4, 2, 2, True, False),
    "pp2dp2+packed": (4, 1, 2, False, False),
    "cp2": (2, 1, 1, False, False),
    "tp2cp2+sp": (4, 2, 1, True, False),
    "pp2cp2": (4, 1, 2, False, False),
    "dp2cp2": (4, 1, 1, False, False),
    "tp2cp2+sp+fused": (4, 2, 1, True, False),
}

# Tokens of a packed microbatch where the batch is cut into so many: it has 68, 76 with padding for CP 2.
BUDGETS = {1: 96, 2: 44, 4: 24}


def cp_of(layout: str) -> int:
    """Context-parallel ranks of a layout, by its name."""
    return 2 if "cp2" in layout else 1


def make_config(layout: str, num_microbatches: int, **loss: object) -> RunConfig:
    world_size, tp, pp, sp, distopt = LAYOUTS[layout]
    cp = cp_of(layout)
    dp = world_size // (tp * pp * cp)
    packs = cp > 1 or layout.endswith("+packed")
    return load_run_config(
        {
            "model": {**MODEL, "fused_head": layout.endswith("+fused")},
            "parallel": {
                "tp": tp,
                "pp": pp,
                "cp": cp,
                "sequence_parallel": sp,
                "distributed_optimizer": distopt,
                "backend": "cpu",
            },
            "sampling": {"temperature": 0.8, "top_k": 12, "top_p": 0.9},
            "loss": {"ratio_clip_max": 0.28, "entropy_metric": True, **loss},
            "rollout": {
                "prompts_per_step": 2,
                "samples_per_prompt": NUM_SEQUENCES // 2,
                "max_new_tokens": 16,
            },
            # No clipping: gradients are read back from Megatron's buffers after the step.
            "optimizer": {"lr": 1e-3, "clip_grad": 0.0},
            "train": {
                "microbatch_size": NUM_SEQUENCES // dp // num_microbatches,
                "token_budget": BUDGETS[num_microbatches] if packs else None,
                "steps": 3,
            },
        }
    )


def make_batch() -> TrainBatch:
    """The whole batch, without old logprobs. The last two samples are masked: DP rank 1's last microbatch is
    empty.
    """
    generator = torch.Generator().manual_seed(5)
    ids_sl = torch.randint(0, MODEL["vocab_size"], (NUM_SEQUENCES, LENGTH), generator=generator)
    length_s = torch.tensor([12, 5, 9, 12, 3, 7, 12, 8])
    prompt_s = torch.tensor([3, 2, 4, 6, 2, 1, 5, 2])
    position_l = torch.arange(LENGTH)
    token_mask_sl = (position_l >= prompt_s[:, None]) & (position_l < length_s[:, None])
    advantage_s = torch.randn(NUM_SEQUENCES, 1, generator=generator).abs() + 0.1
    advantage_s[1::2] *= -1
    return TrainBatch(
        ids_sl=ids_sl,
        length_s=length_s,
        token_mask_sl=token_mask_sl,
        sample_mask_s=torch.tensor([True] * 6 + [False] * 2),
        advantage_sl=torch.where(token_mask_sl, advantage_s, 0.0),
        sampler_logprob_sl=torch.zeros(NUM_SEQUENCES, LENGTH),
    )


def with_kept_ids(batch: TrainBatch) -> TrainBatch:
    """With the ids that a sampler kept: for each response token two to twelve of any, in any order, the token
    not always among them; for the others none.
    """
    generator = torch.Generator().manual_seed(9)
    lists = []
    for is_response in batch.token_mask_sl.flatten().tolist():
        ids = torch.randperm(MODEL["vocab_size"], generator=generator).tolist()
        size = int(torch.randint(2, 13, (1,), generator=generator))
        lists.append(ids[:size] if is_response else [])
    return dataclasses.replace(batch, sampling_mask=SamplingMask.from_lists(lists))


def perturbed(batch: TrainBatch, scores: ScoredTokens) -> TrainBatch:
    """With old logprobs near the policy's, some clipped, and some kept tokens dropped by the old pass (old =
    -inf).
    """
    generator = torch.Generator().manual_seed(6)
    noise_sl = torch.randn(scores.logprob_sl.shape, generator=generator) * 0.6
    dropped_sl = torch.rand(scores.logprob_sl.shape, generator=generator) < 0.1
    # Tokens that only the current pass drops get a finite old logprob: both kinds of drop are in the batch.
    old_sl = torch.where(scores.keep_sl, scores.logprob_sl + noise_sl, -3.0)
    odd_sl = torch.arange(LENGTH) % 2 == 1
    keep_old_sl = ~dropped_sl & (scores.keep_sl | odd_sl)
    return dataclasses.replace(
        batch,
        old_logprob_sl=torch.where(keep_old_sl, old_sl, -math.inf),
        keep_old_sl=keep_old_sl,
        old_log_mass_sl=scores.log_mass_sl,
        reference_logprob_sl=torch.where(
            batch.token_mask_sl, scores.logprob_sl.clamp(min=-4) + noise_sl, 0.0
        ),
    )


def share(batch: TrainBatch, dp_rank: int, dp_size: int) -> TrainBatch:
    """This data-parallel rank's rows."""
    return list(minibatches(batch, dp_size))[dp_rank]


def score_on_rank(rank, world_size, config, batch):
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        return worker.logprobs(share(batch, worker.groups.dp_rank, worker.groups.dp_size))
    finally:
        worker.close()


def train_on_rank(rank, world_size, config, batch):
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        result = worker.train_step(share(batch, worker.groups.dp_rank, worker.groups.dp_size))
        gradients = gradients_by_name(worker)
        return result, gradients, weights_by_name(worker)
    finally:
        worker.close()


def weights_by_name(worker):
    from megatron_worker.hf_bridge import export_hf_tensors

    return {
        name: tensor.clone() for name, tensor in export_hf_tensors(worker.chunks, worker.arch, worker.groups)
    }


def gradients_by_name(worker):
    """Gradients by HF name, whole: the bridge reads parameters, so each holds its gradient for a moment."""
    from megatron_worker.chunks import parameters_of

    parameters = list(parameters_of(worker.chunks))
    values = [parameter.data.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)
    gradients = weights_by_name(worker)
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data.copy_(value)
    return gradients


TOLERANCE = 1e-5
RELATIVE_TOLERANCE = 1e-3


def assert_same(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], hint: object) -> None:
    assert sorted(ours) == sorted(expected)
    for name, value in expected.items():
        largest = float(value.abs().max())
        difference = float((ours[name] - value).abs().max())
        assert difference <= TOLERANCE * max(1.0, largest), (hint, name)
        # Attention's gradients are near 1e-4 here: held to their own size too, or an error of a tenth would
        # pass.
        assert difference <= RELATIVE_TOLERANCE * largest + 1e-9, (hint, name, difference, largest)


def assert_same_metrics(ours: StepResult, expected: StepResult, hint: object) -> None:
    assert ours.stepped and sorted(ours.metrics) == sorted(expected.metrics)
    for name, value in expected.metrics.items():
        # A sketch's buckets are a step apart, and a value near an edge may fall on either side of it.
        tolerance = 2 * RELATIVE_ERROR if "quantile" in name else TOLERANCE
        assert ours.metrics[name] == pytest.approx(value, abs=TOLERANCE, rel=tolerance), (hint, name)


def reference_scores(logits: torch.Tensor, batch: TrainBatch, row: int, config: RunConfig) -> TokenLogprobs:
    """Of one sequence's tokens after the first, under the kept ids where the config replays them."""
    length, spec = int(batch.length_s[row]), config.sampling.spec()
    target_t, mask = batch.ids_sl[row, 1:length], batch.sampling_mask
    if config.sampling.support != "replay":
        return reference_logprob(logits, target_t, spec)
    assert mask is not None
    bounds, first = mask.offsets.tolist(), row * batch.ids_sl.shape[1]
    kept_ids = [
        mask.token_ids[bounds[index] : bounds[index + 1]].tolist()
        for index in range(first + 1, first + length)
    ]
    return reference_replay(logits, target_t, spec, kept_ids)


def reference_step(
    config: RunConfig, batch: TrainBatch, path: str, **options: object
) -> tuple[float, dict[str, torch.Tensor], int]:
    """Loss, gradients by HF name and the retained count of the whole batch, in one float64 piece. `options`
    go to `from_pretrained`.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **options)
    policy_terms, kl_terms = [], []
    num_retained = num_valid = 0
    for row in range(NUM_SEQUENCES):
        length = int(batch.length_s[row])
        logits = model(batch.ids_sl[row : row + 1, : length - 1]).logits[0]
        scores = reference_scores(logits, batch, row, config)
        for position in range(1, length):
            if not (batch.token_mask_sl[row, position] and batch.sample_mask_s[row]):
                continue
            num_valid += 1
            log_ratio = batch.reference_logprob_sl[row, position] - scores.unfiltered_logprob_t[position - 1]
            kl = log_ratio.exp() - 1 - log_ratio
            kl_terms.append(kl + kl.detach() * (scores.unfiltered_logprob_t[position - 1]))
            kl_terms[-1] = kl_terms[-1] - (kl.detach() * scores.unfiltered_logprob_t[position - 1]).detach()
            if not batch.keep_old_sl[row, position]:
                continue
            num_retained += 1
            if not scores.keep_t[position - 1]:
                continue
            ratio = (scores.logprob_t[position - 1] - batch.old_logprob_sl[row, position]).exp()
            advantage = batch.advantage_sl[row, position].double()
            policy_terms.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage))
    count = num_retained if config.loss.actor_denominator == "retained" else num_valid
    loss = (
        torch.stack(policy_terms).sum() / count
        + config.loss.kl_coef * torch.stack(kl_terms).sum() / num_valid
    )
    loss.backward()
    gradients = {name: p.grad.float() for name, p in model.named_parameters()}
    return loss.item(), gradients, num_retained
