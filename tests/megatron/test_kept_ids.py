"""The sampler's kept ids in the worker, beside the step itself (test_loss_layouts)."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rlcore.config import load_run_config, to_plain
from rlcore.sampling_mask import SamplingMask
from tests.megatron.layout_cases import (
    LAYOUTS,
    LENGTH,
    MODEL,
    NUM_SEQUENCES,
    make_batch,
    make_config,
    perturbed,
    score_on_rank,
    share,
    with_kept_ids,
)
from tests.rank_pool import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]

TOP_K = 4


def config_of(layout, support, num_microbatches=2, **sections):
    """A plain top-k, so that supports can be written down; one id more or less is then no rounding."""
    plain = to_plain(make_config(layout, num_microbatches))
    plain["sampling"] = {"top_k": TOP_K, "support": support}
    for name, section in sections.items():
        plain[name] |= section
    return load_run_config(plain)


def own_supports_on_rank(rank, world_size, config, batch):
    """The ids of each response token's four largest logits, best first."""
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        position_sl = torch.arange(LENGTH).expand(NUM_SEQUENCES, LENGTH)
        with torch.no_grad():
            logits = worker.model(batch.ids_sl, position_sl, None)[..., : MODEL["vocab_size"]]
        best_slk = logits.topk(TOP_K, dim=2).indices
        lists = []
        for row in range(NUM_SEQUENCES):
            for column in range(LENGTH):
                is_response = bool(batch.token_mask_sl[row, column])
                lists.append(best_slk[row, column - 1].tolist() if is_response else [])
        return lists
    finally:
        worker.close()


@pytest.fixture(scope="module")
def supports():
    """Each response token's own support."""
    (lists,) = run_ranks(own_supports_on_rank, 1, config_of("tp1", "recompute", 1), make_batch())
    return lists


def with_mask(batch, lists):
    return dataclasses.replace(batch, sampling_mask=SamplingMask.from_lists(lists))


def test_the_trainers_own_supports_replayed_change_nothing(supports):
    """Where the drawn token is in them; elsewhere replay adds it, since the sampler drew it."""
    batch = with_mask(make_batch(), supports)
    (searched,) = run_ranks(score_on_rank, 1, config_of("tp1", "recompute", 1), batch)
    results = run_ranks(score_on_rank, 4, config_of("tp2pp2", "replay"), batch)
    mask_sl = batch.token_mask_sl
    inside_sl = mask_sl & searched.keep_sl
    assert 0 < inside_sl.sum() < mask_sl.sum()
    for replayed in results:
        assert replayed.keep_sl.all()
        assert torch.allclose(replayed.logprob_sl[inside_sl], searched.logprob_sl[inside_sl], atol=1e-6)
        assert torch.allclose(replayed.log_mass_sl[inside_sl], searched.log_mass_sl[inside_sl], atol=1e-6)
        outside_sl = mask_sl & ~searched.keep_sl
        assert torch.isfinite(replayed.logprob_sl[outside_sl]).all()
        assert (replayed.log_mass_sl > searched.log_mass_sl)[outside_sl].all()


def train_on_rank(rank, world_size, config, batch):
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        return worker.train_step(share(batch, worker.groups.dp_rank, worker.groups.dp_size))
    finally:
        worker.close()


@pytest.mark.parametrize("layout", ["tp1", "tp2pp2+sp", "pp2dp2+packed", "tp2cp2+sp+fused", "tp1+fused"])
def test_an_audit_counts_what_the_supports_do_not_share(layout, supports):
    """By hand: one id of four is exchanged where the token stands at an even place."""
    batch = make_batch()
    (searched,) = run_ranks(score_on_rank, 1, config_of("tp1", "recompute", 1), batch)
    lists, jaccards, replayed = [], [], []
    ids_sl = batch.ids_sl.tolist()
    for index, own in enumerate(supports):
        row, column = divmod(index, LENGTH)
        others = [token for token in range(MODEL["vocab_size"]) if token not in own]
        kept = [*own[:3], others[0]] if own and column % 2 == 0 else list(own)
        lists.append(kept)
        if own and batch.sample_mask_s[row]:
            # The drawn token counts as kept, wherever it is.
            union = {*kept, ids_sl[row][column]}
            jaccards.append(len(union & set(own)) / len(union | set(own)))
            replayed.append(len(union))
    batch = with_mask(perturbed(batch, searched), lists)
    plain, audited = (
        run_ranks(train_on_rank, LAYOUTS[layout][0], config_of(layout, support), batch)
        for support in ("recompute", "audit")
    )
    valid_sl = batch.token_mask_sl & batch.sample_mask_s[:, None]
    outside = float((~searched.keep_sl)[valid_sl].double().mean())
    for result, without in zip(audited, plain, strict=True):
        found = {name: value for name, value in result.metrics.items() if name.startswith("audit/")}
        assert found["audit/jaccard"] == pytest.approx(sum(jaccards) / len(jaccards), abs=1e-6)
        assert found["audit/num_replayed"] == pytest.approx(sum(replayed) / len(replayed), abs=1e-6)
        assert found["audit/num_recomputed"] == TOP_K
        assert found["audit/out_of_support"] == pytest.approx(outside, abs=1e-6)
        assert len(found) == 5
        # Beside that it is the step without an audit.
        rest = {name: value for name, value in result.metrics.items() if name not in found}
        assert rest == pytest.approx(dict(without.metrics), abs=1e-6)
        assert result.stepped


def reference_on_rank(rank, world_size, config, batch):
    from megatron_worker.worker import MegatronWorker

    worker = MegatronWorker(config)
    try:
        return worker.reference_logprobs(batch)
    finally:
        worker.close()


def test_the_reference_policy_is_never_truncated(supports):
    batch = with_mask(make_batch(), supports)
    kl = {"loss": {"kl_coef": 0.1}}
    (with_ids,) = run_ranks(reference_on_rank, 1, config_of("tp1", "replay", 1, **kl), batch)
    (without,) = run_ranks(reference_on_rank, 1, config_of("tp1", "recompute", 1, **kl), batch)
    assert torch.equal(with_ids, without)


def told_on_rank(rank, world_size, config, batch):
    """What scoring and training say of a batch that data-parallel rank 1 alone has wrong."""
    from megatron_worker.worker import MegatronWorker

    def missing(mine):
        return dataclasses.replace(mine, sampling_mask=None)

    def empty(mine):
        counts_t = (mine.token_mask_sl & mine.sample_mask_s[:, None]).flatten()
        last = int(counts_t.nonzero()[-1])
        row_t = torch.arange(mine.sampling_mask.num_rows)
        row_t[last] = -1
        return dataclasses.replace(mine, sampling_mask=mine.sampling_mask.select(row_t))

    def outside(mine):
        ids = mine.sampling_mask.token_ids.clone()
        ids[5] = MODEL["vocab_size"]
        return dataclasses.replace(mine, sampling_mask=SamplingMask(ids, mine.sampling_mask.offsets))

    def other_on_one_stage(mine):
        ids = mine.sampling_mask.token_ids.clone()
        if not worker.groups.is_last_stage:
            ids[5] = (ids[5] + 1) % MODEL["vocab_size"]
        return dataclasses.replace(mine, sampling_mask=SamplingMask(ids, mine.sampling_mask.offsets))

    worker = MegatronWorker(config)
    said = []
    try:
        mine = share(batch, worker.groups.dp_rank, worker.groups.dp_size)
        for change in (missing, empty, outside, other_on_one_stage):
            for call in (worker.logprobs, worker.train_step):
                try:
                    call(change(mine) if worker.groups.dp_rank == 1 else mine)
                    said.append("went through")
                except ValueError as error:
                    said.append(str(error))
        worker.logprobs(mine)
        return said
    finally:
        worker.close()


def test_kept_ids_that_cannot_be_read_are_an_error_on_every_rank():
    batch = make_batch()
    config = config_of("pp2dp2", "replay")
    scores = run_ranks(score_on_rank, 1, config_of("tp1", "recompute", 1), batch)[0]
    batch = with_kept_ids(perturbed(batch, scores))
    wanted = (
        "sampling.support=replay reads the ids that the sampler kept, and the batch has none",
        "lists no id (1 of 48 rows do not)",
        f"replay id {MODEL['vocab_size']} in row",
        "were given different sampling_mask",
    )
    for said in run_ranks(told_on_rank, 4, config, batch):
        assert len(said) == 8
        for index, message in enumerate(said):
            assert wanted[index // 2] in message
