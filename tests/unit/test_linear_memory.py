"""What the fused head allocates and multiplies, counted through a dispatch mode."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlcore.ops import passes
from rlcore.ops.linear_logprob import linear_logprob_loss, linear_vocab_parallel_logprob
from rlcore.ops.logprob import vocab_parallel_logprob
from rlcore.ops.reference import reference_logprob
from rlcore.sampling import SamplingSpec
from tests.linear_cases import make_head


class Recorder(TorchDispatchMode):
    """Matmuls by output shape, the largest tensor, and the bytes of new storages alive at once."""

    def __init__(self, *inputs):
        super().__init__()
        self.matmuls: list[tuple[int, ...]] = []
        self.largest = self.live = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in inputs}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.matmuls.append(tuple(out.shape))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.largest, self.live = max(self.largest, size), self.live + size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key, size):
        self._known.discard(key)
        self.live -= size


V, D, CHUNK = 1000, 4, 16
LOGITS_BYTES = CHUNK * V * 4


def record(form, num_tokens):
    """What a forward and backward allocate; bytes that the forward leaves alive."""
    hidden, weight, target_t = make_head(num_tokens, V, D, dtype=torch.float32)
    spec = SamplingSpec(top_k=4, top_p=0.9)
    with Recorder(hidden, weight, target_t) as recorder:
        if form == "two_pass":
            result = linear_vocab_parallel_logprob(hidden, weight, target_t, spec, chunk_tokens=CHUNK)
            kept = recorder.live
            loss = result.unfiltered_logprob_t.sum()
            del result
        elif form == "loss":
            loss, _ = linear_logprob_loss(
                hidden, weight, target_t, spec,
                lambda s, _: (s.unfiltered_logprob_t.sum(), None), chunk_tokens=CHUNK,
            )  # fmt: skip
            kept = recorder.live
        else:
            result = vocab_parallel_logprob(hidden @ weight.t(), target_t, spec)
            kept = recorder.live
            loss = result.unfiltered_logprob_t.sum()
        loss.backward()
    return recorder, kept


@pytest.mark.parametrize("form", ["two_pass", "loss"])
def test_memory_does_not_grow_with_the_number_of_tokens(form, monkeypatch):
    """Largest tensor: a chunk's logits. Alive at once: those, their gradient, and what the passes need."""
    # Of real logits the eager passes' temporaries are a small part: so here too.
    monkeypatch.setattr(passes, "CHUNK_ELEMENTS", 2 * V)
    short, short_kept = record(form, 2 * CHUNK)
    long, long_kept = record(form, 22 * CHUNK)
    assert short.largest == long.largest == LOGITS_BYTES
    assert short.peak < 5 * LOGITS_BYTES
    # Outputs, gradient of hidden and what the backward needs: numbers per token, none of them per id.
    more_tokens = 20 * CHUNK
    assert (long.peak - short.peak) / more_tokens < 120
    assert (long_kept - short_kept) / more_tokens < 120
    # Otherwise the recorder could not see what it is here for.
    plain, plain_kept = record("plain", 22 * CHUNK)
    assert plain.largest == 22 * LOGITS_BYTES and plain.peak > 40 * LOGITS_BYTES
    assert plain_kept > 22 * LOGITS_BYTES


def test_matmuls_are_counted():
    """Per chunk: logits, gradient of hidden, gradient of weight; the logits once more only in two passes."""
    logits, hidden_grad, weight_grad = (CHUNK, V), (CHUNK, D), (V, D)
    assert record("loss", 3 * CHUNK)[0].matmuls == 3 * [logits, hidden_grad, weight_grad]
    assert record("two_pass", 3 * CHUNK)[0].matmuls == 3 * [logits] + 3 * [logits, hidden_grad, weight_grad]


@pytest.mark.parametrize("form", ["two_pass", "loss"])
@pytest.mark.parametrize("wants", [(True, False), (False, True), (False, False)])
def test_nothing_is_computed_for_a_frozen_input(form, wants):
    hidden, weight, target_t = make_head(3 * CHUNK, V, D, dtype=torch.float32)
    hidden.requires_grad_(wants[0]), weight.requires_grad_(wants[1])
    with Recorder() as recorder:
        if form == "loss":
            loss, _ = linear_logprob_loss(
                hidden, weight, target_t, SamplingSpec(), lambda s, _: (s.logprob_t.sum(), None),
                chunk_tokens=CHUNK,
            )  # fmt: skip
        else:
            loss = linear_vocab_parallel_logprob(
                hidden, weight, target_t, SamplingSpec(), chunk_tokens=CHUNK
            ).logprob_t.sum()
        assert loss.requires_grad == any(wants)
        if any(wants):
            loss.backward()
    shapes = set(recorder.matmuls) - {(CHUNK, V)}
    assert shapes == {shape for shape, want in zip(((CHUNK, D), (V, D)), wants, strict=True) if want}
    assert (hidden.grad is not None, weight.grad is not None) == wants


def test_without_grad_mode_the_loss_is_a_number():
    hidden, weight, target_t = make_head(5, 9, 4, dtype=torch.float32)
    with torch.no_grad(), Recorder() as recorder:
        loss, _ = linear_logprob_loss(
            hidden, weight, target_t, SamplingSpec(), lambda s, _: (s.logprob_t.sum(), None), chunk_tokens=2
        )
    assert not loss.requires_grad and len(recorder.matmuls) == 3
    expected = reference_logprob(hidden @ weight.t(), target_t, SamplingSpec()).logprob_t.sum()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
