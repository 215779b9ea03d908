"""The shift from token to predictor and back, fillers, and the order of samples."""

import pytest
import torch

from megatron_worker.microbatches import join_scores, split_batch
from rlcore.batch import TrainBatch

pytestmark = pytest.mark.megatron


def make_batch(ids, prompt_lengths, lengths):
    ids_sl = torch.tensor(ids)
    position_l = torch.arange(ids_sl.shape[1])
    prompt_s, length_s = torch.tensor(prompt_lengths), torch.tensor(lengths)
    mask = (position_l >= prompt_s[:, None]) & (position_l < length_s[:, None])
    value = torch.arange(ids_sl.numel(), dtype=torch.float32).reshape(ids_sl.shape)
    return TrainBatch(
        ids_sl=ids_sl,
        length_s=length_s,
        token_mask_sl=mask,
        sample_mask_s=torch.ones(len(ids)).bool(),
        advantage_sl=value,
        sampler_logprob_sl=-value,
        old_logprob_sl=-value,
        keep_old_sl=mask,
    )


def test_b16_logprob_token_and_mask_line_up():
    """ids [3, 1, 4, 2], prompt of 2: the masked sum is -1.337485; mask[:-1] gives -.904832, no shift
    -5.086444.
    """
    batch = make_batch([[3, 1, 4, 2]], [2], [4])
    (microbatch,) = split_batch(batch, 1)
    logits = torch.zeros(4, 5)
    logits[0, 1], logits[1, 4], logits[2, 2], logits[3, 0] = 1, 2, 1, 3
    logprob_t = torch.log_softmax(logits, dim=1)[torch.arange(4), microbatch.target_t]
    assert logprob_t[:3].tolist() == pytest.approx([-0.904832, -0.432653, -0.904832], abs=1e-6)
    assert float((logprob_t * microbatch.token_mask_t).sum()) == pytest.approx(-1.337485, abs=1e-6)
    joined = join_scores([logprob_t], batch, 4, 0.0)
    assert joined[0].tolist() == pytest.approx([0.0, -0.904832, -0.432653, -0.904832], abs=1e-6)
    assert float((joined * batch.token_mask_sl).sum()) == pytest.approx(-1.337485, abs=1e-6)


@pytest.mark.parametrize("microbatch_size", [1, 2, 3, 5])
@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("count_multiple", [1, 2])
def test_every_field_comes_back_in_the_original_order_without_fillers(
    microbatch_size, multiple, count_multiple
):
    ids = torch.randint(1, 9, (5, 6), generator=torch.Generator().manual_seed(0)).tolist()
    batch = make_batch(ids, [1, 2, 3, 1, 2], [6, 4, 5, 2, 3])
    microbatches = split_batch(batch, microbatch_size, multiple, count_multiple=count_multiple)
    fewest = -(-5 // microbatch_size)
    assert len(microbatches) == fewest + fewest % count_multiple
    length = microbatches[0].input_ids_bl.shape[1]
    assert length % multiple == 0 and len({m.input_ids_bl.shape for m in microbatches}) == 1
    position_l = torch.arange(6)
    real = (position_l < batch.length_s[:, None]) & (position_l > 0)
    for name, fill in (("old_logprob", 0.0), ("advantage", 0.0), ("keep_old", False)):
        joined = join_scores([getattr(m, f"{name}_t") for m in microbatches], batch, length, fill)
        assert torch.equal(joined, torch.where(real, getattr(batch, f"{name}_sl"), fill))
    index = torch.cat([m.sample_index_t for m in microbatches]).reshape(-1, length)
    fillers = index[5:]
    assert torch.equal(index[:5, 0], torch.arange(5)) and bool((fillers == -1).all())
    token_mask = torch.cat([m.token_mask_t for m in microbatches])
    sample_mask = torch.cat([m.sample_mask_t for m in microbatches])
    assert int((token_mask & sample_mask).sum()) == int(batch.token_mask_sl.sum())
    assert not sample_mask.reshape(-1, length)[5:].any()


@pytest.mark.parametrize("shape", [(0, 4), (2, 1), (2, 0)])
def test_a_batch_with_nothing_to_predict_is_refused(shape):
    empty = torch.zeros(shape)
    batch = TrainBatch(
        ids_sl=empty.long(),
        length_s=torch.zeros(shape[0]).long(),
        token_mask_sl=empty.bool(),
        sample_mask_s=torch.zeros(shape[0]).bool(),
        advantage_sl=empty,
        sampler_logprob_sl=empty,
    )
    with pytest.raises(ValueError, match="nothing to predict"):
        split_batch(batch, 1)


def test_mixed_shapes_and_masks_that_are_not_bool_are_named():
    with pytest.raises(ValueError, match="token_mask_sl has shape"):
        TrainBatch(
            ids_sl=torch.zeros(2, 3).long(),
            length_s=torch.zeros(2).long(),
            token_mask_sl=torch.zeros(2, 4).bool(),
            sample_mask_s=torch.zeros(2).bool(),
            advantage_sl=torch.zeros(2, 3),
            sampler_logprob_sl=torch.zeros(2, 3),
        )
    with pytest.raises(ValueError, match=r"token_mask_sl is torch.float32"):
        TrainBatch(
            ids_sl=torch.zeros(2, 3).long(),
            length_s=torch.zeros(2).long(),
            token_mask_sl=torch.zeros(2, 3),
            sample_mask_s=torch.zeros(2).bool(),
            advantage_sl=torch.zeros(2, 3),
            sampler_logprob_sl=torch.zeros(2, 3),
        )
