"""What the model or the loss cannot take of a batch, by name, before anything is cut. Each rank judges its
own; the worker raises on all of them together.
"""

from __future__ import annotations

import torch

from megatron_worker.microbatches import check_splits
from rlcore.batch import TrainBatch
from rlcore.collectives import all_gather
from rlcore.config import LossConfig
from rlcore.groups import ParallelGroups
from rlcore.ops.replay import ReplayMode


def check_trains(batch: TrainBatch, loss: LossConfig) -> None:
    """What the loss reads of the old policy and of the reference is there, and says one thing."""
    if loss.actor_denominator == "retained" and batch.keep_old_sl is None:
        raise ValueError(
            "loss.actor_denominator=retained counts keep_old, and the batch has none: score the batch "
            "with logprobs() first, or set loss.actor_denominator=valid."
        )
    if loss.old_logprobs == "recompute" and batch.old_logprob_sl is None:
        raise ValueError(
            f"loss.policy={loss.policy} reads old logprobs, and the batch has none: score the batch with "
            "logprobs() first, or set loss.policy=on_policy and loss.old_logprobs=skip."
        )
    if loss.kl_coef > 0 and batch.reference_logprob_sl is None:
        raise ValueError(
            f"loss.kl_coef={loss.kl_coef} reads reference logprobs, and the batch has none: score the "
            "batch with reference_logprobs() first, or set loss.kl_coef=0."
        )
    if loss.old_logprobs == "skip" or batch.old_logprob_sl is None:
        return
    kept_sl = batch.token_mask_sl & batch.sample_mask_s[:, None]
    if batch.keep_old_sl is not None:
        kept_sl = kept_sl & batch.keep_old_sl
    unscored_sl = kept_sl & torch.isneginf(batch.old_logprob_sl)
    if bool(unscored_sl.any()):
        row, column = unscored_sl.nonzero()[0].tolist()
        raise ValueError(
            f"sample {row} counts position {column}, whose old logprob is -inf: its ratio would be infinite. "
            "Set keep_old_sl to False where old_logprob_sl is -inf."
        )


def check_kept_ids(batch: TrainBatch, support: ReplayMode, vocab_size: int) -> None:
    """The ids that the sampler kept are there for every token that counts, where they are replayed or
    audited.
    """
    if support == "recompute":
        return
    if batch.sampling_mask is None:
        raise ValueError(
            f"sampling.support={support} reads the ids that the sampler kept, and the batch has none: give "
            "TrainBatch.sampling_mask, or set sampling.support=recompute."
        )
    if batch.sampling_mask.offsets.device.type != "cpu":
        raise ValueError(
            f"sampling.support={support}: TrainBatch.sampling_mask.offsets is on "
            f"{batch.sampling_mask.offsets.device}: expected the host, where microbatches choose their rows. "
            "Move it with .cpu()."
        )
    counts_t = (batch.token_mask_sl & batch.sample_mask_s[:, None]).flatten().cpu()
    try:
        batch.sampling_mask.check(counts_t.shape[0], vocab_size, counts_t)
    except ValueError as error:
        raise ValueError(
            f"sampling.support={support}: TrainBatch.sampling_mask does not fit (row s x "
            f"{batch.ids_sl.shape[1]} + j is that of token j of sample s): {error}"
        ) from None


def check_scores(batch: TrainBatch, num_positions: int, vocab_size: int) -> None:
    """What the model cannot take: lengths, masks on what nothing predicts, ids outside the vocabulary."""
    check_splits(batch)
    longest = batch.ids_sl.shape[1]
    if longest > num_positions:
        raise ValueError(
            f"a batch of sequences padded to {longest} tokens, and the model has {num_positions} positions. "
            "Lower rollout.max_new_tokens, use shorter prompts, or raise model.max_position_embeddings."
        )
    wrong_s = (batch.length_s < 1) | (batch.length_s > longest)
    if bool(wrong_s.any()):
        row = int(wrong_s.nonzero()[0])
        raise ValueError(
            f"length_s of sample {row} is {int(batch.length_s[row])}: expected 1 to {longest}, the columns "
            "of ids_sl. Leave out sequences without tokens."
        )
    position_sl = torch.arange(longest, device=batch.ids_sl.device).expand_as(batch.ids_sl)
    unpredicted_sl = (position_sl == 0) | (position_sl >= batch.length_s[:, None])
    unpredicted_sl = unpredicted_sl & batch.token_mask_sl & batch.sample_mask_s[:, None]
    if bool(unpredicted_sl.any()):
        row, column = unpredicted_sl.nonzero()[0].tolist()
        raise ValueError(
            f"token_mask_sl of sample {row} counts position {column} of {int(batch.length_s[row])} "
            "tokens: nothing predicts the first token of a sequence, nor padding, yet every denominator "
            "would count it. Set token_mask_sl to False there, or begin the sequence with a prompt token."
        )
    bad_sl = (batch.ids_sl < 0) | (batch.ids_sl >= vocab_size)
    if bool(bad_sl.any()):
        row, column = bad_sl.nonzero()[0].tolist()
        raise ValueError(
            f"id {int(batch.ids_sl[row, column])} of sample {row} at position {column} is outside the "
            f"model's vocabulary [0, {vocab_size}). Use the tokenizer that belongs to the model."
        )


_SAME_EVERYWHERE = ("ids_sl", "length_s", "token_mask_sl", "sample_mask_s", "keep_old_sl")


def check_same_batch(
    batch: TrainBatch, groups: ParallelGroups, device: torch.device | str, reads_kept_ids: bool = False
) -> None:
    """`ValueError` on every rank of a replica whose ranks (TP x PP x CP) hold different ids, lengths or
    masks: the model would mix them without a sign, such as the embeddings of one rank's ids with another's.

    `reads_kept_ids`: or different kept ids of the sampler, which all then have.

    Collectives: one all-gather of 7 int64 over the replica, 9 with kept ids.
    """
    own, mask = [*batch.ids_sl.shape], batch.sampling_mask
    values = [getattr(batch, name) for name in _SAME_EVERYWHERE]
    if reads_kept_ids:
        assert mask is not None, "check_kept_ids has seen it"
        values += [mask.token_ids, mask.offsets]
    for value in values:
        # Weighed by place, so that a permutation is seen; sums wrap around alike on all ranks.
        own.append(-1 if value is None else (value.reshape(-1).long() * _places(value)).sum())
    stacked = torch.stack([torch.as_tensor(number, device=device) for number in own])
    other = all_gather(stacked, groups.model) != stacked
    if bool(other.any()):
        column = int(other.any(dim=0).nonzero()[0])
        name = ("ids_sl", "ids_sl", *_SAME_EVERYWHERE, "sampling_mask", "sampling_mask")[column]
        raise ValueError(
            f"the ranks of one model replica (TP x PP x CP) were given different {name}. All of them need "
            "the same batch: choose it by the data-parallel rank, not by the global one."
        )


def _places(value: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, value.numel() + 1, device=value.device)
