"""What an engine returned, and whether it can be trained on: every sample there, every number a logprob of
the token that was really drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlcore.batch import Prompt, Rollout
from rlcore.sampling_mask import SamplingMask


class BadCompletion(ValueError):
    """An engine returned something that cannot be trained on. Drawing again may help."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Responses asked for to one prompt."""

    prompt_ids: Sequence[int]
    num_samples: int
    max_new_tokens: int
    """Longest response: the run's, or what the prompt leaves of the model's positions."""
    seed: int
    """In [0, 2^62): sample i draws with `seed` + i."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Of `SamplingParams`, by name: what this request changes of the run's own."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One response."""

    ids: Sequence[int]
    """Response ids, the end-of-text id of a response that ended included."""
    logprobs: Sequence[float]
    """Processed logprob of each of them."""
    finished: bool
    """The response ended by itself, not at the length limit."""
    kept: Sequence[Sequence[int]] | None = None
    """Ids that the sampler kept at each of them; None where nobody asked."""


def sampled_logprobs(ids: Sequence[int], logprobs_of: Sequence[Mapping[int, float]]) -> list[float]:
    """Each sampled id's own entry of the engine's per-position maps, which hold other candidates too and in
    another order.

    `BadCompletion` naming the position for a missing map or entry. Source: vLLM's
    `CompletionOutput.logprobs`.
    """
    if len(logprobs_of) != len(ids):
        raise BadCompletion(
            f"the engine returned logprobs for {len(logprobs_of)} positions of {len(ids)} sampled ids."
        )
    for position, (token, entries) in enumerate(zip(ids, logprobs_of, strict=True)):
        if token not in entries:
            raise BadCompletion(
                f"position {position}: no logprob of the sampled id {token}, only of {sorted(entries)[:8]}."
            )
    return [float(entries[token]) for token, entries in zip(ids, logprobs_of, strict=True)]


def kept_candidates(logprobs_of: Sequence[Mapping[int, float]], num_asked: int | None) -> list[list[int]]:
    """The kept ids of each position: candidates with a finite processed logprob.

    `num_asked`: candidates that the engine was asked for. Where all of them are finite there may be more, and
    the mask is not known: `BadCompletion`. None: every id was asked for.
    """
    kept = []
    for position, entries in enumerate(logprobs_of):
        finite = [token for token, logprob in entries.items() if logprob > -math.inf]
        if num_asked is not None and len(finite) >= num_asked:
            raise BadCompletion(
                f"position {position}: all {num_asked} candidates were kept, so the sampler may have kept "
                "more: ids tied at its cut. Set sampling.support=recompute, or lower sampling.top_k."
            )
        kept.append(finite)
    return kept


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the responses of a run look like."""

    vocab_size: int
    eos_id: int
    max_new_tokens: int
    max_length: int
    """Longest prompt + response that the engine takes."""
    kept: bool
    """Do they list the ids that the sampler kept?"""

    def request(self, prompt: Prompt, num_samples: int, seed: int) -> Request:
        """What the engine is asked for about one prompt."""
        room = self.max_length - len(prompt.ids)
        return Request(
            prompt_ids=prompt.ids,
            num_samples=num_samples,
            max_new_tokens=min(self.max_new_tokens, room),
            seed=seed,
        )


def check_completions(
    requests: Sequence[Request], completions: Sequence[Sequence[Completion]], expected: Expected
) -> None:
    """`BadCompletion` naming prompt, sample and position of the first thing that cannot be trained on."""
    if len(completions) != len(requests):
        raise BadCompletion(f"the engine answered {len(completions)} of {len(requests)} prompts.")
    for row, (request, samples) in enumerate(zip(requests, completions, strict=True)):
        if len(samples) != request.num_samples:
            raise BadCompletion(
                f"prompt {row}: the engine returned {len(samples)} of {request.num_samples} samples."
            )
        for index, sample in enumerate(samples):
            problem = _problem(sample, request.max_new_tokens, expected)
            if problem is not None:
                raise BadCompletion(f"prompt {row}, sample {index}: {problem}")


def _problem(sample: Completion, max_new_tokens: int, expected: Expected) -> str | None:
    """What is wrong with one response, or None."""
    length = len(sample.ids)
    if not 1 <= length <= max_new_tokens:
        return f"{length} tokens, expected 1 to {max_new_tokens}."
    if len(sample.logprobs) != length:
        return f"{len(sample.logprobs)} logprobs for {length} tokens."
    for position, (token, logprob) in enumerate(zip(sample.ids, sample.logprobs, strict=True)):
        if not 0 <= token < expected.vocab_size:
            return f"position {position}: id {token} outside the vocabulary [0, {expected.vocab_size})."
        # NaN compares False. A sampled token was in the sampler's support; rounding may lift it above 0.
        if not -math.inf < logprob <= _MOST_LOGPROB:
            return f"position {position}: logprob {logprob} of the sampled id {token}."
    if sample.finished != (sample.ids[-1] == expected.eos_id):
        said = "ended by itself" if sample.finished else "was cut off"
        return f"the engine says that it {said}, and its last id is {sample.ids[-1]}."
    if not sample.finished and length < max_new_tokens:
        return f"cut off after {length} of {max_new_tokens} tokens."
    if expected.kept:
        return _kept_problem(sample, expected.vocab_size)
    return None


# Largest logprob that float32 rounding makes of 0.
_MOST_LOGPROB = 1e-3


def _kept_problem(sample: Completion, vocab_size: int) -> str | None:
    if sample.kept is None or len(sample.kept) != len(sample.ids):
        return f"kept ids of {0 if sample.kept is None else len(sample.kept)} of {len(sample.ids)} positions."
    for position, (token, kept) in enumerate(zip(sample.ids, sample.kept, strict=True)):
        if token not in kept:
            return f"position {position}: the sampled id {token} is not among the kept ids."
        if not all(0 <= id_ < vocab_size for id_ in kept):
            return f"position {position}: a kept id outside the vocabulary [0, {vocab_size})."
    return None


def join_rollout(
    prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], version: int, kept: bool
) -> Rollout:
    """The rollout of checked completions: one row a sample, in the order of the prompts."""
    rows = [
        (prompt, sample) for prompt, samples in zip(prompts, completions, strict=True) for sample in samples
    ]
    length_s = torch.tensor([len(prompt.ids) + len(sample.ids) for prompt, sample in rows])
    shape = (len(rows), int(length_s.max()))
    ids_sl, logprob_sl = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    kept_of: list[Sequence[int]] = []
    for row, (prompt, sample) in enumerate(rows):
        start, stop = len(prompt.ids), len(prompt.ids) + len(sample.ids)
        ids_sl[row, :stop] = torch.tensor([*prompt.ids, *sample.ids])
        logprob_sl[row, start:stop] = torch.tensor(sample.logprobs)
        if kept:
            assert sample.kept is not None, "check_completions comes first"
            kept_of += [*([()] * start), *sample.kept, *([()] * (shape[1] - stop))]
    return Rollout(
        ids_sl=ids_sl,
        prompt_length_s=torch.tensor([len(prompt.ids) for prompt, _ in rows]),
        length_s=length_s,
        sampler_logprob_sl=logprob_sl,
        finished_s=torch.tensor([sample.finished for _, sample in rows]),
        group_id_s=torch.tensor([prompt.group_id for prompt, _ in rows]),
        version_s=torch.full_like(length_s, version),
        sampling_mask=SamplingMask.from_lists(kept_of) if kept else None,
    )
