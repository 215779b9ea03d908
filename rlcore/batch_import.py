"""Batches of other stacks as `TrainBatch`: NeMo-RL-style (token-aligned) and verl-style (response-aligned).

`TrainBatch` is token-aligned: entry j of a row describes the token `ids[j]` itself, whatever the source calls
its columns. Source of the layouts: NeMo-RL's GRPO batches and verl's `DataProto` of an actor update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rlcore.batch import TrainBatch

_NEMO_RL = ("input_ids", "token_mask", "sample_mask", "generation_logprobs", "advantages")
_VERL = ("responses", "response_mask", "attention_mask", "rollout_log_probs", "advantages")


def from_nemo_rl(batch: Mapping[str, Any]) -> TrainBatch:
    """Keys, B sequences of S positions; entry t belongs to token t, so column 0 of every logprob is unused:

    - `input_ids [B, S]` integer, right-padded; `token_mask [B, S]` 1 at response tokens; `sample_mask [B]`,
      or `[B, S]` with equal columns;
    - `input_lengths [B]` integer, optional: prompt + response. Without it a row ends with its last response
      token, or with its last column where it has none;
    - `generation_logprobs [B, S]`, `advantages [B, S]`;
    - `prev_logprobs [B, S]`, optional: -inf means outside the trainer's support (`keep_old` False); absent:
      score the batch first, or train without old logprobs;
    - `reference_policy_logprobs [B, S]`, optional: never truncated.

    Masks are bool, or 0 and 1 in any dtype. Logprobs and advantages outside the token mask may hold anything.
    Mutates: nothing. `ValueError` naming key, shape and row for whatever does not fit.
    """
    _check_keys(batch, _NEMO_RL)
    ids_sl = _ids(batch, "input_ids")
    shape = tuple(ids_sl.shape)
    token_mask_sl = _mask(batch, "token_mask", shape)
    length_s = _lengths(batch, token_mask_sl)
    _check_first_column(token_mask_sl, "token_mask")
    _check_inside(token_mask_sl, length_s, "token_mask", "input_lengths")
    return _train_batch(
        ids_sl,
        length_s,
        token_mask_sl,
        _sample_mask(batch, shape),
        {
            "advantage": _values(batch, "advantages", shape),
            "sampler_logprob": _values(batch, "generation_logprobs", shape),
            "old_logprob": _values(batch, "prev_logprobs", shape),
            "reference_logprob": _values(batch, "reference_policy_logprobs", shape),
        },
    )


def from_verl(batch: Mapping[str, Any]) -> TrainBatch:
    """Keys, B prompts of P positions, left-padded, and B responses of R positions, right-padded:

    - `prompts [B, P]` or `input_ids [B, P + R]` integer; both must agree with `responses [B, R]`;
    - `attention_mask [B, P + R]` 1 at real tokens, in one run per row; `response_mask [B, R]` 1 at tokens
      that train (0 at a tool's tokens in between);
    - `rollout_log_probs [B, R]`, `advantages [B, R]`; entry r belongs to token `responses[r]`;
    - `old_log_probs [B, R]`, optional: -inf means outside the trainer's support (`keep_old` False); absent:
      score the batch first, or train without old logprobs;
    - `ref_log_prob [B, R]`, optional: never truncated.

    The left padding goes: rows start with their first real token. Every sample takes part. Masks and unread
    slots as in `from_nemo_rl`. Mutates: nothing. `ValueError` naming key, shape and row of a misfit.
    """
    _check_keys(batch, _VERL, ("prompts", "input_ids"))
    responses_sr = _ids(batch, "responses")
    shape = tuple(responses_sr.shape)
    ids_sw = _whole_ids(batch, responses_sr)
    real_sw = _mask(batch, "attention_mask", tuple(ids_sw.shape))
    rows = _Rows.of(real_sw, prompt_width=ids_sw.shape[1] - shape[1])
    mask_sr = _mask(batch, "response_mask", shape)
    outside_sr = mask_sr & ~real_sw[:, rows.prompt_width :]
    if bool(outside_sr.any()):
        row, column = outside_sr.nonzero()[0].tolist()
        raise ValueError(
            f"response_mask of row {row} marks response token {column}, which attention_mask says is "
            "padding. One of the two belongs to another batch."
        )
    sources = {
        "advantage": "advantages",
        "sampler_logprob": "rollout_log_probs",
        "old_logprob": "old_log_probs",
        "reference_logprob": "ref_log_prob",
    }
    values = {name: _values(batch, key, shape) for name, key in sources.items()}
    return _train_batch(
        rows.of_sequence(ids_sw),
        rows.length_s,
        rows.of_responses(mask_sr),
        torch.ones_like(rows.length_s, dtype=torch.bool),
        {name: None if value is None else rows.of_responses(value) for name, value in values.items()},
    )


@dataclass(frozen=True)
class _Rows:
    """Where the real tokens of left-padded prompts and right-padded responses stand; w = P + R columns."""

    start_s: torch.Tensor
    length_s: torch.Tensor
    prompt_width: int

    @staticmethod
    def of(real_sw: torch.Tensor, prompt_width: int) -> _Rows:
        """`ValueError` naming the row whose real tokens are not one run that starts in the prompt."""
        length_s = real_sw.sum(dim=1)
        start_s = real_sw.to(torch.int8).argmax(dim=1)
        position_w = torch.arange(real_sw.shape[1], device=real_sw.device)
        run_sw = (position_w >= start_s[:, None]) & (position_w < (start_s + length_s)[:, None])
        problems = (
            (length_s == 0, "has no real token"),
            ((run_sw != real_sw).any(dim=1), "has padding between its real tokens: prompts are left-padded"),
            (start_s >= prompt_width, "has no prompt token, and nothing predicts a first token"),
        )
        for wrong_s, what in problems:
            if bool(wrong_s.any()):
                row = int(wrong_s.nonzero()[0])
                raise ValueError(
                    f"attention_mask of row {row} {what}; responses start at column {prompt_width}."
                )
        return _Rows(start_s, length_s, prompt_width)

    def of_sequence(self, value_sw: torch.Tensor) -> torch.Tensor:
        """`[B, L]`: each row from its first real token on, 0 behind its last."""
        position_l = torch.arange(int(self.length_s.max()), device=value_sw.device)
        index_sl = (self.start_s[:, None] + position_l).clamp(max=value_sw.shape[1] - 1)
        moved_sl = value_sw.gather(1, index_sl)
        return torch.where(position_l < self.length_s[:, None], moved_sl, torch.zeros_like(moved_sl))

    def of_responses(self, value_sr: torch.Tensor) -> torch.Tensor:
        """Response-aligned `[B, R]` as token-aligned `[B, L]`: 0 at the prompt."""
        prompt_sp = value_sr.new_zeros(value_sr.shape[0], self.prompt_width)
        return self.of_sequence(torch.cat([prompt_sp, value_sr], dim=1))


def _train_batch(
    ids_sl: torch.Tensor,
    length_s: torch.Tensor,
    token_mask_sl: torch.Tensor,
    sample_mask_s: torch.Tensor,
    values: dict[str, torch.Tensor | None],
) -> TrainBatch:
    """Values outside the token mask become 0, a -inf old logprob inside it `keep_old` False."""
    masked: dict[str, Any] = {
        f"{name}_sl": torch.where(token_mask_sl, value_sl, 0.0)
        for name, value_sl in values.items()
        if value_sl is not None
    }
    old_sl = masked.get("old_logprob_sl")
    return TrainBatch(
        ids_sl=ids_sl,
        length_s=length_s,
        token_mask_sl=token_mask_sl,
        sample_mask_s=sample_mask_s,
        keep_old_sl=None if old_sl is None else ~torch.isneginf(old_sl),
        **masked,
    )


def _check_keys(batch: Mapping[str, Any], needed: tuple[str, ...], one_of: tuple[str, ...] = ()) -> None:
    """Every key that has no stand-in is there."""
    missing = [name for name in needed if _given(batch, name) is None]
    if one_of and all(_given(batch, name) is None for name in one_of):
        missing.append(" or ".join(one_of))
    if missing:
        wanted = [*needed, *([" or ".join(one_of)] if one_of else [])]
        raise ValueError(
            f"the batch lacks {', '.join(missing)}. Needed: {', '.join(wanted)}; it has "
            f"{', '.join(sorted(batch.keys())) or 'nothing'}."
        )


def _given(batch: Mapping[str, Any], name: str) -> Any:
    """The value of a key; None where there is none. Through `keys()`: a TensorDict iterates over its rows."""
    names = set(batch.keys())
    return batch[name] if name in names else None


def _tensor(batch: Mapping[str, Any], name: str, shape: tuple[int, ...] | None) -> torch.Tensor:
    """A tensor of this shape; None: of two axes."""
    value = batch[name]
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}: expected a tensor.")
    if shape is None and value.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(value.shape)}: expected [sequences, positions].")
    if shape is not None and tuple(value.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}: the ids say it must be {shape}.")
    return value


def _ids(batch: Mapping[str, Any], name: str) -> torch.Tensor:
    """`[B, ...]` int64 ids."""
    value = _tensor(batch, name, None)
    _check_integers(value, name)
    if value.numel() == 0:
        raise ValueError(f"{name} has shape {tuple(value.shape)}: expected at least one of each.")
    return value.long()


def _check_integers(value: torch.Tensor, name: str) -> None:
    if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
        raise ValueError(f"{name} is {value.dtype}: expected integers.")


def _values(batch: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    """float32 values; None where the batch has no such key."""
    if _given(batch, name) is None:
        return None
    value = _tensor(batch, name, shape)
    if not value.dtype.is_floating_point:
        raise ValueError(f"{name} is {value.dtype}: expected floating point.")
    return value.float()


def _mask(batch: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Bool, from bool or from zeros and ones."""
    value = _tensor(batch, name, shape)
    wrong = (value != 0) & (value != 1)
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        where = f"row {place[0]}" + (f", column {place[1]}" if len(place) > 1 else "")
        raise ValueError(f"{name} holds {value[tuple(place)].item()} at {where}: expected 0 or 1.")
    return value == 1


def _sample_mask(batch: Mapping[str, Any], shape: tuple[int, ...]) -> torch.Tensor:
    """`[B]` bool, from one number a row or the same number all along it."""
    value = batch["sample_mask"]
    if not isinstance(value, torch.Tensor) or value.dim() != 2:
        return _mask(batch, "sample_mask", shape[:1])
    mask_sl = _mask(batch, "sample_mask", shape)
    mixed_s = (mask_sl != mask_sl[:, :1]).any(dim=1)
    if bool(mixed_s.any()):
        row = int(mixed_s.nonzero()[0])
        raise ValueError(
            f"sample_mask of row {row} is not the same in every column: a sample takes part or it does not. "
            "Masks of tokens belong into token_mask."
        )
    return mask_sl[:, 0]


def _lengths(batch: Mapping[str, Any], token_mask_sl: torch.Tensor) -> torch.Tensor:
    """`[B]` int64: `input_lengths`, or up to the last response token."""
    num_sequences, width = token_mask_sl.shape
    if _given(batch, "input_lengths") is None:
        after_s = (token_mask_sl * torch.arange(1, width + 1, device=token_mask_sl.device)).amax(dim=1)
        return torch.where(after_s > 0, after_s, width)
    length_s = _tensor(batch, "input_lengths", (num_sequences,))
    _check_integers(length_s, "input_lengths")
    wrong_s = (length_s < 1) | (length_s > width)
    if bool(wrong_s.any()):
        row = int(wrong_s.nonzero()[0])
        raise ValueError(
            f"input_lengths of row {row} is {int(length_s[row])}: expected 1 to {width}, the columns of "
            "input_ids."
        )
    return length_s.long()


def _check_first_column(token_mask_sl: torch.Tensor, name: str) -> None:
    """Nothing predicts a first token, so a mask that marks it belongs to another alignment."""
    first_s = token_mask_sl[:, 0]
    if bool(first_s.any()):
        row = int(first_s.nonzero()[0])
        raise ValueError(
            f"{name} of row {row} marks its first token, which nothing predicts. Entry t must describe token "
            "t: shift a mask of next-token form right by one."
        )


def _check_inside(token_mask_sl: torch.Tensor, length_s: torch.Tensor, name: str, lengths: str) -> None:
    """No response token in the padding."""
    position_l = torch.arange(token_mask_sl.shape[1], device=token_mask_sl.device)
    outside_sl = token_mask_sl & (position_l >= length_s[:, None])
    if bool(outside_sl.any()):
        row, column = outside_sl.nonzero()[0].tolist()
        raise ValueError(
            f"{name} of row {row} marks column {column}, but {lengths} says the row has {int(length_s[row])} "
            "tokens."
        )


def _whole_ids(batch: Mapping[str, Any], responses_sr: torch.Tensor) -> torch.Tensor:
    """`[B, P + R]`: prompts and responses side by side."""
    num_sequences, num_responses = responses_sr.shape
    prompts_sp = None if _given(batch, "prompts") is None else _ids(batch, "prompts")
    if prompts_sp is not None and prompts_sp.shape[0] != num_sequences:
        raise ValueError(
            f"prompts has shape {tuple(prompts_sp.shape)}: responses {tuple(responses_sr.shape)} has "
            f"{num_sequences} rows."
        )
    joined_sw = None if prompts_sp is None else torch.cat([prompts_sp, responses_sr], dim=1)
    if _given(batch, "input_ids") is None:
        assert joined_sw is not None, "one of them was there"
        return joined_sw
    ids_sw = _ids(batch, "input_ids")
    if joined_sw is not None:
        ids_sw = _tensor({"input_ids": ids_sw}, "input_ids", tuple(joined_sw.shape))
    elif ids_sw.shape[0] != num_sequences or ids_sw.shape[1] < num_responses:
        raise ValueError(
            f"input_ids has shape {tuple(ids_sw.shape)}: expected {num_sequences} rows of a prompt and the "
            f"{num_responses} columns of responses."
        )
    tail_sw = responses_sr if joined_sw is None else joined_sw
    different = ids_sw[:, ids_sw.shape[1] - tail_sw.shape[1] :] != tail_sw
    if bool(different.any()):
        row = int(different.nonzero()[0, 0])
        raise ValueError(f"input_ids of row {row} does not end with its prompts and responses.")
    return ids_sw
