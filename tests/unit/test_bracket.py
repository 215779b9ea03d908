"""The search ends on the same bits whatever led there: a sample of columns or none, other rows or none."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rlcore.ops import bracket
from rlcore.ops.logprob import TokenLogprobs, vocab_parallel_logprob
from rlcore.sampling import SamplingSpec
from tests.oracle import make_logits

# Rows whose supports are far longer than the candidate list, and rows that are lumps of equal values.
KINDS = ("flat", "tied", "random", "banned")
SPECS = (
    SamplingSpec(top_p=0.95),
    SamplingSpec(top_p=0.3, temperature=1.7),
    SamplingSpec(top_k=3000),
    SamplingSpec(top_k=3000, top_p=0.9),
    SamplingSpec(top_k=3000, top_p=0.9, min_p=0.001, ties="all"),
)
# Long enough for a sample of 16 blocks of 64 in 8 of them.
VOCAB = 8 * 16 * 64 + 5
ALWAYS, NEVER = 0, 1 << 60


def _score(logits_tv: torch.Tensor, spec: SamplingSpec) -> TokenLogprobs:
    target_t = torch.arange(logits_tv.shape[0]) * 31 % VOCAB
    return vocab_parallel_logprob(logits_tv, target_t, spec, entropy=True, backend="torch")


def _assert_same_bits(first: TokenLogprobs, second: TokenLogprobs) -> None:
    for field in dataclasses.fields(TokenLogprobs):
        assert torch.equal(getattr(first, field.name), getattr(second, field.name)), field.name


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_of_the_columns_changes_only_where_the_search_looks_first(kind, spec, monkeypatch):
    logits_tv = make_logits(kind, 6, VOCAB, seed=2)
    passes = []
    original = bracket.OpenRows.sample
    monkeypatch.setattr(bracket.OpenRows, "sample", lambda rows: passes.append(1) or original(rows))
    monkeypatch.setattr(bracket, "SAMPLE_FROM_ELEMENTS", NEVER)
    without = _score(logits_tv, spec)
    assert not passes
    monkeypatch.setattr(bracket, "SAMPLE_FROM_ELEMENTS", ALWAYS)
    _assert_same_bits(_score(logits_tv, spec), without)
    assert passes or kind not in ("flat", "tied"), "the sample was never taken"


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(spec, monkeypatch):
    logits_tv = torch.cat([make_logits(kind, 2, VOCAB, seed=i) for i, kind in enumerate(KINDS)])
    together = _score(logits_tv, spec)
    monkeypatch.setattr(bracket, "NUM_LISTED", 16)
    for row in range(logits_tv.shape[0]):
        target_t = torch.tensor([row * 31 % VOCAB])
        alone = vocab_parallel_logprob(
            logits_tv[row : row + 1], target_t, spec, entropy=True, backend="torch"
        )
        for field in dataclasses.fields(TokenLogprobs):
            assert torch.equal(getattr(alone, field.name)[0], getattr(together, field.name)[row]), field.name
