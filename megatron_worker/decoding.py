"""Next-token logits of the policy for the embedded sampler, through all stages and Megatron's KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.inference.contexts import StaticInferenceContext

from megatron_worker.architecture import Architecture
from megatron_worker.attention import packed_seq_params
from megatron_worker.chunks import Model, chunks_of, unwrap
from megatron_worker.fused_head import without_head
from megatron_worker.schedule import forward_once
from rlcore.collectives import all_reduce_
from rlcore.config import ParallelConfig
from rlcore.groups import ParallelGroups
from rlcore.layout.context_parallel import ZigZag
from rlcore.layout.packing import PackedLayout


class MegatronDecoder:
    """Implements `rlcore.interfaces.DecodingModel` on a rank's chunks of a (possibly wrapped) `GPTModel`.

    Keys and values of seen tokens are cached, so a step costs one token. Sequence and context parallelism
    shard tokens over ranks, which one token cannot be: the decoder then runs the whole sequences at every
    step, padded to a multiple of TP, or packed and cut over CP. Weights are read at each call; after an
    update call `start_decoding` again.
    """

    def __init__(
        self, model: Model, arch: Architecture, parallel: ParallelConfig, groups: ParallelGroups
    ) -> None:
        self.groups = groups
        self.vocab_size = arch.vocab_size
        self._stages: list[Any] = [unwrap(chunk) for chunk in chunks_of(model)]
        self.device = next(self._stages[0].parameters()).device
        self._hidden_size = arch.hidden_size
        self._max_positions = arch.max_position_embeddings
        self._num_sequences = 0
        self._max_length = 0
        self._context: StaticInferenceContext | None = None
        self._caches = not parallel.sequence_parallel and groups.cp_size == 1
        self._sp_size = parallel.sp_size

    def start_decoding(self, num_sequences: int, max_length: int) -> None:
        """Forgets earlier state and makes room for `[num_sequences, max_length]` tokens.

        Raises `ValueError`, on every rank, when the model has fewer positions than that.
        """
        if max_length > self._max_positions:
            raise ValueError(
                f"Prompt and response need {max_length} positions, the model has {self._max_positions}. "
                "Lower rollout.max_new_tokens, use shorter prompts, or raise model.max_position_embeddings."
            )
        self._num_sequences, self._max_length = num_sequences, max_length
        self._context = StaticInferenceContext(num_sequences, max_length) if self._caches else None

    def next_logits(self, ids_sl: torch.Tensor, num_seen: int) -> torch.Tensor | None:
        """Logits `[S, v]` after the last column of `ids_sl [S, L]`; None on every stage but the last.

        `num_seen` columns were in earlier calls. Collective over the model replica, and with expert
        parallelism over all replicas, which may hand in other numbers of rows and columns.
        """
        num_sequences, length = ids_sl.shape
        if num_sequences != self._num_sequences or not 0 <= num_seen < length <= self._max_length:
            raise ValueError(
                f"next_logits got ids {tuple(ids_sl.shape)} of which {num_seen} columns were seen: expected "
                f"{self._num_sequences} rows and fewer seen columns than the length, which is at most "
                f"{self._max_length} (see start_decoding)."
            )
        with torch.no_grad(), _evaluating(self._stages):
            if self.groups.cp_size > 1:
                return self._run_packed(ids_sl)
            if self._context is None:
                return self._run(*self._padded(ids_sl), last=length - 1)
            return self._run_cached(self._context, ids_sl, num_seen)

    def _run_cached(
        self, context: StaticInferenceContext, ids_sl: torch.Tensor, num_seen: int
    ) -> torch.Tensor | None:
        """The unseen columns at once when nothing was seen, else one by one: past the first call the
        attention does not mask, so only a single new token sees exactly what precedes it.
        """
        num_sequences, length = ids_sl.shape
        position_sl = torch.arange(length, device=ids_sl.device).expand(num_sequences, length)
        stops = [length] if num_seen == 0 else range(num_seen + 1, length + 1)
        logits = None
        for stop in stops:
            context.sequence_len_offset = num_seen
            columns = slice(num_seen, stop)
            logits = self._run(ids_sl[:, columns], position_sl[:, columns], last=stop - num_seen - 1)
            num_seen = stop
        return logits

    def _padded(self, ids_sl: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and positions, right-padded to a multiple of TP: padding comes last, so no real token sees
        it.
        """
        ids_sl = torch.nn.functional.pad(ids_sl, (0, -ids_sl.shape[1] % self.groups.tp_size))
        return ids_sl, torch.arange(ids_sl.shape[1], device=ids_sl.device).expand_as(ids_sl)

    def _run(self, ids_sl: torch.Tensor, position_sl: torch.Tensor, last: int) -> torch.Tensor | None:
        """One forward of all stages; the head is applied to column `last` only."""

        def hidden_states(stage: Any) -> torch.Tensor:
            # Inference mode gathers the head's vocabulary, so the head is applied afterwards.
            return stage(
                ids_sl, position_sl, None, inference_context=self._context, runtime_gather_output=True
            )

        hidden = self._forward(hidden_states, *ids_sl.shape)
        return None if hidden is None else self._head(hidden, last)

    def _run_packed(self, ids_sl: torch.Tensor) -> torch.Tensor | None:
        """The last column's logits from whole sequences in one packed row. Collective over CP."""
        num_rows, length = ids_sl.shape
        layout = PackedLayout.of_rows(
            [length] * num_rows, cp_size=self.groups.cp_size, tp_size=self._sp_size, device=ids_sl.device
        )
        zigzag = ZigZag.of_lengths(layout.padded_lengths, layout.cp_size, ids_sl.device)
        ids_t = zigzag.split(layout.pack(ids_sl, 0), self.groups.cp)
        position_t = zigzag.split(layout.position_t, self.groups.cp)
        last_s = layout.cu_seqlens_padded[:-1].long() + length - 1
        # Where each sequence's last token lies in this rank's tokens; -1 where another rank has it.
        index_t = torch.full((layout.num_tokens,), -1, device=ids_sl.device)
        owned_t = zigzag.owned_rt[self.groups.cp_rank]
        index_t[owned_t] = torch.arange(owned_t.shape[0], device=ids_sl.device)
        index_s = index_t[last_s]

        def hidden_states(stage: Any) -> torch.Tensor:
            return stage(ids_t[None], position_t[None], None, packed_seq_params=packed_seq_params(layout))

        hidden = self._forward(hidden_states, 1, ids_t.shape[0])
        if hidden is None:
            return None
        logits_sv = self._output(hidden)[index_s.clamp(min=0), 0]
        # One rank holds each row: the sum over all is that row.
        return all_reduce_(torch.where(index_s[:, None] >= 0, logits_sv, 0.0), "sum", self.groups.cp)

    def _forward(
        self, hidden_states: Callable[[Any], torch.Tensor], num_rows: int, length: int
    ) -> torch.Tensor | None:
        """Hidden states `[l, b, D]` before the head, on the last stage, of `length` tokens a row (with CP:
        of those that are this rank's).
        """

        def run(stage: Any) -> torch.Tensor:
            with without_head(stage):
                return hidden_states(stage)

        shape = (length // self._sp_size, num_rows, self._hidden_size)
        return forward_once(self._stages, run, shape, self.groups)

    def _head(self, hidden: torch.Tensor, last: int) -> torch.Tensor:
        """`[S, v]` logits of one column of `[L, S, D]` hidden states (this rank's share of L with SP)."""
        if self._context is not None:
            hidden = hidden[last : last + 1]
        return self._output(hidden)[0 if self._context is not None else last]

    def _output(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[l, b, v]` logits of hidden states (gathered over TP first under sequence parallelism)."""
        stage = self._stages[-1]
        weight = (
            stage.shared_embedding_or_output_weight() if stage.share_embeddings_and_output_weights else None
        )
        return stage.output_layer(hidden, weight=weight)[0]


@contextmanager
def _evaluating(stages: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Evaluation mode while open; modules that were training train again afterwards."""
    training = [module for stage in stages for module in stage.modules() if module.training]
    for stage in stages:
        stage.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
