"""Mathematical answers, graded by what they are worth and not by how they are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlcore.config_parse import ConfigError
from rlcore.config_rollout import TaskConfig
from rlcore.rollout.math_task import grade_math
from rlcore.rollout.reward_pool import RewardPool
from rlcore.rollout.tasks import make_task

MODEL = Path(__file__).resolve().parents[2] / "models" / "SmolLM2-135M-Instruct"


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"So the answer is \boxed{\frac{1}{2}}.", "0.5", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{\frac{1}{2}}", 0.5, 1.0),
        ("x=3", "3", 1.0),
        ("so $x=3$", 3, 1.0),
        (r"\boxed{3}", "x=3", 1.0),
        (r"\boxed{4}", "3", 0.0),
        ("x=5", "x=3", 0.0),
        (r"\boxed{2x + 1}", "1+2x", 1.0),
        (r"\boxed{2}", "2x+1", 0.0),
        (r"\boxed{\sqrt{8}}", r"$2\sqrt{2}$", 1.0),
        (r"\boxed{0.00001}", 1e-05, 1.0),
        (r"\boxed{1,000}", "1000", 1.0),
        (r"\boxed{50\%}", r"50\%", 1.0),
        (r"\boxed{60\%}", r"50\%", 0.0),
        ("50%", "50%", 1.0),
        (r"\boxed{\frac{1}{2}}", "50%", 1.0),
        (r"\boxed{(1, 2)}", "(1,2)", 1.0),
        ("first 3, no, it is 4", "3", 0.0),
        ("no idea at all", "3", 0.0),
        ("", "3", 0.0),
        (r"\boxed{\frac{1}{", "3", 0.0),
    ],
)
def test_math_grading(response, answer, reward):
    assert grade_math(response=response, answer=answer) == reward


def make(folder, *answers, **args):
    path = folder / "questions.jsonl"
    lines = [json.dumps({"prompt": "?", **({} if one is ... else {"answer": one})}) for one in answers]
    path.write_text("\n".join(lines), encoding="utf-8")
    config = TaskConfig(name="math", args={"path": str(path), **args}, reward_timeout_s=1.5)
    return config, make_task(config, str(MODEL), 0)


@pytest.mark.parametrize("answer", [..., None, True, "", r"\frac{1}{", ["3"]])
def test_an_answer_that_cannot_be_read_names_its_line(tmp_path, answer):
    with pytest.raises(ConfigError, match=r"questions.jsonl, line 2: math-verify cannot read answer="):
        make(tmp_path, "3", answer)


def test_math_has_no_reward_function(tmp_path):
    with pytest.raises(ConfigError, match=r"task.args.reward: task.name=math has no such argument"):
        make(tmp_path, "3", reward="a:b")


def test_a_comparison_that_never_ends_costs_its_sample(tmp_path):
    """Without a signal of math-verify's: the power lets none through."""
    config, task = make(tmp_path, "3")
    prompts = task.prompts(0, 3)
    texts = [r"\boxed{3}", r"\boxed{10^{10^{10}}}", r"$\frac{6}{2}$"]
    with RewardPool(config, str(MODEL), 0) as pool:
        graded = pool.grade(prompts, [task._tokenizer.encode(text) for text in texts])
    assert [one.reward for one in graded] == [1.0, None, 1.0]
    assert graded[1].reason.startswith("the reward function took more than 1.5 s")
