"""The op with the LM head fused in: hidden states and head weight in, logits only one chunk of tokens at a
time.

Two forms. `linear_vocab_parallel_logprob` returns what `vocab_parallel_logprob` returns and computes each
chunk's logits again in its backward. `linear_logprob_loss` is for losses that are sums over tokens with
denominators known beforehand: it runs the head's backward inside its forward, so logits are computed once
and never stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, Unpack

import torch
from torch.autograd.function import once_differentiable

from rlcore.collectives import Group
from rlcore.ops.linear_head import HeadGradients, HeadOptions, LinearHead
from rlcore.ops.logprob import TokenLogprobs, VocabShard, check_rows
from rlcore.sampling import RowSampling, SamplingSpec

# The outputs that carry a gradient, in the order of `rows_gradient`.
DIFFERENTIABLE = ("logprob_t", "unfiltered_logprob_t", "log_mass_t", "entropy_t", "unfiltered_entropy_t")

LossOfChunk = Callable[[TokenLogprobs, slice], tuple[torch.Tensor, Any]]


def linear_vocab_parallel_logprob(
    hidden_td: torch.Tensor,
    weight_vd: torch.Tensor,
    target_t: torch.Tensor,
    spec: SamplingSpec | RowSampling,
    tp_group: Group = None,
    vocab: VocabShard | None = None,
    **options: Unpack[HeadOptions],
) -> TokenLogprobs:
    """`vocab_parallel_logprob(hidden_td @ weight_vd.T, ...)` without the logits; options: `HeadOptions`.

    Maths: logits of `chunk_tokens` tokens at a time, the op on each chunk. A row's results depend on its
        logits alone: equal logits give equal bits whatever the chunk (for one backend), so the chunk size
        shows only as far as the matmul's rounding does.
    Shapes: `hidden_td [t, D]`, `weight_vd [v, D]`, this rank's rows of the head; `target_t [T]`. T is t, or
        t x TP with `sequence_parallel`. Results `[T]`.
    Dtypes: hidden and weight of one float dtype, which the logits get too; maths and results as in the op.
        Gradients have their input's dtype; that of a half-precision weight is summed in float32.
    Layout: as the op. Sequence parallel: rank r of the group holds tokens r t to (r + 1) t; target and
        results are those of all tokens, on every rank.
    Collectives: over `tp_group`, for each of the ceil(T / chunk_tokens) chunks those of the op (for T = 0,
        once); backward: one all-reduce of `[t, D]`. With `sequence_parallel` an all-gather of hidden before
        forward and backward, and a reduce-scatter in place of the all-reduce.
    Backward: computes the logits again; differentiable in hidden and weight, once. Saves its inputs and O(T)
        numbers. Incoming gradients must be the same on all ranks of the group, as those of one loss are.
    Mutates: nothing.

    Memory beyond inputs, outputs and their gradients: logits of one chunk, and their gradient in backward.
    Raises `ValueError` for what the op refuses, and for shapes or dtypes that do not fit together.
    Source: ColumnParallelLinear (Shoeybi et al., 2019) for the layout and the reduction.
    """
    head = LinearHead.of(hidden_td, weight_vd, target_t, spec, tp_group, vocab, options)
    outputs = dict(zip(_FIELDS, _LinearLogprob.apply(hidden_td, weight_vd, head), strict=True))
    if not head.entropy:
        outputs |= {"entropy_t": None, "unfiltered_entropy_t": None}
    result = TokenLogprobs(**outputs)
    if head.validate:
        check_rows(result)
    return result


def linear_logprob_loss(
    hidden_td: torch.Tensor,
    weight_vd: torch.Tensor,
    target_t: torch.Tensor,
    spec: SamplingSpec | RowSampling,
    loss_of_chunk: LossOfChunk,
    tp_group: Group = None,
    vocab: VocabShard | None = None,
    **options: Unpack[HeadOptions],
) -> tuple[torch.Tensor, list[Any]]:
    """A loss that is a sum over chunks of tokens, and what `loss_of_chunk` reported; logits exist once.

    `loss_of_chunk(scores, chunk)` gets the `TokenLogprobs` of the tokens `chunk`, a slice of `target_t`, and
    returns its summand of the loss, 0-dim, and any report. It is called once per chunk, in order; for T = 0
    once, with an empty slice. Denominators belong inside, so they must be known beforehand. Gradients flow to
    hidden and weight only: another tensor that `loss_of_chunk` reads gets none.

    Maths: the sum of the summands; same gradients as the two-pass form up to rounding.
    Shapes, Dtypes, Layout: as `linear_vocab_parallel_logprob`; the loss has the summands' dtype. With float16
        the loss scale belongs inside the summands: stored gradients are not scaled yet.
    Collectives: over `tp_group`, for each chunk those of the op, then one all-reduce of `[t, D]` when hidden
        needs a gradient. With `sequence_parallel` one all-gather of hidden before, and a reduce-scatter in
        place of the all-reduce. Backward: none.
    Backward: multiplies the stored gradients by the incoming one, which must be the same on all ranks.
    Mutates: nothing.

    Memory beyond inputs, outputs and their gradients: logits of one chunk and their gradient.
    Raises `ValueError` as the other form, and for a summand that is not one number.
    """
    head = LinearHead.of(hidden_td, weight_vd, target_t, spec, tp_group, vocab, options)
    wants = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden_td, weight_vd)]
    with torch.no_grad():
        whole_td = head.gather(hidden_td)
        gradients = HeadGradients.zeros(whole_td, weight_vd, wants)
        parts = [
            _chunk_loss(head, whole_td, weight_vd, chunk, loss_of_chunk, gradients) for chunk in head.chunks()
        ]
        loss = torch.stack([summand for summand, _ in parts]).sum()
        hidden_grad_td = head.reduce_(gradients.hidden_td)
    if any(wants):
        loss = _StoredGradients.apply(hidden_td, weight_vd, loss, hidden_grad_td, gradients.weight_vd)
    return loss, [report for _, report in parts]


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_td: torch.Tensor, weight_vd: torch.Tensor, head: LinearHead
    ) -> tuple[torch.Tensor, ...]:
        whole_td = head.gather(hidden_td)
        parts = [head.score(head.logits(whole_td, weight_vd, chunk), chunk) for chunk in head.chunks()]
        ctx.save_for_backward(hidden_td, weight_vd)
        # O(T) tensors that no caller can see, so they need no version check.
        ctx.head, ctx.saved = head, [saved for _, saved in parts]
        outputs = {name: _joined([getattr(result, name) for result, _ in parts]) for name in _FIELDS}
        ctx.mark_non_differentiable(outputs["keep_t"], outputs["num_kept_t"])
        ctx.set_materialize_grads(False)
        return tuple(outputs.values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden_td, weight_vd = ctx.saved_tensors
        head: LinearHead = ctx.head
        whole_td = head.gather(hidden_td)
        gradients = HeadGradients.zeros(whole_td, weight_vd, ctx.needs_input_grad)
        by_name = dict(zip(_FIELDS, grads, strict=True))
        for chunk, saved in zip(head.chunks(), ctx.saved, strict=True):
            upstream = [_part(by_name[name], chunk) for name in DIFFERENTIABLE]
            # One expression: no name keeps this chunk's logits alive while the next chunk's are computed.
            gradients.add_(
                chunk,
                head.logits_gradient(head.logits(whole_td, weight_vd, chunk), saved, upstream),
                whole_td,
                head.real_rows(weight_vd),
            )
        weight_grad_vd = gradients.weight_vd
        if weight_grad_vd is not None:
            weight_grad_vd = weight_grad_vd.to(weight_vd.dtype)
        return head.reduce_(gradients.hidden_td), weight_grad_vd, None


def _chunk_loss(
    head: LinearHead,
    whole_td: torch.Tensor,
    weight_vd: torch.Tensor,
    chunk: slice,
    loss_of_chunk: LossOfChunk,
    gradients: HeadGradients,
) -> tuple[torch.Tensor, Any]:
    """The chunk's summand, detached, and its report; its part of the gradients is added to `gradients`."""
    wants_gradient = gradients.hidden_td is not None or gradients.weight_vd is not None
    logits_cv = head.logits(whole_td, weight_vd, chunk)
    result, saved = head.score(logits_cv, chunk)
    if head.validate:
        check_rows(result, first_row=chunk.start)
    # New leaves: the graph of the chunk's loss starts here and ends with this call.
    names = DIFFERENTIABLE if head.entropy else DIFFERENTIABLE[:3]
    leaves = {name: getattr(result, name).detach().requires_grad_(wants_gradient) for name in names}
    with torch.set_grad_enabled(wants_gradient):
        summand, report = loss_of_chunk(replace(result, **leaves), chunk)
    if not isinstance(summand, torch.Tensor) or summand.dim() != 0:
        shape = tuple(summand.shape) if isinstance(summand, torch.Tensor) else type(summand).__name__
        raise ValueError(
            f"loss_of_chunk returned {shape} for tokens {chunk.start} to {chunk.stop}: expected a 0-dim "
            "tensor, the chunk's summand of the loss, and a report. Sum over the chunk's tokens."
        )
    # A summand without a graph is a constant: its part of the gradients is the zeros that are there.
    if wants_gradient and summand.requires_grad:
        upstream = list(torch.autograd.grad(summand, list(leaves.values()), allow_unused=True))
        upstream += [None] * (len(DIFFERENTIABLE) - len(upstream))
        grad_cv = head.logits_gradient(logits_cv, saved, upstream)
        gradients.add_(chunk, grad_cv, whole_td, head.real_rows(weight_vd))
    return summand.detach(), report


class _StoredGradients(torch.autograd.Function):
    """A loss whose gradients are known already."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_td: torch.Tensor,
        weight_vd: torch.Tensor,
        loss: torch.Tensor,
        hidden_grad_td: torch.Tensor | None,
        weight_grad_vd: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_grad_td, weight_grad_vd)
        ctx.dtype = weight_vd.dtype
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *(_scaled(stored, grads[0], ctx.dtype) for stored in ctx.saved_tensors), None, None, None


def _scaled(stored: torch.Tensor | None, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The product in at least float32: a factor rounded to half precision would bias every entry alike."""
    if stored is None:
        return None
    return (stored.to(torch.promote_types(stored.dtype, torch.float32)) * factor).to(dtype)


def _part(grad_t: torch.Tensor | None, chunk: slice) -> torch.Tensor | None:
    return None if grad_t is None else grad_t[chunk]


_FIELDS = tuple(field.name for field in fields(TokenLogprobs))


def _joined(parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """One new tensor of the chunks' parts; empty for a field that was not asked for."""
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors) if tensors else torch.empty(0)
