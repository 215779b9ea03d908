"""Batches that cannot be taken are a `ValueError` on every rank, whichever rank was given them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rlcore.batch import TrainBatch
from tests.megatron.layout_cases import LAYOUTS, MODEL, NUM_SEQUENCES, make_config, share
from tests.megatron.test_guest import (
    VOCAB_SIZE,
    foreign_job,
    in_ddp,
    make_batch,
    objective,
    rows_of,
)
from tests.rank_pool import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]


def with_length(batch, length):
    """Row 1 is said to have so many tokens, none of which trains."""
    length_s, token_mask_sl = batch.length_s.clone(), batch.token_mask_sl.clone()
    length_s[1], token_mask_sl[1] = length, False
    return dataclasses.replace(batch, length_s=length_s, token_mask_sl=token_mask_sl)


# What is wrong with data-parallel rank 1's batch, and what every rank says.
WRONG = {
    "longer than its columns": (
        lambda batch: with_length(batch, 20),
        "length_s of sample 1 is 20: expected 1",
    ),
    "no tokens": (lambda batch: with_length(batch, 0), "length_s of sample 1 is 0: expected 1 to 16"),
    "negative": (lambda batch: with_length(batch, -3), "length_s of sample 1 is -3: expected 1 to 16"),
    "keeps what has no logprob": (
        lambda batch: dataclasses.replace(batch, keep_old_sl=torch.ones_like(batch.keep_old_sl)),
        "whose old logprob is -inf",
    ),
}
BUDGET = 15


def told_on_rank(rank, world_size, batch):
    """What `prepare` says of each wrong batch, `logprobs` of the first, a small budget of a right one."""
    from megatron_worker.guest import GuestWorker

    def message_of(call, given):
        try:
            call(given)
        except ValueError as error:
            return str(error)
        return "went through"

    with foreign_job(1, 1, 2, False) as (stage, groups, _):
        model = in_ddp(stage)
        worker = GuestWorker(model, objective(2), VOCAB_SIZE)
        mine = rows_of(batch, groups.dp_rank, groups.dp_size)
        given = [change(mine) if groups.dp_rank == 1 else mine for change, _ in WRONG.values()]
        messages = [message_of(worker.prepare, wrong) for wrong in given]
        messages.append(message_of(worker.logprobs, given[0]))
        # Only data-parallel rank 0 has a sequence of 16.
        small = GuestWorker(model, {**objective(2), "train": {"token_budget": BUDGET}}, VOCAB_SIZE)
        messages.append(message_of(small.prepare, mine))
        messages.append(message_of(worker.prepare, mine))
        return messages


def test_a_batch_of_one_rank_is_refused_by_all():
    """With numbers and what to change, and the next call works."""
    wanted = [part for _, part in WRONG.values()]
    wanted += [
        "length_s of sample 1 is 20",
        "sequence 0 has 16 tokens, 16 with padding: train.token_budget=15",
    ]
    wanted.append("went through")
    for rank, messages in enumerate(run_ranks(told_on_rank, 4, make_batch(), timeout_s=60)):
        assert len(messages) == len(wanted)
        for message, part in zip(messages, wanted, strict=True):
            assert part in message, (rank, message)


def mixed_on_rank(rank, world_size, batch):
    """Rank 1, of replica 0, is given other ids, then another mask; then all the same."""
    from megatron_worker.guest import GuestWorker

    messages = []
    with foreign_job(2, 1, 1, False) as (stage, groups, _):
        worker = GuestWorker(in_ddp(stage), objective(1), VOCAB_SIZE)
        mine = rows_of(batch, groups.dp_rank, groups.dp_size)
        swapped = dataclasses.replace(mine, ids_sl=mine.ids_sl.flip(0))
        masked = dataclasses.replace(mine, sample_mask_s=torch.zeros_like(mine.sample_mask_s))
        for other in (swapped, masked, mine):
            try:
                worker.logprobs(other if rank == 1 else mine)
                messages.append("went through")
            except ValueError as error:
                messages.append(str(error))
    return messages


def test_the_ranks_of_a_replica_need_one_batch():
    """A job that chooses its data by the global rank; the embedding would add up other tokens' rows."""
    for ids, mask, same in run_ranks(mixed_on_rank, 4, make_batch(), timeout_s=60):
        assert "different ids_sl" in ids and "data-parallel rank" in ids
        assert "different sample_mask_s" in mask
        assert same == "went through"


@pytest.mark.parametrize("layout", ["tp1", "tp2pp2"])
def test_what_the_model_cannot_take_is_named_on_every_rank(layout, batch):
    """An id outside the vocabulary (which a sharded embedding would read as zeros), too long a batch, and
    tokens that nothing predicts: a denominator would count them and no term.
    """
    first_sl = batch.token_mask_sl.clone()
    row = int(batch.sample_mask_s.nonzero()[0, 0])
    first_sl[row, 0] = True
    short_s = batch.length_s.clone()
    short_s[row] = int(batch.token_mask_sl[row].nonzero()[-1, 0])
    ids_sl = batch.ids_sl.clone()
    ids_sl[1, 2] = MODEL["vocab_size"]
    wide_sl = torch.zeros(NUM_SEQUENCES, 40).long()
    too_long = TrainBatch(
        ids_sl=wide_sl,
        length_s=batch.length_s,
        token_mask_sl=wide_sl.bool(),
        sample_mask_s=batch.sample_mask_s,
        advantage_sl=wide_sl.float(),
        sampler_logprob_sl=wide_sl.float(),
    )
    cases = (
        (dataclasses.replace(batch, ids_sl=ids_sl), "id 21 of sample 1"),
        (too_long, "40 tokens"),
        (
            dataclasses.replace(batch, token_mask_sl=first_sl),
            f"token_mask_sl of sample {row} counts position 0",
        ),
        (
            dataclasses.replace(batch, length_s=short_s),
            f"token_mask_sl of sample {row} counts position {int(short_s[row])} of",
        ),
    )
    config, batches = make_config(layout, 2), [broken for broken, _ in cases]
    for said in run_ranks(_refusals, LAYOUTS[layout][0], config, batches, timeout_s=60):
        for text, (_, message) in zip(said, cases, strict=True):
            assert message in text


def _refusals(rank, world_size, config, batches):
    """What scoring each batch says on this rank."""
    from megatron_worker.worker import MegatronWorker

    worker, said = MegatronWorker(config), []
    try:
        for batch in batches:
            try:
                worker.logprobs(share(batch, worker.groups.dp_rank, worker.groups.dp_size))
            except ValueError as error:
                said.append(str(error))
            else:
                said.append("nothing")
        return said
    finally:
        worker.close()
