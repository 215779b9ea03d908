"""The sampler's kept ids through the loop and the fused head, and its logprobs as the old ones."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from rlcore.batch import TrainBatch
from rlcore.ops.audit import AuditReport, audit_supports, linear_audit_supports
from rlcore.ops.linear_logprob import DIFFERENTIABLE, linear_vocab_parallel_logprob
from rlcore.ops.logprob import VocabShard, vocab_parallel_logprob
from rlcore.ops.reference import reference_replay
from rlcore.ops.replay import Replayed
from rlcore.rollout.policy_sampler import PolicySampler
from rlcore.rollout.reward import InlineGrader
from rlcore.rollout.tasks import make_task
from rlcore.sampling import SamplingSpec
from rlcore.sampling_mask import SamplingMask
from rlcore.trainer import train
from tests.linear_cases import make_head, weighted_sum
from tests.oracle import assert_close, assert_same_values, make_weights
from tests.toy_worker import ToyWorker, toy_config

NAN, INF = math.nan, math.inf


def make_batch(sampler_logprob_sl):
    """Two sequences of one prompt token and two of a response; token j of sequence s kept the ids s and j."""
    shape = (2, 3)
    return TrainBatch(
        ids_sl=torch.zeros(shape).long(),
        length_s=torch.tensor([3, 3]),
        token_mask_sl=torch.tensor([[False, True, True]] * 2),
        sample_mask_s=torch.ones(2).bool(),
        advantage_sl=torch.zeros(shape),
        sampler_logprob_sl=torch.tensor(sampler_logprob_sl),
        sampling_mask=SamplingMask.from_lists([[row, column] for row in range(2) for column in range(3)]),
    )


def test_rows_of_a_batch_take_their_kept_ids_along():
    batch = make_batch([[0.0, -1.0, -2.0], [0.0, -3.0, -4.0]])
    second = batch.rows(slice(1, 2))
    assert second.sampling_mask.token_ids.tolist() == [1, 0, 1, 1, 1, 2]
    assert second.sampling_mask.offsets.tolist() == [0, 2, 4, 6]
    assert second.sampler_logprob_sl.tolist() == [[0.0, -3.0, -4.0]] and second.old_logprob_sl is None


def test_a_sampler_without_a_number_leaves_through_keep_old():
    batch = make_batch([[0.0, NAN, -2.0], [0.0, -INF, INF]]).with_sampler_as_old()
    assert batch.keep_old_sl.tolist() == [[True, False, True], [True, False, False]]
    assert batch.old_logprob_sl.tolist() == [[0.0, -INF, -2.0], [0.0, -INF, -INF]]


# --- the loop -----------------------------------------------------------------------------------------------


class Engine(PolicySampler):
    """The embedded sampler with kept ids by sample: sample s of the step lists id s % 7 at every token."""

    def collect(self):
        rollout = super().collect()
        rows, length = rollout.ids_sl.shape
        mask = SamplingMask.from_lists([[row % 7] for row in range(rows) for _ in range(length)])
        return dataclasses.replace(rollout, sampling_mask=mask)


class Worker(ToyWorker):
    """Counts its scoring passes."""

    scored = 0

    def logprobs(self, batch):
        self.scored += 1
        return super().logprobs(batch)


class Log:
    def __init__(self):
        self.records = []

    def step(self, step, metrics, updates, notes=(), samples=()):
        self.records.append(metrics)


def run(support, **loss):
    """The toy policy's worker, and what one step of four updates logged."""
    config = toy_config(
        loss=loss,
        sampling={"top_k": 8, "top_p": 0.98, "support": support},
        train={"steps": 1, "microbatch_size": 8, "minibatch_size": 16},
    )
    task = make_task(config.task, None, config.seed)
    worker, log = Worker(config, task.vocab_size), Log()
    engine = Engine(worker, config.sampling.spec(), task.eos_id, config.rollout.max_new_tokens, 16)
    train(config, worker, engine, task, InlineGrader(task), log)
    return worker, log.records[0]


def test_every_update_has_the_kept_ids_of_its_own_samples():
    worker, _ = run("replay")
    assert len(worker.steps) == 4
    for update, batch in enumerate(worker.steps):
        mask, length = batch.sampling_mask, batch.ids_sl.shape[1]
        assert mask.num_rows == 16 * length
        expected = [(16 * update + row) % 7 for row in range(16) for _ in range(length)]
        assert mask.token_ids.tolist() == expected


def test_the_samplers_logprobs_need_no_scoring_pass():
    worker, metrics = run("recompute", old_logprobs="sampler")
    assert worker.scored == 0
    for batch in worker.steps:
        assert torch.equal(batch.old_logprob_sl, batch.sampler_logprob_sl)
    said = {name for name in metrics if name.startswith("mismatch/")}
    assert said == {"mismatch/sampler_out_of_support", "mismatch/sampler_nan"}
    assert metrics["mismatch/sampler_nan"] == 0.0


# --- the fused head -----------------------------------------------------------------------------------------

SPEC = SamplingSpec(temperature=0.7, top_k=9)


def kept_of_tokens(num_tokens, vocab_size):
    """1 to 5 random ids a token."""
    generator = torch.Generator().manual_seed(2)
    lists = [torch.randperm(vocab_size, generator=generator) for _ in range(num_tokens)]
    return [ids[: 1 + index % 5].tolist() for index, ids in enumerate(lists)]


@pytest.mark.parametrize("chunk_tokens", [4, 64])
def test_the_fused_head_replays_chunk_by_chunk(chunk_tokens):
    """Values and gradients in float64."""
    hidden, weight, target_t = make_head(11, 37, 6, padding=3)
    kept = kept_of_tokens(11, 37)
    whole_h, whole_w = hidden.detach().clone().requires_grad_(), weight.detach()[:37].requires_grad_()
    reference = reference_replay(whole_h @ whole_w.t(), target_t, SPEC, kept)
    options = {"entropy": True, "chunk_tokens": chunk_tokens, "replay": SamplingMask.from_lists(kept)}
    vocab = VocabShard(start=0, vocab_size=37)
    ours = linear_vocab_parallel_logprob(hidden, weight, target_t, SPEC, None, vocab, **options)
    assert_same_values(ours, reference, tolerance=1e-9)
    weights = make_weights(11, seed=3)
    for name in DIFFERENTIABLE:
        one = {name: weights[name].double()}
        expected = torch.autograd.grad(weighted_sum(reference, one), (whole_h, whole_w), retain_graph=True)
        grads = torch.autograd.grad(weighted_sum(ours, one), (hidden, weight), retain_graph=True)
        assert_close(grads[0], expected[0], 1e-9, name)
        assert_close(grads[1][:37], expected[1], 1e-9, name)


def test_the_fused_head_audits_chunk_by_chunk():
    hidden, weight, target_t = make_head(11, 37, 6, padding=3)
    distribution = Replayed(SPEC, SamplingMask.from_lists(kept_of_tokens(11, 37)))
    vocab = VocabShard(start=0, vocab_size=37)
    logits = hidden.detach() @ weight.detach()[:37].t()
    expected = audit_supports(logits, target_t, distribution, None, vocab)
    assert 0 < float(expected.jaccard_t.max()) < 1
    ours = linear_audit_supports(hidden, weight, target_t, distribution, None, vocab, chunk_tokens=4)
    for field in dataclasses.fields(AuditReport):
        assert_close(getattr(ours, field.name).double(), getattr(expected, field.name).double(), 1e-9, field)


def test_kept_ids_that_do_not_fit_the_fused_head_are_named():
    hidden, weight, target_t = make_head(11, 37, 6, padding=0)
    for kept, message in (
        (kept_of_tokens(10, 37), "10 rows for 11 tokens"),
        ([*kept_of_tokens(10, 37), [37]], "replay id 37 in row 10 is outside"),
    ):
        with pytest.raises(ValueError, match=message):
            mask = SamplingMask.from_lists(kept)
            linear_vocab_parallel_logprob(hidden, weight, target_t, SPEC, replay=mask)


def test_a_banned_target_that_nothing_reads_has_no_gradient():
    """A masked row's support is its target alone: that this is banned must not reach the weights as NaN."""
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, -INF, 0.0]], requires_grad=True)
    mask = SamplingMask.from_lists([[0, 2], []])
    target_t = torch.tensor([0, 1])
    scores = vocab_parallel_logprob(logits, target_t, SamplingSpec(), replay=mask, validate=False)
    assert scores.unfiltered_logprob_t.isnan().tolist() == [False, True]
    (gradient,) = torch.autograd.grad(scores.logprob_t[:1].sum(), logits)
    share = 1 / (1 + math.exp(-2.0))
    assert gradient[0].tolist() == pytest.approx([share, 0.0, -share], abs=1e-6)
    assert not gradient[1].any()
