"""One optimizer step over a batch, ready for a Megatron schedule, whoever calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_worker.schedule import schedule_arguments, shape_of
from rlcore.batch import Microbatch
from rlcore.step_weights import StepWeights


@dataclass(frozen=True, kw_only=True)
class PreparedStep:
    """What `get_forward_backward_func()` needs for one step. The same shapes on every rank of a replica."""

    forward_step: Callable
    """`forward_step_func`: takes the next microbatch, returns the model's output and the loss function. What
    the schedule collects on the last stage are `LossReport`s.
    """
    loss_func: Callable
    """The loss alone, for a forward step of your own: `(model, microbatch, output)`, where `output` is what
    the model made of `input_ids_bl` and `position_ids_bl`: logits `[b, L, v]` on the last stage (hidden
    states with `model.fused_head`).
    """
    microbatches: Sequence[Microbatch]
    """The batch, cut: padded rows or packed ones."""
    weights: StepWeights
    """What each token counts."""
    has_kl_term: bool
    """Is a reference KL part of the loss?"""
    num_chunks: int = 1
    """Chunks of the model on a rank: virtual stages."""

    @property
    def is_empty(self) -> bool:
        """No token of the whole step counts: the optimizer must not step, momentum would move weights. The
        same on every rank.
        """
        counts_kl = self.has_kl_term and bool(self.weights.num_valid > 0)
        return not (counts_kl or bool(self.weights.num_retained > 0))

    def schedule(self) -> dict[str, Any]:
        """Arguments of `get_forward_backward_func()(...)`, by name; `model` and `forward_only` are yours."""
        shape = shape_of(self.microbatches)
        return schedule_arguments(self.forward_step, self.microbatches, shape, self.num_chunks)
