"""The embedded rollout engine: draws responses from the policy under training, with the trainer's own
truncation code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlcore.batch import Prompt, Rollout
from rlcore.collectives import all_reduce_, broadcast_, raise_together
from rlcore.interfaces import DecodingModel
from rlcore.ops.draw import draw_tokens
from rlcore.ops.logprob import VocabShard
from rlcore.ops.penalties import PenaltyTokens
from rlcore.sampling import SamplingSpec


class PolicySampler:
    """`RolloutEngine` over a `DecodingModel`.

    Prompts of different lengths run together: rows are aligned at the start, and a row whose prompt is still
        going takes its next prompt token instead of a drawn one.
    """

    def __init__(
        self, decoder: DecodingModel, spec: SamplingSpec, eos_id: int, max_new_tokens: int, max_length: int
    ) -> None:
        """`max_length`: longest prompt + response the model has positions for."""
        if not 0 <= eos_id < decoder.vocab_size:
            raise ValueError(
                f"the task ends responses with id {eos_id}, and the model's vocabulary is [0, "
                f"{decoder.vocab_size}): no "
                "response could ever end. Use the tokenizer that belongs to the model."
            )
        if not 1 <= max_new_tokens < max_length:
            raise ValueError(
                f"rollout.max_new_tokens={max_new_tokens}, and the model has {max_length} positions: "
                "expected at least "
                "1, and room for a prompt token. Lower it, or raise model.max_position_embeddings."
            )
        self.decoder, self.spec, self.eos_id = decoder, spec, eos_id
        self.max_new_tokens, self.max_length = max_new_tokens, max_length
        self._version = 0
        self._asked: tuple[Sequence[Prompt], int, int] | None = None

    def update_weights(self, version: int) -> None:
        """Only notes the version: the policy under training is what draws."""
        self._version = version

    def begin(self, prompts: Sequence[Prompt], samples_per_prompt: int, seed: int) -> None:
        """Notes what is asked for; `collect` draws it."""
        self._asked = (prompts, samples_per_prompt, seed)

    def collect(self) -> Rollout:
        """`generate` of what `begin` asked for."""
        assert self._asked is not None, "collect() without begin()"
        asked, self._asked = self._asked, None
        return self.generate(*asked)

    def generate(self, prompts: Sequence[Prompt], samples_per_prompt: int, seed: int) -> Rollout:
        """`samples_per_prompt` responses to each prompt, next to each other. Collective over the whole run.

        With expert parallelism every replica draws as many positions as the one that needs most.

        A response that ends keeps its end-of-text token as its last response token. Raises `ValueError` on
        every rank for an empty prompt, a prompt that leaves no room for a response, and logits that are NaN.
        """
        groups = self.decoder.groups
        error = self._prompt_error(prompts)
        raise_together(error, groups.world, self._device())
        rows = [prompt for prompt in prompts for _ in range(samples_per_prompt)]
        prompt_length_s = torch.tensor([len(prompt.ids) for prompt in rows], device=self._device())
        limit_s = (prompt_length_s + self.max_new_tokens).clamp(max=self.max_length)
        ids_sl = torch.zeros((len(rows), int(limit_s.max())), dtype=torch.int64, device=self._device())
        for row, prompt in enumerate(rows):
            ids_sl[row, : len(prompt.ids)] = torch.tensor(list(prompt.ids))
        logprob_sl, length_s, finished_s, broken_s = self._decode(ids_sl, prompt_length_s, limit_s, seed)
        # Every rank waits here for every replica: a replica with broken logits must not leave the others
        # behind.
        raise_together(_broken_error(broken_s, rows), groups.world, self._device())
        longest = int(length_s.max())
        return Rollout(
            ids_sl=ids_sl[:, :longest],
            prompt_length_s=prompt_length_s,
            length_s=length_s,
            sampler_logprob_sl=logprob_sl[:, :longest],
            finished_s=finished_s,
            group_id_s=torch.tensor([prompt.group_id for prompt in rows], device=self._device()),
            version_s=torch.full_like(length_s, self._version),
        )

    @torch.no_grad()
    def _decode(
        self, ids_sl: torch.Tensor, prompt_length_s: torch.Tensor, limit_s: torch.Tensor, seed: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Fills `ids_sl` in place; returns logprobs `[S, L]`, lengths, finished and broken flags `[S]`."""
        groups = self.decoder.groups
        num_rows, max_length = ids_sl.shape
        generator = torch.Generator(device=ids_sl.device).manual_seed(
            (seed * 1000003 + groups.tp_rank) % 2**63
        )
        logprob_sl = torch.zeros((num_rows, max_length), dtype=torch.float32, device=ids_sl.device)
        finished_s = torch.zeros(num_rows, dtype=torch.bool, device=ids_sl.device)
        broken_s = torch.zeros_like(finished_s)
        length_s = limit_s.clone()
        self.decoder.start_decoding(num_rows, max_length)
        num_seen = 0
        for position in range(int(prompt_length_s.min()), max_length):
            next_s, drawn_logprob_s = self._draw(ids_sl[:, :position], prompt_length_s, num_seen, generator)
            num_seen = position
            draws_s = (position >= prompt_length_s) & (position < limit_s) & ~finished_s
            broken_s |= draws_s & torch.isnan(drawn_logprob_s)
            ids_sl[:, position] = torch.where(draws_s, next_s, ids_sl[:, position])
            logprob_sl[:, position] = torch.where(draws_s, drawn_logprob_s, 0.0)
            ends_s = draws_s & (next_s == self.eos_id)
            length_s = torch.where(ends_s, position + 1, length_s)
            finished_s |= ends_s
            is_done = bool((finished_s | (position + 1 >= limit_s)).all())
            if self._all_done(is_done):
                return logprob_sl, length_s, finished_s, broken_s
            if is_done:
                break
        self._keep_others_company(ids_sl)
        return logprob_sl, length_s, finished_s, broken_s

    def _all_done(self, is_done: bool) -> bool:
        """Has this replica no more tokens to draw, nor any that shares experts with it? With expert
        parallelism one all-reduce of a number over data x context parallel, which the expert groups
        may straddle; none without.
        """
        groups = self.decoder.groups
        if groups.ep_size == 1:
            return is_done
        flag = torch.tensor([int(is_done)], dtype=torch.int32, device=self._device())
        return bool(all_reduce_(flag, "min", groups.dp_cp)[0])

    def _keep_others_company(self, ids_sl: torch.Tensor) -> None:
        """Runs the model, with one column and for nothing, until every replica is done: the others' tokens
        need the experts that this one holds.
        """
        is_over = False
        while not is_over:
            self.decoder.next_logits(ids_sl[:, :1], 0)
            is_over = self._all_done(True)

    def _draw(
        self,
        ids_sl: torch.Tensor,
        prompt_length_s: torch.Tensor,
        num_seen: int,
        generator: torch.Generator,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Next id and its logprob per row, on every stage. Collective over the model replica."""
        groups = self.decoder.groups
        logits_sv = self.decoder.next_logits(ids_sl, num_seen)
        drawn_s2 = torch.zeros((ids_sl.shape[0], 2), dtype=torch.float64, device=ids_sl.device)
        if logits_sv is not None:
            vocab = VocabShard.even(logits_sv.shape[1] * groups.tp_size, self.decoder.vocab_size, groups.tp)
            penalties = last_position(ids_sl, prompt_length_s) if self.spec.penalises else None
            next_s, logprob_s = draw_tokens(logits_sv, self.spec, groups.tp, vocab, generator, penalties)
            drawn_s2 = torch.stack([next_s.double(), logprob_s.double()], dim=1)
        # The earlier stages wait for the last one, which has the logits.
        broadcast_(drawn_s2, groups.pp_size - 1, groups.pp)
        return drawn_s2[:, 0].long(), drawn_s2[:, 1].float()

    def _device(self) -> torch.device:
        return self.decoder.device

    def _prompt_error(self, prompts: Sequence[Prompt]) -> ValueError | None:
        if not prompts:
            return ValueError("no prompts to generate from: set rollout.prompts_per_step to at least 1.")
        for prompt in prompts:
            if not prompt.ids:
                return ValueError(
                    f"prompt {prompt.group_id} is empty: every prompt needs at least one token."
                )
            outside = [token for token in prompt.ids if not 0 <= token < self.decoder.vocab_size]
            if outside:
                return ValueError(
                    f"prompt {prompt.group_id} has id {outside[0]}, outside the model's vocabulary "
                    f"[0, {self.decoder.vocab_size}). Use the tokenizer that belongs to the model."
                )
            if len(prompt.ids) >= self.max_length:
                return ValueError(
                    f"prompt {prompt.group_id} has {len(prompt.ids)} tokens, and the model has "
                    f"{self.max_length} "
                    "positions: no room for a response. Shorten the prompt or raise "
                    "model.max_position_embeddings."
                )
        return None


def last_position(ids_sl: torch.Tensor, prompt_length_s: torch.Tensor) -> PenaltyTokens:
    """What penalties count for the token after the last column of `ids_sl [S, L]`: one row a sequence.

    A row whose prompt is still going counts its prompt so far; nothing is drawn for it.
    """
    num_rows, length = ids_sl.shape
    length_s = torch.full_like(prompt_length_s, length)
    tokens = PenaltyTokens.of(ids_sl, prompt_length_s.clamp(max=length), length_s)
    return tokens.rows(torch.arange(1, num_rows + 1) * length - 1)


def _broken_error(broken_s: torch.Tensor, rows: Sequence[Prompt]) -> ValueError | None:
    """The error for rows whose logits were NaN, +inf or all -inf."""
    if not bool(broken_s.any()):
        return None
    row = int(broken_s.nonzero()[0])
    return ValueError(
        f"the policy's logits are NaN, +inf or all -inf while sampling sample {row} (prompt "
        f"{rows[row].group_id}; "
        f"{int(broken_s.sum())} of {len(rows)} samples): the weights are broken. Lower optimizer.lr, or "
        "restart from an "
        "earlier checkpoint."
    )
