"""What `rlcore bench` says: targets at their stated size, met and missed, nothing after a failed check."""

from __future__ import annotations

import json

import pytest
import torch

from tools.bench import report, run
from tools.bench.options import BenchOptions
from tools.bench.ranks import CheckFailed
from tools.bench.targets import judge


def op_row(name="k50_p95", **changes):
    row = {key: 0.5 for key, _, _ in report.COLUMNS["op"]} | {"name": name, "ours_quartiles_s": (0.1, 0.2)}
    row |= {"vs_resharding_sort": 61.0, "vs_floor": 2.5, "extra_memory_ratio": 0.05}
    return row | {"comm_bytes_per_token": 228.0, "comm_calls_backward": 0} | changes


def test_targets_are_judged_at_the_size_they_are_stated_for():
    verdict = {t["key"]: t["met"] for t in judge(op_row(), BenchOptions.of("op"))}
    assert verdict == {
        "vs_resharding_sort": True,
        "vs_floor": False,
        "comm_bytes_per_token": True,
        "comm_calls_backward": True,
        "extra_memory_ratio": True,
    }
    small = [t["key"] for t in judge(op_row(), BenchOptions.of("op", tokens=8))]
    assert small == ["comm_bytes_per_token", "comm_calls_backward"]
    assert not any(
        t["met"]
        for t in judge({"name": "x", "vs_matmul_op": 1.31, "peak_growth": 1.9}, BenchOptions.of("fused"))
    )


def test_a_report_says_what_was_met_and_missed(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(run.RUNS, "op", lambda options: [op_row(), op_row("k50")])
    json_path = tmp_path / "out.json"
    words = ["bench", "--case", "op"]
    assert run.run(BenchOptions.of("op"), words, str(json_path), tmp_path / "results") == 0
    printed = capsys.readouterr().out
    written = json.loads(json_path.read_text())
    (markdown,) = (tmp_path / "results").glob("*_op.md")
    for text in (printed, markdown.read_text()):
        assert "MISSED: k50_p95: vs_floor <= 2, measured 2.5" in text
        assert "met: k50_p95: vs_resharding_sort >= 50, measured 61" in text
        assert "61.0" in text and "100 to 200" in text
    assert [row["name"] for row in written["rows"]] == ["k50_p95", "k50"]
    assert written["meta"]["command"] == "rlcore bench --case op"
    assert written["meta"]["versions"]["torch"] == torch.__version__
    assert set(written["meta"]) >= {"commit", "cpu", "date", "load_average"}


def test_a_failed_check_exits_1_and_reports_nothing(tmp_path, monkeypatch, capsys):
    def failing(options):
        raise CheckFailed("ours against sort: gradients differ by 0.3 in row 7")

    monkeypatch.setitem(run.RUNS, "op", failing)
    assert run.run(BenchOptions.of("op"), ["bench"], str(tmp_path / "x.json"), tmp_path) == 1
    caught = capsys.readouterr()
    assert "differ by 0.3 in row 7" in caught.err and caught.out == ""
    assert list(tmp_path.iterdir()) == []


def test_scaling_says_which_rows_missed():
    row = {"V": 32_768, "tp": 4, "rows": "flat", "dtype": "bfloat16", "name": "k50"}
    good = {"key": "comm_bytes_per_token", "target": "<= 16384", "value": 228.0, "met": True}
    rows = [{**row, "targets": [good]}] * 40 + [{**row, "targets": [{**good, "value": 2e4, "met": False}]}]
    assert report.summary(rows) == [
        "MISSED: 32768 4 flat bfloat16 k50: comm_bytes_per_token <= 16384, measured 2e+04",
        "40 of 41 targets met",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"case": "nix"}, "--case nix: expected one of op, scaling"),
        ({"dtype": "float16"}, "--dtype float16"),
        ({"device": "tpu"}, "--device tpu: expected cpu or cuda"),
        ({"tokens": 0}, "--tokens 0"),
        ({"vocab": 10}, "--vocab 10: expected at least 64"),
    ],
)
def test_bad_options_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        BenchOptions.of(**changes)
