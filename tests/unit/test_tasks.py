"""Prompts and rewards: repeatable, told apart by id, finite, graded by hand-computed figures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlcore.batch import Prompt
from rlcore.config_parse import ConfigError
from rlcore.config_rollout import TaskConfig
from rlcore.rollout.tasks import make_task

MODEL = Path(__file__).resolve().parents[2] / "models" / "SmolLM2-135M-Instruct"


def echo(seed=0, **args):
    return make_task(TaskConfig(name="echo", size=100, args=args), None, seed)


def test_prompts_are_a_pure_function_of_seed_and_step():
    first, again, other = echo().prompts(3, 16), echo().prompts(3, 16), echo(seed=1).prompts(3, 16)
    assert first == again and [p.ids for p in first] != [p.ids for p in other]
    assert [p.ids for p in first] != [p.ids for p in echo().prompts(4, 16)]


def test_every_prompt_of_a_run_is_a_group_of_its_own():
    """CASES B38 (a): equal prompts keep two ids."""
    ids = [prompt.group_id for step in range(10) for prompt in echo(letters=2).prompts(step, 8)]
    assert len(set(ids)) == 80


def test_prompts_differ_in_length_and_fit_the_vocabulary():
    task = echo(max_shown=3)
    prompts = task.prompts(0, 64)
    assert {len(prompt.ids) for prompt in prompts} == {2, 3, 4}
    assert all(0 <= i < task.vocab_size for prompt in prompts for i in prompt.ids)
    assert all(task.decode(prompt.ids)[0] == prompt.answer for prompt in prompts)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("cccc", 1.0),
        ("cc", 0.5),
        ("", 0.0),
        ("ccdc", 0.75),
        ("ccccc", 0.8),
        ("dddd", 0.0),
        ("c", 0.25),
        ("_ccc", 0.75),
    ],
)
def test_echo_reward(text, reward):
    task = echo(length=4)
    prompt = Prompt(ids=task.encode("c="), group_id=0, answer="c")
    assert task.reward(prompt, task.encode(text)) == reward


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"lenght": 3}, r"task.args.lenght.*letters, length, max_shown"),
        ({"letters": 27}, r"task.args.letters=27: expected an integer from 2 to 26"),
        ({"length": 0}, r"task.args.length=0"),
        ({"length": "3"}, r"task.args.length='3'"),
    ],
)
def test_echo_arguments_are_checked(args, message):
    with pytest.raises(ConfigError, match=message):
        echo(**args)


@pytest.mark.parametrize(
    ("name", "tokenizer", "message"),
    [
        ("ehco", None, r"task.name=ehco: expected echo, reasoning_gym/<dataset>, jsonl, math, or package"),
        ("echo", "models/x", r"task.name=echo has its own character vocabulary.*model.hf_path=null"),
        ("reasoning_gym/basic_arithmetic", None, r"needs a tokenizer. Set model.hf_path"),
        ("no.such.module:Task", None, r"task.name=no.such.module:Task: cannot be loaded"),
        ("tests.e2e.broken_tasks:Nothing", None, r"cannot be loaded.*Nothing"),
    ],
)
def test_tasks_that_cannot_be_made(name, tokenizer, message):
    with pytest.raises(ConfigError, match=message):
        make_task(TaskConfig(name=name), tokenizer, 0)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"needs reasoning_gym.*rlcore-megatron\[megatron\]"):
        make_task(TaskConfig(name="reasoning_gym/basic_arithmetic"), "models/x", 0)


@pytest.fixture(scope="module")
def arithmetic():
    if not MODEL.joinpath("tokenizer_config.json").exists():
        pytest.fail("the model folder is missing: run `make model`")
    args = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+"]}
    return make_task(
        TaskConfig(name="reasoning_gym/basic_arithmetic", size=50, args=args), str(MODEL), seed=0
    )


def test_reasoning_gym_prompts_go_through_the_chat_template(arithmetic):
    prompts = arithmetic.prompts(0, 4)
    again = arithmetic.prompts(0, 4)
    assert [p.ids for p in prompts] == [p.ids for p in again]
    for prompt in prompts:
        raw = arithmetic._tokenizer.decode(prompt.ids)
        assert raw.endswith("<|im_start|>assistant\n") and prompt.answer["question"] in raw
    assert len({prompt.group_id for step in range(3) for prompt in arithmetic.prompts(step, 4)}) == 12


def test_reasoning_gym_reward_is_the_verifiers(arithmetic):
    """Exact 1; the answer inside a longer text its share of the characters; tags single it out; wrong 0."""
    prompt = arithmetic.prompts(0, 1)[0]
    answer = prompt.answer["answer"]

    def graded(text):
        return arithmetic.reward(prompt, arithmetic._tokenizer.encode(text))

    assert graded(answer) == 1.0 and graded(f" {answer}\n") == 1.0
    assert graded(f"<answer>{answer}</answer>") == 1.0
    assert graded(f"Hm: {answer}") == pytest.approx(len(answer) / len(f"Hm: {answer}"))
    assert graded("no idea") == 0.0 and graded("") == 0.0


def test_reasoning_gym_arguments_are_checked():
    if not MODEL.exists():
        pytest.fail("the model folder is missing: run `make model`")
    for name, args in (
        ("no_such_set", {}),
        ("basic_arithmetic", {"min_termz": 2}),
        ("basic_arithmetic", {"min_terms": 0}),
    ):
        with pytest.raises(ConfigError, match=f"task.name=reasoning_gym/{name}"):
            make_task(TaskConfig(name=f"reasoning_gym/{name}", args=args), str(MODEL), 0)
