"""A stage with a fused head scores and trains as one with whole logits does, and never computes them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.megatron.layout_cases import (
    TOLERANCE,
    assert_same,
    assert_same_metrics,
    make_batch,
    make_config,
)
from tests.rank_pool import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]


def _score_and_train(rank, world_size, config, batch):
    """Scores, then a step on them; a fused head's module raises when it runs."""
    from megatron_worker.chunks import unwrap
    from megatron_worker.worker import MegatronWorker
    from tests.megatron.layout_cases import gradients_by_name

    def refuse(module, arguments, output):
        raise AssertionError("the head computed logits")

    worker = MegatronWorker(config)
    try:
        head = getattr(unwrap(worker.model), "output_layer", None)
        if head is not None and config.model.fused_head:
            head.register_forward_hook(refuse)
        scores = worker.logprobs(batch)
        batch = dataclasses.replace(batch, old_logprob_sl=scores.logprob_sl - 0.1, keep_old_sl=scores.keep_sl)
        result = worker.train_step(batch)
        return scores, result, gradients_by_name(worker)
    finally:
        worker.close()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", ["tp1", "tp2+sp"])
def test_fused_and_whole_logits_agree(layout, tied):
    """The layout tests tie the head to the embedding; here it also has a weight of its own."""
    config = make_config(layout, 2)
    model = dataclasses.replace(config.model, tie_word_embeddings=tied)
    outcomes = []
    for fused in (False, True):
        # Five tokens: several chunks a microbatch, cut across sequences.
        head = dataclasses.replace(model, fused_head=fused, fused_head_tokens=5)
        config = dataclasses.replace(config, model=head)
        outcomes.append(run_ranks(_score_and_train, 1 if layout == "tp1" else 2, config, make_batch()))
    for (scores, result, gradients), (fused_scores, fused_result, fused_gradients) in zip(
        *outcomes, strict=True
    ):
        assert torch.equal(fused_scores.keep_sl, scores.keep_sl)
        kept = scores.keep_sl
        assert torch.allclose(fused_scores.logprob_sl[kept], scores.logprob_sl[kept], atol=TOLERANCE)
        assert torch.allclose(fused_scores.log_mass_sl, scores.log_mass_sl, atol=TOLERANCE)
        assert_same_metrics(fused_result, result, layout)
        assert_same(fused_gradients, gradients, layout)
        assert ("lm_head.weight" in gradients) != tied
