"""The example of `docs/plugging_in.md`: a plain Megatron script, and the same one as an RL trainer."""

from __future__ import annotations

import difflib
import math
import re

import pytest

from tests.e2e.commands import ROOT, run_python

EXAMPLE = ROOT / "examples" / "plug_into_megatron"
MOST_LINES = 10

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(240)]

NUMBER = r"(-?\d+\.\d+(?:e-?\d+)?|nan|inf)"


def run(script: str, num_ranks: int, *words: str) -> str:
    """Standard output of the script under torchrun."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    done = run_python(*launcher, str(EXAMPLE / script), *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def steps_of(output: str) -> dict[int, list[tuple[float, float]]]:
    """Loss and gradient norm of every step, by rank."""
    found: dict[int, list[tuple[float, float]]] = {}
    pattern = rf"rank (\d+) step \d+ loss {NUMBER} grad_norm {NUMBER}"
    for rank, loss, norm in re.findall(pattern, output):
        found.setdefault(int(rank), []).append((float(loss), float(norm)))
    return found


def difference() -> list[str]:
    """Lines that the RL script adds to the plain one and takes from it, with their sign."""
    plain, trainer = (
        EXAMPLE.joinpath(f"{name}_training.py").read_text(encoding="utf-8").splitlines()
        for name in ("plain", "rl")
    )
    lines = difflib.unified_diff(plain, trainer, lineterm="", n=0)
    return [line for line in lines if line[0] in "+-" and not line.startswith(("+++", "---"))]


def test_ten_lines_are_enough():
    lines = difference()
    added = [line for line in lines if line.startswith("+")]
    assert 0 < len(added) <= MOST_LINES, "\n".join(added)
    # What leaves is the plain job's own data, schedule arguments and report, nothing else.
    assert len(lines) - len(added) <= MOST_LINES, "\n".join(lines)
    assert max(len(line) for line in added) <= 111, "lines, not one long line"


def test_the_document_shows_the_diff_that_is_there():
    text = ROOT.joinpath("docs", "plugging_in.md").read_text(encoding="utf-8")
    shown = text.split("```diff\n")[1].split("```")[0].splitlines()
    assert [line for line in shown if line.startswith(("+", "-"))] == difference()


@pytest.mark.slow
def test_the_plain_script_trains():
    """PP2, so that stages without logits are in the run."""
    output = run("plain_training.py", 2, "--tp", "1", "--pp", "2", "--steps", "3")
    steps = steps_of(output)
    assert sorted(steps) == [0, 1]
    losses = [loss for loss, _ in steps[1]]
    assert losses[0] == pytest.approx(math.log(64), abs=0.3) and losses[2] < losses[0]
    assert all(math.isnan(loss) for loss, _ in steps[0]), "the first stage has no loss of its own"


def test_the_same_script_trains_with_rl():
    """TP2 x DP2: every rank reports the same step, which has a loss and moves something."""
    output = run("rl_training.py", 4, "--tp", "2", "--steps", "2")
    steps = steps_of(output)
    assert sorted(steps) == [0, 1, 2, 3]
    assert all(steps[rank] == steps[0] for rank in steps), "metrics are those of the whole step"
    assert len(steps[0]) == 2
    for loss, norm in steps[0]:
        assert math.isfinite(loss) and loss != 0.0 and math.isfinite(norm) and norm > 0.0
    validation = re.findall(rf"rank \d+ validation {NUMBER}", output)
    assert len(validation) == 4 and all(math.isfinite(float(value)) for value in validation)
