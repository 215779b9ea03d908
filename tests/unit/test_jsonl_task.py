"""Prompts and rewards of the user's own: what the model and the reward function get, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlcore.config_parse import ConfigError
from rlcore.config_rollout import TaskConfig
from rlcore.rollout.reward_pool import RewardPool
from rlcore.rollout.tasks import make_task

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
EXAMPLE = ROOT / "examples" / "jsonl_task"
ECHO = "tests.unit.test_jsonl_task:given"


def given(**what):
    """A reward function that shows what it was given, by raising it."""
    raise LookupError(json.dumps(what))


def needs_more(*, response, threshold):
    return 1.0


NOT_A_FUNCTION = 3


@pytest.fixture(autouse=True, scope="module")
def model_folder():
    if not MODEL.joinpath("tokenizer_config.json").exists():
        pytest.fail("the model folder is missing: run `make model`")


def make(path, size=1000, seed=0, **args):
    args = {"path": str(path), "reward": ECHO} | args
    args = {key: value for key, value in args.items() if value is not None}
    return make_task(TaskConfig(name="jsonl", size=size, args=args), str(MODEL), seed)


def write(folder, *lines):
    path = folder / "prompts.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def texts_of(task, prompts):
    return [task._tokenizer.decode(list(prompt.ids)) for prompt in prompts]


def test_plain_text_is_continued_and_chats_go_through_the_template(tmp_path):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    chat += [{"role": "user", "content": "Who?"}]
    path = write(tmp_path, {"prompt": "Once upon"}, {"messages": chat})
    task = make(path)
    plain, chatted = sorted(texts_of(task, task.prompts(0, 2)), key=len)
    assert plain == "Once upon"
    assert chatted.endswith("<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n")
    assert "assistant\nHo<|im_end|>" in chatted
    with_system = make(path, system_prompt="Be brief.")
    for text in texts_of(with_system, with_system.prompts(0, 2)):
        assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_every_line_comes_once_before_any_comes_twice(tmp_path):
    """Steps of 3 from 7 lines; another order in the second pass and under another seed; ids never repeat."""
    path = write(tmp_path, *[{"prompt": f"number {i}"} for i in range(9)])
    task = make(path, size=7)
    drawn = [prompt for step in range(7) for prompt in task.prompts(step, 3)]
    passes = [[prompt.answer.line for prompt in drawn[start : start + 7]] for start in (0, 7, 14)]
    assert all(sorted(one) == [1, 2, 3, 4, 5, 6, 7] for one in passes)
    assert len({tuple(one) for one in passes}) == 3
    assert [prompt.group_id for prompt in drawn] == list(range(21))
    assert task.prompts(4, 3) == drawn[12:15] == make(path, size=7).prompts(4, 3)
    assert [p.answer.line for p in make(path, size=7, seed=1).prompts(0, 7)] != passes[0]


def test_what_the_reward_function_gets(tmp_path):
    record = {"prompt": "2 + 2 =", "answer": [4, "four"], "level": 3}
    task = make(write(tmp_path, record), reward_args={"strict": True})
    (prompt,) = task.prompts(0, 1)
    with pytest.raises(LookupError) as said:
        task.reward(prompt, task._tokenizer.encode(" 4<|im_end|>"))
    assert json.loads(str(said.value)) == {
        "response": " 4",
        "answer": [4, "four"],
        "prompt": "2 + 2 =",
        "record": record,
        "strict": True,
    }


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [{"prompt": "a"}, "{'prompt': 1}"],
            r"prompts.jsonl, line 2: expected a JSON object, got \"{'prompt'",
        ),
        ([{"prompt": "a"}, ""], r"line 2: expected a JSON object, got ''"),
        (["[1]"], r"line 1: expected a JSON object, got '\[1\]'"),
        ([{"question": "a"}], r"line 1: expected either `prompt` \(text\) or `messages`"),
        ([{"prompt": "a", "messages": []}], r"line 1: expected either"),
        ([{"prompt": ["a"]}], r"line 1: `prompt` is a list, expected text. For a chat write `messages`"),
        ([{"messages": []}], r"line 1: `messages` is not a list of at least one"),
        ([{"messages": [{"role": "user"}]}], r"line 1: `messages\[0\]` is not an object"),
        ([{"prompt": ""}], r"line 1: the prompt has no token"),
        ([], r"prompts.jsonl is empty"),
    ],
)
def test_bad_lines_are_named(tmp_path, lines, message):
    with pytest.raises(ConfigError, match=message):
        make(write(tmp_path, *lines))


def test_lines_beyond_the_size_are_not_read(tmp_path):
    assert len(make(write(tmp_path, {"prompt": "a"}, "junk"), size=1).prompts(0, 1)) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"path": "no/such.jsonl"}, r"task.args.path=no/such.jsonl cannot be read: No such file"),
        ({"path": str(ROOT)}, r"cannot be read: Is a directory"),
        ({"reward": None}, r"task.args.reward is not set"),
        ({"rewards": "x"}, r"task.args.rewards: task.name=jsonl has no such argument. Known: path, reward"),
        ({"reward": "rlcore.sampling"}, r"expected package.module:function or path/to/file.py:function"),
        ({"reward": "no.such:f"}, r"task.args.reward=no.such:f: cannot be loaded: ModuleNotFoundError"),
        ({"reward": "no/such.py:f"}, r"cannot be loaded: FileNotFoundError"),
        ({"reward": f"{EXAMPLE}/reward.py:nothing"}, r"cannot be loaded: AttributeError"),
        ({"reward": "tests.unit.test_jsonl_task:NOT_A_FUNCTION"}, r"is not a function"),
        ({"reward": "tests.unit.test_jsonl_task:needs_more"}, r"called with .*response, answer.*as \*\*_"),
        ({"reward_args": {"answer": 1}}, r"task.args.reward_args.answer: every reward function gets its own"),
        ({"reward_args": [1]}, r"task.args.reward_args=\[1\]: expected a mapping"),
        ({"system_prompt": 3}, r"task.args.system_prompt=3: expected text"),
    ],
)
def test_arguments_are_checked(args, message):
    with pytest.raises(ConfigError, match=message):
        make(**({"path": EXAMPLE / "prompts.jsonl"} | args))


@pytest.mark.parametrize("name", ["jsonl", "math"])
def test_a_tokenizer_is_needed(name):
    with pytest.raises(ConfigError, match=f"task.name={name} needs a tokenizer. Set model.hf_path"):
        make_task(TaskConfig(name=name), None, 0)


def test_a_chat_without_a_template_is_refused(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in MODEL.glob("*.json"):
        folder.joinpath(file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    args = {"path": str(EXAMPLE / "prompts.jsonl"), "reward": ECHO}
    with pytest.raises(ConfigError, match=r"line 2: the tokenizer of .* has no chat template"):
        make_task(TaskConfig(name="jsonl", args=args), str(folder), 0)
    one = make_task(TaskConfig(name="jsonl", size=1, args=args), str(folder), 0)
    assert one.decode(one.prompts(0, 1)[0].ids).startswith("What is 2 + 3?")


def test_the_example_in_a_reward_process():
    """By hand: the answer alone 1, among other text 0.25, wrong 0; the second line weighs a half."""
    args = {
        "path": str(EXAMPLE / "prompts.jsonl"),
        "reward": f"{EXAMPLE}/reward.py:has_number",
        "reward_args": {"partial": 0.25},
    }
    config = TaskConfig(name="jsonl", args=args, reward_timeout_s=30.0)
    task = make_task(config, str(MODEL), 0)
    answers = {1: ["5", "It is 5.", "6"], 2: ["3", " 3\n", "7 - 4 = 3"], 3: ["42", "", "6 * 7"]}
    expected = {1: [1.0, 0.25, 0.0], 2: [0.5, 0.5, 0.125], 3: [1.0, 0.0, 0.0]}
    prompts = [prompt for prompt in task.prompts(0, 3) for _ in range(3)]
    texts = [answers[prompt.answer.line][i % 3] for i, prompt in enumerate(prompts)]
    with RewardPool(config, str(MODEL), 0) as pool:
        graded = pool.grade(prompts, [task._tokenizer.encode(text) for text in texts])
    assert [one.reward for one in graded] == [
        expected[prompt.answer.line][i % 3] for i, prompt in enumerate(prompts)
    ]
