"""Next-token logits of the policy for the embedded sampler, through Megatron's schedule and KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_worker.architecture import Architecture
from megatron_worker.attention import packed_seq_params
from megatron_worker.fused_head import without_head
from megatron_worker.hf_bridge import unwrap
from rlcore.collectives import all_reduce_
from rlcore.config import ParallelConfig
from rlcore.groups import ParallelGroups
from rlcore.layout.context_parallel import ZigZag
from rlcore.layout.packing import PackedLayout


class MegatronDecoder:
    """Implements `rlcore.interfaces.DecodingModel` on one stage of a (possibly wrapped) `GPTModel`.

    Keys and values of seen tokens are cached, so a step costs one token. Sequence and context parallelism
    shard tokens over ranks, which one token cannot be: the decoder then runs the whole sequences at every
    step, padded to a multiple of TP, or packed and cut over CP. Weights are read at each call; after an
    update call `start_decoding` again.
    """

    def __init__(
        self, model: torch.nn.Module, arch: Architecture, parallel: ParallelConfig, groups: ParallelGroups
    ) -> None:
        self.groups = groups
        self.vocab_size = arch.vocab_size
        self.device = next(model.parameters()).device
        self._stage: Any = unwrap(model)
        self._max_positions = arch.max_position_embeddings
        self._num_sequences = 0
        self._max_length = 0
        self._context: StaticInferenceContext | None = None
        self._caches = not parallel.sequence_parallel and groups.cp_size == 1
        self._sp_size = groups.tp_size if parallel.sequence_parallel else 1

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
        with torch.no_grad(), _evaluating(self._stage):
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

        def forward_step(data: Any, stage: Any) -> tuple[torch.Tensor, Any]:
            hidden = self._hidden_states(ids_sl, position_sl)
            return hidden, lambda output, non_loss_data: self._head(output, last)

        return self._forward(forward_step, *ids_sl.shape)

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

        def forward_step(data: Any, stage: Any) -> tuple[torch.Tensor, Any]:
            with without_head(self._stage):
                hidden = self._stage(
                    ids_t[None], position_t[None], None, packed_seq_params=packed_seq_params(layout)
                )
            return hidden, lambda output, non_loss_data: self._output(output)[index_s.clamp(min=0), 0]

        logits_sv = self._forward(forward_step, 1, ids_t.shape[0])
        if logits_sv is None:
            return None
        # One rank holds each row: the sum over all is that row.
        return all_reduce_(torch.where(index_s[:, None] >= 0, logits_sv, 0.0), "sum", self.groups.cp)

    def _forward(self, forward_step: Any, num_rows: int, length: int) -> torch.Tensor | None:
        """What the last stage collected. Stages wait for the one before; the first one starts at once."""
        collected = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(()),
            model=[self._stage],
            num_microbatches=1,
            seq_length=length,
            micro_batch_size=num_rows,
            forward_only=True,
            collect_non_loss_data=True,
        )
        return collected[0] if self.groups.is_last_stage else None

    def _hidden_states(self, ids_sl: torch.Tensor, position_sl: torch.Tensor) -> torch.Tensor:
        """The stage's output before the head, `[L, S, D]`: inference mode gathers the head's vocabulary."""
        with without_head(self._stage):
            return self._stage(
                ids_sl, position_sl, None, inference_context=self._context, runtime_gather_output=True
            )

    def _head(self, hidden: torch.Tensor, last: int) -> torch.Tensor:
        """`[S, v]` logits of one column of `[L, S, D]` hidden states (this rank's share of L with SP)."""
        if self._context is not None:
            hidden = hidden[last : last + 1]
        return self._output(hidden)[0 if self._context is not None else last]

    def _output(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[l, b, v]` logits of hidden states (gathered over TP first under sequence parallelism)."""
        stage = self._stage
        weight = (
            stage.shared_embedding_or_output_weight() if stage.share_embeddings_and_output_weights else None
        )
        return stage.output_layer(hidden, weight=weight)[0]


@contextmanager
def _evaluating(stage: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode while open; modules that were training train again afterwards."""
    training = [module for module in stage.modules() if module.training]
    stage.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
