"""The benchmark: baselines and floor are right, checks catch a wrong method, counters count."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlcore.collectives import all_gather, all_reduce_
from rlcore.ops.reference import reference_logprob
from rlcore.sampling import SamplingSpec
from tests.rank_pool import run_ranks
from tools.bench import case_packing, case_train_step, run
from tools.bench.baselines import filter_rows, gather_sort, resharding_sort
from tools.bench.case_loss import loss_rank
from tools.bench.case_op import ours
from tools.bench.case_replay import kept_ids
from tools.bench.case_transport import transport_rank
from tools.bench.checks import Outcome, check_agreement, check_all, check_floor, outcome_of
from tools.bench.exchange import Exchange
from tools.bench.floor import plain_logprob
from tools.bench.measure import Method, count_memory, count_traffic, peak_beyond, time_alternately
from tools.bench.options import BenchOptions
from tools.bench.problem import draw_targets, make_rows, take_shard, with_spec
from tools.bench.ranks import CheckFailed
from tools.bench.ranks import run_ranks as run_bench_ranks

ROOT = Path(__file__).resolve().parents[2]

# Candidates, nucleus with a long tail, threshold from topk, nothing truncated; a temperature.
SPECS = (
    SamplingSpec(top_k=5, top_p=0.8),
    SamplingSpec(top_p=0.95, temperature=0.7),
    SamplingSpec(top_k=7, temperature=1.5),
    SamplingSpec(),
)


def make_problem(kind="flat", spec=SPECS[0], group=None, num_tokens=70, vocab_size=301):
    # 70 tokens are a chunk of 64 and a rest; 301 ids divide over no number of ranks.
    whole = make_rows(kind, num_tokens, vocab_size)
    shard = take_shard(whole, draw_targets(whole), group, torch.float32, "cpu")
    return with_spec(shard, spec, "torch")


def reference_outcome(problem, whole):
    """The float64 reference on whole rows, as this rank sees it."""
    x = whole.double().requires_grad_()
    result = reference_logprob(x, problem.target_t, problem.spec)
    total = torch.where(result.keep_t, result.logprob_t, 0.0) @ problem.upstream_t.double()
    (grad,) = torch.autograd.grad(total, x)
    start = problem.vocab.start
    grad = grad[:, start : start + problem.logits_tv.shape[1]]
    return Outcome(name="reference", logprob_t=result.logprob_t.detach().float(), grad_tv=grad.float())


def _baselines_against_the_reference(rank, world_size):
    group = dist.group.WORLD if world_size > 1 else None
    sent = {}
    for kind in ("flat", "peaked"):
        whole = make_rows(kind, 70, 301)
        for spec in SPECS:
            problem = make_problem(kind, spec, group)
            expected = reference_outcome(problem, whole)
            for method in (resharding_sort, gather_sort):
                exchange = Exchange(301, group)
                outcome = outcome_of(method.__name__, problem, method(problem, exchange))
                # Not through our own checks: plain distances, infinities in the same places.
                torch.testing.assert_close(outcome.logprob_t, expected.logprob_t, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(outcome.grad_tv, expected.grad_tv, rtol=1e-4, atol=1e-6)
                sent[method.__name__] = exchange.sent_bytes
        floor = outcome_of("floor", problem, plain_logprob(problem))
        torch.testing.assert_close(floor.logprob_t, expected.logprob_t, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(floor.grad_tv, expected.grad_tv, rtol=1e-4, atol=1e-6)
    return sent


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_baselines_and_floor_equal_the_reference(world_size):
    """Uneven shards and a last chunk that is not full; the bytes by hand for two ranks."""
    sent = run_ranks(_baselines_against_the_reference, world_size)[0]
    if world_size == 1:
        assert sent == {"resharding_sort": 0, "gather_sort": 0}
    if world_size == 2:
        # Twice 70 x 150 logits, gradients of 32 + 3 own tokens x 301, and their logprobs. The gather pads 150
        # columns to 151.
        assert sent["resharding_sort"] == 4 * (2 * 70 * 150 + 35 * 301 + 35)
        assert sent["gather_sort"] == 4 * 70 * 151


def test_a_sorted_filter_cuts_ties_and_a_threshold_keeps_them():
    row = torch.tensor([[3.0, 1, 2, 2, 2, 0]])
    assert int((filter_rows(row, SamplingSpec(top_k=2, top_p=0.99)) > -torch.inf).sum()) == 2
    assert int((filter_rows(row, SamplingSpec(top_k=2)) > -torch.inf).sum()) == 4
    assert (filter_rows(row, SamplingSpec(top_p=1e-6)) > -torch.inf).tolist() == [[True] + [False] * 5]


# --- rows ---------------------------------------------------------------------------------------------------


def test_rows_are_what_they_are_called():
    peaked = make_rows("peaked", 40, 4000).softmax(dim=1).sort(dim=1, descending=True).values
    assert ((peaked[:, :8].sum(dim=1) - 0.97).abs() < 1e-3).all()
    flat = make_rows("flat", 10, 4000).softmax(dim=1).sort(dim=1, descending=True).values
    kept = (flat.cumsum(dim=1) < 0.95).sum(dim=1)
    assert kept.min() > 1000 and kept.max() < 1900
    targets = draw_targets(make_rows("flat", 400, 4000))
    assert torch.equal(targets, draw_targets(make_rows("flat", 400, 4000)))
    assert len(targets.unique()) > 300


# --- checks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_methods_that_agree_pass_the_checks(spec):
    problem = make_problem(spec=spec)
    check_all(problem, [outcome_of("sort", problem, resharding_sort(problem, Exchange(301, None)))])
    if spec.temperature == 1.0:
        check_floor(outcome_of("floor", problem, plain_logprob(problem)), problem)


def _faults():
    """Each turns a right outcome into a wrong one, in ways a benchmark must not report over."""

    def shifted(logprob_t, grad_tv):
        return logprob_t + 1e-3, grad_tv

    def one_entry(logprob_t, grad_tv):
        row, column = (grad_tv != 0).nonzero()[5]
        grad_tv[row, column] += 1e-3
        return logprob_t, grad_tv

    def dropped_target(logprob_t, grad_tv):
        row = int(logprob_t.argmax())  # not the last id of its support
        logprob_t[row], grad_tv[row] = -torch.inf, 0.0
        return logprob_t, grad_tv

    def scaled(logprob_t, grad_tv):
        return logprob_t, grad_tv * 1.01

    def leaks(logprob_t, grad_tv):
        return logprob_t, grad_tv + 1e-4 / grad_tv.shape[1]

    return [shifted, one_entry, dropped_target, scaled, leaks]


@pytest.mark.parametrize("fault", _faults(), ids=lambda fault: fault.__name__)
def test_a_wrong_method_fails_the_checks(fault):
    problem = make_problem()
    right = outcome_of("right", problem, resharding_sort(problem, Exchange(301, None)))
    check_agreement(right, replace(right), problem)
    logprob_t, grad_tv = fault(right.logprob_t.clone(), right.grad_tv.clone())
    with pytest.raises(CheckFailed, match="wrong"):
        check_agreement(Outcome(name="wrong", logprob_t=logprob_t, grad_tv=grad_tv), right, problem)


def test_bfloat16_ties_at_the_cut_are_no_difference():
    """Whole groups tie at the cut of a flat bfloat16 row: a sort keeps some of them, ours shares."""
    problem = make_problem(spec=SamplingSpec(top_p=0.9), vocab_size=3000)
    low = replace(problem, logits_tv=problem.logits_tv.detach().bfloat16().requires_grad_())
    check_all(low, [outcome_of("sort", low, resharding_sort(low, Exchange(3000, None)))])


# --- counters -----------------------------------------------------------------------------------------------


def test_peak_by_hand():
    """A temporary of 100 bytes beside 10 saved ones, then a result of 50 beside 20."""
    events = [(1, 10), (2, 100), (2, -100), (9, -7), (3, 50), (4, 20), (4, -20), (1, -10)]
    assert peak_beyond(events, [50]) == 110
    assert peak_beyond(events[4:], [50]) == 20
    assert peak_beyond([(1, 8), (1, -8), (1, 8)], [8]) == 8
    with pytest.raises(RuntimeError, match="64 bytes"):
        peak_beyond(events, [64])


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_memory_of_eager_and_compiled_code_is_counted(compiled):
    """Two temporaries of a megabyte at once; a compiled function's own buffer is seen too."""
    x = torch.randn(512, 512, requires_grad=True)

    def twice(x):
        # Sorting stops fusion, so that compiled code needs a buffer between the two.
        return (x.exp().sort(dim=1).values * 2).sum()

    function = torch.compile(twice) if compiled else twice
    method = Method(forward=lambda: function(x.detach()), backward=lambda _: (torch.zeros_like(x),))
    method.forward()
    megabytes = count_memory(method, "cpu").extra_peak_bytes / x.numel() / 4
    # exp, the sorted values, and int64 positions (2): eager also makes a product; the zeros are the result.
    assert 3 <= megabytes <= 5


def _traffic(rank, world_size):
    x = torch.zeros(10)
    method = Method(
        forward=lambda: all_gather(x, dist.group.WORLD).sum(),
        backward=lambda _: (all_reduce_(torch.zeros(3), "sum", dist.group.WORLD),),
    )
    traffic = count_traffic(method)
    op = count_traffic(ours(make_problem(spec=SPECS[0], group=dist.group.WORLD)))
    slept = {
        "a": Method(forward=lambda: x, backward=lambda _: ()),
        "b": Method(forward=lambda: x.clone(), backward=lambda _: ()),
    }
    times = time_alternately(slept, {"s": slept["a"]}, 2, dist.group.WORLD, "cpu")
    return traffic, op, {name: len(value.total) for name, value in times.items()}, times["a"].total


@pytest.mark.distributed
def test_traffic_and_times_of_two_ranks():
    """40 bytes gathered and 12 reduced by hand; the op's 7 + 5 numbers a token; the same times everywhere."""
    results = run_ranks(_traffic, 2)
    traffic, op, runs, times = results[0]
    assert (traffic.sent_bytes, traffic.received_bytes) == (52, 52)
    assert (traffic.forward_calls, traffic.backward_calls) == (1, 1)
    assert op.sent_bytes == 70 * 4 * 12 and (op.forward_calls, op.backward_calls) == (1, 0)
    assert runs == {"a": 6, "b": 6, "s": 2}
    assert times == results[1][3] and statistics.median(times) > 0


# --- ranks and the command ----------------------------------------------------------------------------------


def _fails_on_one_rank(group, kind):
    if group.rank() == 1:
        raise kind("row 3 differs")
    all_reduce_(torch.zeros(1), "sum", group)


@pytest.mark.distributed
def test_a_failed_rank_ends_the_others_and_keeps_its_kind():
    with pytest.raises(CheckFailed, match="row 3 differs"):
        run_bench_ranks(_fails_on_one_rank, 2, "cpu", CheckFailed)


def bench(*words):
    command = [sys.executable, "-m", "rlcore.cli", "bench", *words, "--no-results"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.distributed
def test_the_command_end_to_end(tmp_path):
    """Its own two ranks, all four rows, every number of the JSON contract."""
    file = tmp_path / "op.json"
    done = bench(
        "--tokens", "12", "--vocab", "1001", "--repeats", "1", "--backend", "torch", "--json", str(file)
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    assert [row["name"] for row in written["rows"]] == ["k50_p95", "p95_peaked", "p95_flat", "k50"]
    for row in written["rows"]:
        assert row["fwd_bwd_s"] > 0 and row["comm_calls_backward"] == 0 and row["backend"] == "torch"
        assert row["vs_resharding_sort"] == pytest.approx(row["resharding_sort_s"] / row["fwd_bwd_s"])
        assert row["vs_gather_sort"] == pytest.approx(row["gather_sort_s"] / row["fwd_bwd_s"])
        assert row["vs_floor"] == pytest.approx(row["fwd_bwd_s"] / row["floor_s"])
        assert row["extra_memory_ratio"] > 0
    by_name = {row["name"]: row for row in written["rows"]}
    assert by_name["k50"]["comm_bytes_per_token"] == 4 * 57 and by_name["k50"]["kept_max"] == 50
    assert by_name["p95_peaked"]["kept_max"] <= 8 and by_name["p95_flat"]["kept_median"] > 300


def test_a_wrong_backend_or_folder_stops_before_any_rank_starts(monkeypatch, tmp_path):
    monkeypatch.setitem(run.RUNS, "op", lambda options: pytest.fail("measured"))
    with pytest.raises(ValueError, match="'auto', 'torch', 'compile'"):
        run.run(BenchOptions.of("op", backend="nix"), [], None, None)
    with pytest.raises(ValueError, match="does not exist"):
        run.run(BenchOptions.of("op"), [], str(tmp_path / "nowhere" / "x.json"), None)


def _run_case(rank, world_size, program, *args):
    return program(dist.group.WORLD, *args)


@pytest.mark.distributed
def test_the_transport_case():
    (row,) = run_ranks(_run_case, 2, transport_rank, BenchOptions.of("transport", tokens=4001, repeats=1))[0]
    # 1 status byte, 2 x 4 bytes and a bit a token: 4001 bits are 501 bytes.
    assert row["total_bytes"] == 1 + 8 * 4001 + 501 and row["comm_calls_forward"] == 1
    assert row["vs_floor"] > 0 and row["vs_pickled"] > 0


def test_the_loss_case():
    rows = loss_rank(None, BenchOptions.of("loss", tokens=4001, repeats=1))
    names = ["clip_token_mean", "clip_weighted_seq_mean", "gspo", "cispo", "reinforce", "kl_k3"]
    assert [row["name"] for row in rows] == names
    assert all(row["ns_per_token"] == pytest.approx(row["fwd_bwd_s"] / 4001 * 1e9) for row in rows)


# --- train step, replay -------------------------------------------------------------------------------------


def test_nested_entrances_are_counted_once():
    spans = case_train_step.Spans()
    inner = spans.timed(lambda: sum(range(100_000)), "inner")
    outer = spans.timed(lambda: [inner(), inner()], "outer")
    outer()
    assert set(spans.take()) == {"outer"}
    inner()
    taken = spans.take()
    assert set(taken) == {"inner"} and taken["inner"] > 0 and spans.take() == {}


@pytest.mark.megatron
@pytest.mark.distributed
def test_the_train_step_case_sees_the_op():
    options = BenchOptions.of("train_step", tokens=64, repeats=1)
    (row,) = run_ranks(_run_case, 2, case_train_step.train_rank, options, 500)[0]
    parts = sum(row[f"{part}_s"] for part in case_train_step.PARTS)
    assert row["megatron_s"] == pytest.approx(row["fwd_bwd_s"] - parts - row["optimizer_s"])
    assert row["adds"] == pytest.approx(parts / row["megatron_s"]) and row["optimizer_s"] > 0


TINY = {
    "vocab_size": 500,
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@pytest.mark.megatron
@pytest.mark.distributed
def test_the_packing_case_trains_the_same_padded_and_packed():
    """It refuses to report where losses differ."""
    options = BenchOptions.of("train_step", tokens=256, repeats=1)
    padded, packed = run_ranks(_run_case, 1, case_packing.packing_rank, options, TINY)[0]
    assert (padded["name"], packed["name"]) == ("smollm2_padded", "smollm2_packed")
    assert padded["vs_padded"] == 1.0
    assert packed["vs_padded"] == pytest.approx(padded["fwd_bwd_s"] / packed["fwd_bwd_s"])
    assert packed["batch_s"] > 0 and packed["op_forward_s"] > 0


def test_half_of_the_padded_batch_is_padding():
    for num_sequences, longest in ((8, 128), (8, 16), (64, 1024)):
        lengths = case_packing.length_mix(num_sequences, longest)
        assert sum(lengths) == pytest.approx(num_sequences * longest / 2, rel=0.01)
        assert min(lengths) >= 2 and max(lengths) == longest and lengths == sorted(lengths)


def test_replayed_lists_are_the_support():
    for kind, spec in (("flat", SamplingSpec(top_k=9, top_p=0.9)), ("peaked", SamplingSpec(top_p=0.9))):
        logits = make_rows(kind, 20, 500)
        for row, ids in zip(logits, kept_ids(logits, spec), strict=True):
            kept = (filter_rows(row[None], spec)[0] > -torch.inf).nonzero()[:, 0]
            assert sorted(ids) == kept.tolist()
