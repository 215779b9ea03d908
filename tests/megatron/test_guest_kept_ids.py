"""A guest replays the kept ids that its job hands in, and refuses a batch without them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rlcore.config import load_run_config, to_plain
from rlcore.sampling_mask import SamplingMask
from tests.megatron.layout_cases import (
    TOLERANCE,
    assert_same,
    gradients_by_name,
    score_on_rank,
    train_on_rank,
)
from tests.megatron.test_guest import (
    VOCAB_SIZE,
    foreign_job,
    in_ddp,
    make_batch,
    objective,
    own_config,
    rows_of,
)
from tests.rank_pool import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]


def with_kept_ids(batch):
    """1 to 30 random ids at each response token."""
    generator = torch.Generator().manual_seed(4)
    responses = batch.token_mask_sl.flatten().tolist()
    lists = [
        torch.randperm(VOCAB_SIZE, generator=generator)[: 1 + row % 30].tolist() if is_response else []
        for row, is_response in enumerate(responses)
    ]
    return dataclasses.replace(batch, sampling_mask=SamplingMask.from_lists(lists))


def replayed_on_rank(rank, world_size, batch):
    """What a batch without kept ids is told; then old logprobs, metrics and gradients of one with them."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_worker.guest import GuestWorker

    with foreign_job(2, 1, 1, False) as (stage, groups, arch):
        model = in_ddp(stage)
        config = objective(1)
        config["sampling"] = {**config["sampling"], "support": "replay"}
        worker = GuestWorker(model, config, VOCAB_SIZE)
        mine = rows_of(batch, groups.dp_rank, groups.dp_size)
        with pytest.raises(ValueError, match=r"sampling\.support=replay reads the ids .* the batch has none"):
            worker.prepare(dataclasses.replace(mine, sampling_mask=None))
        old = worker.with_old_logprobs(mine)
        prepared = worker.prepare(mine)
        reports = get_forward_backward_func()(**prepared.schedule(), model=[model], forward_only=False)
        worker.arch = arch
        return groups.dp_rank, old, worker.finish(prepared, reports), gradients_by_name(worker)


def test_a_guest_replays_its_jobs_kept_ids():
    """Equal to our own worker's, which the reference is compared with elsewhere; other than recomputed."""
    batch = with_kept_ids(make_batch())
    plain = to_plain(own_config())
    plain["sampling"]["support"] = "replay"
    config = load_run_config(plain)
    (scores,) = run_ranks(score_on_rank, 1, config, batch)
    ((result, gradients, _),) = run_ranks(train_on_rank, 1, config, batch)
    ((recomputed, _, _),) = run_ranks(train_on_rank, 1, own_config(), batch)
    assert abs(result.metrics["loss/total"] - recomputed.metrics["loss/total"]) > 1e-2
    for dp_rank, old, metrics, ours in run_ranks(replayed_on_rank, 4, batch, timeout_s=60):
        rows = slice(0, 5) if dp_rank == 0 else slice(5, 8)
        assert bool(old.keep_old_sl.all())
        assert torch.allclose(old.old_logprob_sl, scores.logprob_sl[rows], atol=TOLERANCE)
        assert metrics["loss/total"] == pytest.approx(result.metrics["loss/total"], abs=TOLERANCE)
        assert_same(ours, gradients, dp_rank)
