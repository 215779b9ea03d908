"""Replaying the sampler's kept ids, against searching for them and against a dense mask."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch

from rlcore.collectives import Group, all_reduce_
from rlcore.ops.logprob import vocab_parallel_logprob
from rlcore.sampling import SamplingSpec
from tools.bench.case_op import backward, ours
from tools.bench.checks import Outcome, check_agreement
from tools.bench.floor import plain_logprob
from tools.bench.measure import Method, count_traffic, time_alternately, warm_and_count
from tools.bench.options import BenchOptions
from tools.bench.problem import Problem, make_rows, take_shard, with_spec
from tools.bench.ranks import run_ranks

Row = dict[str, Any]
REPLAY_ROWS = (
    ("replay_k50_p95", "flat", SamplingSpec(top_k=50, top_p=0.95)),
    ("replay_p95_peaked", "peaked", SamplingSpec(top_p=0.95)),
)
# Every support of these rows is smaller.
LISTED = 128


def run_replay(options: BenchOptions) -> list[Row]:
    """`ValueError` where this checkout cannot replay."""
    sampling_mask_class()
    return run_ranks(_replay_rank, options.tp, options.device, options)[0]


def sampling_mask_class() -> Any:
    """`SamplingMask`."""
    try:
        return importlib.import_module("rlcore.sampling_mask").SamplingMask
    except ModuleNotFoundError as error:
        raise ValueError(
            "--case replay needs rlcore/ops/replay.py, which this checkout does not have."
        ) from error


def kept_ids(logits: torch.Tensor, spec: SamplingSpec) -> list[list[int]]:
    """The ids that a sampler keeps in each whole row, at most LISTED of them."""
    value_tk, id_tk = logits.topk(min(spec.effective_top_k or LISTED, logits.shape[1]), dim=1)
    whole_t = value_tk.logsumexp(dim=1) if spec.effective_top_k else logits.logsumexp(dim=1)
    p_tk = (value_tk - whole_t[:, None]).double().exp()
    top_p = spec.effective_top_p or 1.0
    num_kept_t = ((p_tk.cumsum(dim=1) - p_tk) < top_p).sum(dim=1)
    assert spec.effective_top_k or bool((p_tk.sum(dim=1) >= top_p).all()), "a support larger than LISTED"
    return [ids[:count].tolist() for ids, count in zip(id_tk, num_kept_t.tolist(), strict=True)]


def _replay_rank(group: Group, options: BenchOptions) -> list[Row]:
    rows = []
    for name, kind, spec in REPLAY_ROWS:
        whole = make_rows(kind, options.tokens, options.vocab).to(options.dtype).float()
        lists = kept_ids(whole, spec)
        # The sampler drew the target, so it is one of the kept ids.
        target_t = torch.tensor([ids[row % len(ids)] for row, ids in enumerate(lists)])
        shard = take_shard(whole, target_t, group, options.dtype, options.device)
        del whole
        mask = sampling_mask_class().from_lists(lists, device=options.device)
        rows.append({"name": name} | _measure(with_spec(shard, spec, options.backend), mask, lists, options))
    return rows


def _measure(problem: Problem, mask: Any, lists: list[list[int]], options: BenchOptions) -> Row:
    def replay() -> torch.Tensor:
        return vocab_parallel_logprob(
            problem.logits_tv,
            problem.target_t,
            problem.spec,
            problem.tp_group,
            problem.vocab,
            backend=problem.backend,
            replay=mask,  # pyright: ignore[reportCallIssue]
        ).logprob_t

    fast = {
        "ours": Method(forward=replay, backward=partial(backward, problem)),
        "search": ours(problem),
        "floor": Method(forward=partial(plain_logprob, problem), backward=partial(backward, problem)),
    }
    slow = {
        "dense_mask": Method(
            forward=partial(dense_mask_logprob, problem, lists), backward=partial(backward, problem)
        )
    }
    counted = {}
    for name, method in (fast | slow).items():
        run = warm_and_count(method, options.device)
        counted[name] = run.extra_peak_bytes
        outcome = Outcome(name=name, logprob_t=run.result, grad_tv=run.grads[0])
        if name == "ours":
            own = outcome
        elif name != "floor":
            check_agreement(own, outcome, problem)
    times = time_alternately(fast, slow, options.repeats, problem.tp_group, options.device)
    traffic = count_traffic(fast["ours"])
    return {
        "fwd_bwd_s": times["ours"].median,
        "ours_quartiles_s": times["ours"].spread,
        **{f"vs_{name}": times["ours"].median / times[name].median for name in ("search", "floor")},
        "vs_dense_mask": times["dense_mask"].median / times["ours"].median,
        "extra_memory_ratio": counted["ours"] / problem.shard_bytes,
        "dense_mask_extra_memory_ratio": counted["dense_mask"] / problem.shard_bytes,
        "comm_bytes_per_token": traffic.sent_bytes / problem.num_tokens,
        "comm_calls_forward": traffic.forward_calls,
        "comm_calls_backward": traffic.backward_calls,
        "kept_mean": sum(map(len, lists)) / len(lists),
    }


def dense_mask_logprob(problem: Problem, lists: list[list[int]]) -> torch.Tensor:
    """`[t]`: what replay costs as a mask over the vocabulary, filled row by row, with plain autograd."""
    logits_tv, start = problem.logits_tv, problem.vocab.start
    width = logits_tv.shape[1]
    kept_tv = torch.zeros(logits_tv.shape, dtype=torch.bool, device=logits_tv.device)
    for row, ids in enumerate(lists):
        column = torch.tensor(ids, device=logits_tv.device) - start
        kept_tv[row, column[(column >= 0) & (column < width)]] = True
    masked_tv = (logits_tv.float() / problem.spec.effective_temperature).masked_fill(~kept_tv, -torch.inf)
    max_t = all_reduce_(masked_tv.detach().amax(dim=1), "max", problem.tp_group)
    own_t = (masked_tv - max_t[:, None]).exp().sum(dim=1)
    column_t = problem.target_t - start
    here_t = (column_t >= 0) & (column_t < width)
    target_t = masked_tv.gather(1, torch.where(here_t, column_t, 0)[:, None])[:, 0] - max_t
    target_t = torch.where(here_t, target_t, 0.0)
    return _sum_over(target_t, problem.tp_group) - _sum_over(own_t, problem.tp_group).log()


def _sum_over(own_t: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over the ranks; its gradient goes to each rank's own part."""
    return own_t + (all_reduce_(own_t.detach().clone(), "sum", group) - own_t.detach())
