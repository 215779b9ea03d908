"""A policy small enough to train inside a unit test, behind the loop's real Protocols.

Its logits are a table over (first prompt id, position), whole on every rank; samples are cut over
data-parallel ranks as in a real run. The rest (truncation, masks, loss, sampler) is the project's own code.
"""

from __future__ import annotations

import torch

from rlcore.batch import ScoredTokens, StepResult, TrainBatch
from rlcore.collectives import all_reduce_
from rlcore.config import RunConfig, load_run_config
from rlcore.groups import ParallelGroups
from rlcore.masks import retained_mask
from rlcore.metrics import Mean, reduce_metrics
from rlcore.ops.logprob import TokenLogprobs, vocab_parallel_logprob
from rlcore.ops.loss import clipped_policy_terms


def toy_config(**changes) -> RunConfig:
    """A config the toy policy can run; `changes` replace whole sections or plain keys."""
    values = {
        "model": {
            "num_layers": 1,
            "hidden_size": 8,
            "num_attention_heads": 1,
            "ffn_hidden_size": 8,
            "max_position_embeddings": 16,
        },
        "sampling": {"top_k": 8, "top_p": 0.98},
        "task": {"name": "echo", "args": {"letters": 6, "length": 3}},
        "rollout": {"prompts_per_step": 8, "samples_per_prompt": 8, "max_new_tokens": 4},
        "optimizer": {"lr": 0.1},
        "train": {"steps": 20, "microbatch_size": 8},
    }
    return load_run_config(values | changes)


class ToyWorker:
    """`PolicyWorker` and `DecodingModel` in one."""

    def __init__(self, config: RunConfig, vocab_size: int, groups: ParallelGroups | None = None) -> None:
        self.config = config
        self.groups = groups or ParallelGroups()
        self.vocab_size = vocab_size
        self.device = torch.device("cpu")
        self.spec = config.sampling.spec()
        positions = config.model.max_position_embeddings or 0
        self.table = torch.zeros((vocab_size, positions, vocab_size), requires_grad=True)
        self.optimizer = torch.optim.Adam([self.table], lr=config.optimizer.lr)
        self.steps: list[TrainBatch] = []
        self.saved: list[str] = []

    def start_decoding(self, num_sequences: int, max_length: int) -> None:
        pass

    def next_logits(self, ids_sl: torch.Tensor, num_seen: int) -> torch.Tensor:
        return self.table.detach()[ids_sl[:, 0], ids_sl.shape[1] - 1]

    def _score(self, batch: TrainBatch) -> TokenLogprobs:
        """The op on every predicted token, row by row: `[S * (L - 1)]`."""
        length = batch.ids_sl.shape[1]
        logits_slv = self.table[batch.ids_sl[:, 0], : length - 1]
        return vocab_parallel_logprob(logits_slv.flatten(0, 1), batch.ids_sl[:, 1:].flatten(), self.spec)

    def logprobs(self, batch: TrainBatch) -> ScoredTokens:
        scored = self._score(batch)

        def aligned(value_t: torch.Tensor, first: float) -> torch.Tensor:
            value_sl = value_t.detach().reshape(batch.num_sequences, -1)
            return torch.cat([torch.full_like(value_sl[:, :1], first), value_sl], dim=1)

        return ScoredTokens(
            logprob_sl=aligned(scored.logprob_t, 0.0),
            keep_sl=aligned(scored.keep_t, True),
            log_mass_sl=aligned(scored.log_mass_t, 0.0),
        )

    def reference_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """The reference is the uniform policy that the table starts from."""
        return torch.full(batch.ids_sl.shape, -torch.tensor(float(self.vocab_size)).log().item())

    def train_step(self, batch: TrainBatch) -> StepResult:
        assert batch.old_logprob_sl is not None and batch.keep_old_sl is not None
        self.steps.append(batch)
        scored = self._score(batch)
        sample_mask_sl = batch.sample_mask_s[:, None].expand_as(batch.token_mask_sl)
        retained_sl = retained_mask(batch.token_mask_sl, sample_mask_sl, batch.keep_old_sl)
        denominator = all_reduce_(retained_sl.sum().double(), "sum", self.groups.dp)
        if not bool(denominator > 0):
            return StepResult(metrics={}, stepped=False, reason="no token of the whole step counts")
        terms = clipped_policy_terms(
            scored.logprob_t,
            batch.old_logprob_sl[:, 1:].flatten(),
            batch.advantage_sl[:, 1:].flatten(),
            retained_sl[:, 1:].flatten() & scored.keep_t,
            self.config.loss.ratio_clip_min,
            self.config.loss.ratio_clip_max,
        )
        self.optimizer.zero_grad()
        (terms.loss_t.sum() / denominator).backward()
        assert self.table.grad is not None
        all_reduce_(self.table.grad, "sum", self.groups.dp)
        self.optimizer.step()
        loss = Mean(terms.loss_t.sum(), retained_sl.sum())
        return StepResult(metrics=reduce_metrics({"loss/total": loss}, self.groups.dp), stepped=True)

    def save(self, path: str) -> None:
        self.saved.append(path)
