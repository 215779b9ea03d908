"""A task whose reward function does what each prompt's answer says, for the tests of reward processes."""

from __future__ import annotations

import os
import subprocess
import time

from rlcore.rollout.echo_task import EchoTask


class ObeyingTask(EchoTask):
    """`task.name=tests.reward_cases:ObeyingTask`. `Prompt.answer` is (what to do, with what)."""

    def __init__(self, config, tokenizer_path, seed):
        self.vocabulary, self.vocab_size, self.eos_id = "_.=", 3, 1
        self.made_from = (config, tokenizer_path, seed)

    def reward(self, prompt, response_ids):
        what, value = prompt.answer
        return getattr(self, f"_{what}")(value, response_ids)

    def _return(self, value, response_ids):
        return value

    def _length(self, value, response_ids):
        return float(len(response_ids))

    def _raise(self, value, response_ids):
        raise value

    def _sleep(self, value, response_ids):
        time.sleep(value)
        return 1.0

    def _exit(self, value, response_ids):
        os._exit(value)

    def _signal(self, value, response_ids):
        os.kill(os.getpid(), value)

    def _power(self, value, response_ids):
        """Holds the interpreter: no other Python thread runs."""
        return float(value ** (10**9) > 0)

    def _names(self, value, response_ids):
        return float(sum(name in os.environ for name in value))

    def _child(self, value, response_ids):
        """Leaves its own number and that of a program it has started in a file, then hangs."""
        program = subprocess.Popen(["sleep", "60"])
        with open(f"{value}.part", "w", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {program.pid}")
        os.replace(f"{value}.part", value)
        time.sleep(60)


class NeverMadeTask(ObeyingTask):
    """Can be built where the run starts, not in a reward process."""

    def __init__(self, config, tokenizer_path, seed):
        raise RuntimeError("no grader here")


class EndsWhileMadeTask(ObeyingTask):
    def __init__(self, config, tokenizer_path, seed):
        os._exit(7)
