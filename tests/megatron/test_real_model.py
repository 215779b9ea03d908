"""A real pretrained model on Megatron computes what transformers computes, in several layouts."""

from __future__ import annotations

import pytest
import torch

from tests.rank_pool import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]

TEXT = "What is 2+3? Two plus three equals five, which is a prime number."


@pytest.fixture(scope="module")
def reference(smollm2_path):
    """Token ids `[1, L]` and transformers' float32 log-probabilities `[L, V]`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    ids_sl = torch.tensor([tokenizer(TEXT)["input_ids"]])
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()
    with torch.no_grad():
        return ids_sl, model(ids_sl).logits[0].log_softmax(-1)


def _logprobs(rank, world_size, path, ids_sl, parallel_values):
    """`[L, V]` log-probabilities on the last stage."""
    from megatron_worker.architecture import architecture_from_hf
    from megatron_worker.cpu_backend import cpu_backend
    from megatron_worker.groups import destroy_parallel, initialize_parallel
    from megatron_worker.hf_bridge import load_hf_weights
    from megatron_worker.model_setup import build_chunks
    from rlcore.config import ParallelConfig
    from tests.megatron.stage_runner import full_logits

    parallel = ParallelConfig(**parallel_values)
    with cpu_backend("cpu"):
        groups = initialize_parallel(parallel, "cpu")
        arch = architecture_from_hf(path)
        (model,) = build_chunks(arch, parallel, "float32", groups)
        load_hf_weights(model, arch, path, groups)
        logits = full_logits(model, arch, groups, ids_sl)
        leads = groups.tp_rank == 0
        destroy_parallel()
    return logits[0].log_softmax(-1) if logits is not None and leads else None


def test_the_reference_is_a_language_model(reference):
    """Guards the fetch tool: wrongly dequantised weights give noise (ln 49,152 = 10.8 nats a token)."""
    ids_sl, logprob_lv = reference
    nats = -logprob_lv[:-1].gather(-1, ids_sl[0, 1:, None]).mean()
    assert nats < 3.5


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        pytest.param(1, {}, id="tp1"),
        pytest.param(2, {"pp": 2}, id="pp2"),
        pytest.param(3, {"tp": 3}, id="tp3"),
        pytest.param(6, {"tp": 3, "pp": 2}, id="tp3pp2", marks=pytest.mark.slow),
    ],
)
def test_logprobs_equal_transformers(smollm2_path, reference, world_size, parallel):
    ids_sl, expected_lv = reference
    results = run_ranks(_logprobs, world_size, smollm2_path, ids_sl, parallel)
    (logprob_lv,) = [result for result in results if result is not None]
    next_l1 = ids_sl[0, 1:, None]
    torch.testing.assert_close(
        logprob_lv[:-1].gather(-1, next_l1), expected_lv[:-1].gather(-1, next_l1), rtol=0, atol=1e-4
    )
    # Unlikely ids included: both sides are about 1e-4 from a float64 forward there.
    torch.testing.assert_close(logprob_lv, expected_lv, rtol=0, atol=3e-4)


def _truncated(rank, world_size, path, batch, parallel_values):
    """What the worker's scoring pass says on this rank, and its loss step's metrics."""
    from megatron_worker.worker import MegatronWorker
    from rlcore.config import load_run_config

    config = load_run_config(
        {
            "model": {"hf_path": path},
            "parallel": {**parallel_values, "backend": "cpu"},
            "sampling": {"temperature": 0.9, "top_k": 50, "top_p": 0.95},
            "train": {"microbatch_size": 1},
        }
    )
    worker = MegatronWorker(config)
    try:
        return worker.logprobs(batch)
    finally:
        worker.close()


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        pytest.param(3, {"tp": 3}, id="tp3"),
        pytest.param(6, {"tp": 3, "pp": 2}, id="tp3pp2", marks=pytest.mark.slow),
    ],
)
def test_truncated_logprobs_equal_a_single_process_reference(smollm2_path, reference, world_size, parallel):
    """The whole scoring path on real logits, on every rank, against transformers and float64."""
    from rlcore.batch import TrainBatch
    from rlcore.ops.reference import reference_logprob
    from rlcore.sampling import SamplingSpec

    ids_sl, logprob_lv = reference
    length = ids_sl.shape[1]
    zeros_sl = torch.zeros(1, length)
    batch = TrainBatch(
        ids_sl=ids_sl,
        length_s=torch.tensor([length]),
        # Nothing predicts the first token.
        token_mask_sl=torch.arange(length)[None] > 0,
        sample_mask_s=torch.ones(1).bool(),
        advantage_sl=zeros_sl,
        sampler_logprob_sl=zeros_sl,
    )
    expected = reference_logprob(
        logprob_lv[:-1], ids_sl[0, 1:], SamplingSpec(temperature=0.9, top_k=50, top_p=0.95)
    )
    assert 0 < int(expected.keep_t.sum()) < length - 1, "the text has tokens on both sides of the cut"
    for scores in run_ranks(_truncated, world_size, smollm2_path, batch, parallel):
        assert torch.equal(scores.keep_sl[0, 1:], expected.keep_t)
        kept_t = expected.keep_t
        torch.testing.assert_close(
            scores.logprob_sl[0, 1:][kept_t].double(), expected.logprob_t[kept_t], rtol=0, atol=1e-4
        )
        assert bool(torch.isneginf(scores.logprob_sl[0, 1:][~kept_t]).all())
        torch.testing.assert_close(scores.log_mass_sl[0, 1:].double(), expected.log_mass_t, rtol=0, atol=1e-4)
