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
from rlcore.ops.reference import reference_logprob
from tests.rank_pool import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]

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
}


def make_config(layout: str, num_microbatches: int, **loss: object) -> RunConfig:
    world_size, tp, pp, sp, distopt = LAYOUTS[layout]
    dp = world_size // (tp * pp)
    return load_run_config(
        {
            "model": MODEL,
            "parallel": {
                "tp": tp,
                "pp": pp,
                "sequence_parallel": sp,
                "distributed_optimizer": distopt,
                "backend": "cpu",
            },
            "sampling": {"temperature": 0.8, "top_k": 12, "top_p": 0.9},
            "loss": {"ratio_clip_max": 0.28, "entropy_metric": True, **loss},
            "rollout": {
                "prompts_per_step": 2,
                "samples_per_prompt": NUM_SEQUENCES // 2,
                "max_new_tokens": LENGTH,
            },
            # No clipping: gradients are read back from Megatron's buffers after the step.
            "optimizer": {"lr": 1e-3, "clip_grad": 0.0},
            "train": {"microbatch_size": NUM_SEQUENCES // dp // num_microbatches, "steps": 3},
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
    rows = slice(dp_rank * NUM_SEQUENCES // dp_size, (dp_rank + 1) * NUM_SEQUENCES // dp_size)
    return TrainBatch(
        **{
            f.name: v if v is None else v[rows]
            for f in dataclasses.fields(batch)
            for v in [getattr(batch, f.name)]
        }
    )


def _score(rank, world_size, config, batch):
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        return worker.logprobs(share(batch, worker.groups.dp_rank, worker.groups.dp_size))
    finally:
        worker.close()


def _train(rank, world_size, config, batch):
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        result = worker.train_step(share(batch, worker.groups.dp_rank, worker.groups.dp_size))
        gradients = _gradients(worker)
        return result, gradients, _weights(worker)
    finally:
        worker.close()


def _weights(worker):
    from megatron_worker.hf_bridge import export_hf_tensors

    return {
        name: tensor.clone() for name, tensor in export_hf_tensors(worker.model, worker.arch, worker.groups)
    }


def _gradients(worker):
    """Gradients by HF name, whole: the bridge reads parameters, so each holds its gradient for a moment."""
    parameters = list(worker.model.parameters())
    values = [parameter.data.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)
    gradients = _weights(worker)
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data.copy_(value)
    return gradients


@pytest.fixture(scope="module")
def batch():
    plain = make_batch()
    (scores,) = run_ranks(_score, 1, make_config("tp1", 1), plain)
    return perturbed(plain, scores)


@pytest.fixture(scope="module")
def baseline(batch):
    ((result, gradients, weights),) = run_ranks(_train, 1, make_config("tp1", 1, kl_coef=0.1), batch)
    return result, gradients, weights


TOLERANCE = 1e-5


def assert_same(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], hint: object) -> None:
    assert sorted(ours) == sorted(expected)
    for name, value in expected.items():
        scale = max(1.0, float(value.abs().max()))
        assert float((ours[name] - value).abs().max()) <= TOLERANCE * scale, (hint, name)


def assert_same_metrics(ours: StepResult, expected: StepResult, hint: object) -> None:
    assert ours.stepped and sorted(ours.metrics) == sorted(expected.metrics)
    for name, value in expected.metrics.items():
        assert ours.metrics[name] == pytest.approx(value, abs=TOLERANCE, rel=TOLERANCE), (hint, name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_loss_gradients_and_metrics_do_not_depend_on_the_layout(layout, num_microbatches, batch, baseline):
    """Token counts are those of the whole step, so neither microbatches nor ranks weigh anything."""
    config = make_config(layout, num_microbatches, kl_coef=0.1)
    expected, gradients, _ = baseline
    hint = (layout, num_microbatches)
    for result, ours, _ in run_ranks(_train, LAYOUTS[layout][0], config, batch):
        assert_same_metrics(result, expected, hint)
        if layout != "dp2+distopt":
            # The distributed optimizer reduces each rank's own slice only; its weights are compared below.
            assert_same(ours, gradients, hint)


@pytest.mark.parametrize("layout", ["tp2pp2+sp", "dp2+distopt"])
def test_the_step_moves_the_same_weights(layout, batch, baseline):
    """Adam divides by the gradient's size, so only entries whose gradient is clear of rounding are
    compared.
    """
    _, gradients, expected = baseline
    for _, _, weights in run_ranks(_train, LAYOUTS[layout][0], make_config(layout, 2, kl_coef=0.1), batch):
        for name, value in expected.items():
            clear = gradients[name].abs() > 1e-5
            assert torch.allclose(weights[name][clear], value[clear], atol=1e-5), (layout, name)


def test_the_batch_holds_every_kind_of_token(baseline):
    """Otherwise the tests above would compare layouts on an easy batch."""
    metrics = baseline[0].metrics
    for name in ("sample_masked", "dropped_keep_old", "dropped_keep", "trained", "prompt_or_padding"):
        assert metrics[f"tokens/{name}"] > 0, name
    assert metrics["ratio/clipped_low"] > 0 and metrics["ratio/clipped_high"] > 0
    assert 0 < metrics["filter/out_of_support"] < 1 and metrics["kl/reference"] > 0


@pytest.mark.parametrize("actor_denominator", ["retained", "valid"])
def test_loss_and_gradients_equal_an_unsharded_float64_reference(actor_denominator, batch, tmp_path):
    """Hugging Face's model in float64, the reference op, and the loss written out on whole sequences."""
    config = make_config("tp2pp2", 2, kl_coef=0.1, actor_denominator=actor_denominator)
    result, gradients, _ = run_ranks(_train, 4, config, batch)[0]
    loss, expected, retained = _reference_step(
        config, batch, run_ranks(_save, 1, config, str(tmp_path / "policy"))[0]
    )
    assert result.metrics["loss/total"] == pytest.approx(loss, abs=TOLERANCE)
    assert result.metrics["tokens/retained"] == retained
    assert_same({name: gradients[name] for name in expected}, expected, actor_denominator)


def _save(rank, world_size, config, path):
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(dataclasses.replace(config, parallel=make_config("tp1", 1).parallel))
    try:
        worker.save(path)
    finally:
        worker.close()
    return path


def _reference_step(
    config: RunConfig, batch: TrainBatch, path: str
) -> tuple[float, dict[str, torch.Tensor], int]:
    """Loss, gradients by HF name and the retained count of the whole batch, in one float64 piece."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    policy_terms, kl_terms = [], []
    num_retained = num_valid = 0
    for row in range(NUM_SEQUENCES):
        length = int(batch.length_s[row])
        logits = model(batch.ids_sl[row : row + 1, : length - 1]).logits[0]
        scores = reference_logprob(logits, batch.ids_sl[row, 1:length], config.sampling.spec())
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


def test_an_unchanged_policy_has_ratio_one(batch):
    """Old logprobs of the same weights under top-k + top-p: ratio 1, and the loss is that of the advantages
    alone.
    """
    config = make_config("tp2pp2", 2)
    plain = make_batch()
    scores = run_ranks(_score, 4, config, plain)[0]
    unchanged = dataclasses.replace(plain, old_logprob_sl=scores.logprob_sl, keep_old_sl=scores.keep_sl)
    result = run_ranks(_train, 4, config, unchanged)[0][0]
    for name in ("ratio/mean", "ratio/min", "ratio/max"):
        assert result.metrics[name] == pytest.approx(1.0, abs=1e-5)
    counted = plain.token_mask_sl & plain.sample_mask_s[:, None] & scores.keep_sl
    assert result.metrics["loss/policy"] == pytest.approx(
        -float(plain.advantage_sl[counted].mean()), abs=1e-5
    )


@pytest.mark.parametrize("layout", ["tp1", "pp2", "dp2"])
def test_b35_a_step_without_tokens_moves_nothing(layout, batch):
    """Momentum and weight decay would move weights although nothing was trained."""
    empty = dataclasses.replace(batch, sample_mask_s=torch.zeros(NUM_SEQUENCES).bool())
    config = make_config(layout, 2, kl_coef=0.1)
    expected = run_ranks(_initial_weights, 1, make_config("tp1", 1))[0]
    for result, _, weights in run_ranks(_train, LAYOUTS[layout][0], config, empty):
        assert not result.stepped and "no token" in result.reason
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def _initial_weights(rank, world_size, config):
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        return _weights(worker)
    finally:
        worker.close()


def _train_broken(rank, world_size, config, batch, where):
    """One step on a batch or a model that holds a NaN; returns the error and whether the weights moved."""
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        mine = share(batch, worker.groups.dp_rank, worker.groups.dp_size)
        if where == "advantage" and worker.groups.dp_rank == worker.groups.dp_size - 1:
            advantage_sl = mine.advantage_sl.clone()
            advantage_sl[1] = math.nan
            mine = dataclasses.replace(mine, advantage_sl=advantage_sl)
        elif where == "weights" and worker.groups.is_last_stage and worker.groups.tp_rank == 0:
            next(worker.model.parameters()).data.view(-1)[3] = math.nan
        before = [p.detach().clone() for p in worker.model.parameters()]
        errors = []
        for call in (worker.train_step, worker.logprobs) if where == "weights" else (worker.train_step,):
            try:
                call(mine)
            except ValueError as error:
                errors.append(str(error))
        same = all(
            torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
            for a, b in zip(before, worker.model.parameters(), strict=True)
        )
        return errors, same
    finally:
        worker.close()


@pytest.mark.parametrize("layout", ["tp1", "tp2pp2", "pp2dp2"])
@pytest.mark.parametrize("where", ["advantage", "weights"])
def test_a_nan_is_refused_on_all_ranks_and_moves_nothing(layout, where, batch):
    """Only the last stage of one replica sees it; every rank raises, none hangs, no weight moves."""
    for errors, same in run_ranks(
        _train_broken, LAYOUTS[layout][0], make_config(layout, 2), batch, where, timeout_s=60
    ):
        assert len(errors) == (2 if where == "weights" else 1)
        assert all("NaN or inf" in error and "sample" in error for error in errors), errors
        assert same
