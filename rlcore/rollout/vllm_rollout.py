"""vLLM as the rollout engine of a run: rank 0 talks to it, every rank gets its replica's responses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

import numpy as np

from rlcore.batch import Prompt, Rollout
from rlcore.collectives import group_rank, raise_together
from rlcore.config import RunConfig
from rlcore.interfaces import PolicyWorker
from rlcore.rollout.completions import (
    BadCompletion,
    Completion,
    Expected,
    Request,
    check_completions,
    join_rollout,
)
from rlcore.rollout.rollout_wire import gather_prompts, share_rollouts
from rlcore.rollout.vllm_engine import Engine, EngineError
from rlcore.waiting import wait_together
from rlcore.weight_sync.sender import WeightSender, check_serving

T = TypeVar("T")


class VllmRollout:
    """`RolloutEngine` on vLLM. Built on every rank; all methods are collective over the run.

    An engine that dies, hangs or fails raises on every rank: at once where vLLM says so, else after the
    config's time-outs. Responses that cannot be trained on are drawn again `rollout.vllm.retries` times, with
    other seeds, then raise on every rank.
    """

    def __init__(
        self,
        config: RunConfig,
        worker: PolicyWorker,
        start: Callable[[], Engine],
        expected: Expected,
        sender: WeightSender,
    ) -> None:
        """`start` is called on rank 0 alone and returns the engine."""
        self._config, self._worker, self._expected, self._sender = config, worker, expected, sender
        self._groups, self._device = worker.groups, worker.device
        self._thread = EngineThread() if group_rank(self._groups.world) == 0 else None
        self._engine: Engine | None = None
        self._version: int | None = None
        self._asked: Future[list[Rollout]] | None = None
        self._engine = self._wait(self._submit(partial(checked, start)), "start")

    def update_weights(self, version: int) -> None:
        """Sends the policy's weights, unless the engine has this version. See `RolloutEngine`."""
        if version == self._version:
            return
        # Whatever happens now, the engine is not known to hold a version again until this returns.
        self._version = None
        self._sender.write(self._worker.export_weights, version, self._engine)
        self._wait(self._submit(self._sender.deliver, self._engine, version), "weight update")
        self._version = version

    def begin(self, prompts: Sequence[Prompt], samples_per_prompt: int, seed: int) -> None:
        """Sends the prompts of every replica to the engine. `ValueError` on every rank for a prompt that does
        not fit. See `RolloutEngine`.
        """
        assert self._version is not None, "update_weights() comes first"
        raise_together(self._prompt_error(prompts), self._groups.world, self._device)
        of_replicas = gather_prompts(prompts, seed, self._groups, self._device)
        self._asked = self._submit(self._draw, of_replicas, samples_per_prompt, self._version)

    def collect(self) -> Rollout:
        """Waits for the responses. See `RolloutEngine`."""
        drawn = self._wait(self._asked, "generation")
        self._asked = None
        return share_rollouts(drawn, self._expected.kept, self._groups, self._device)

    def close(self) -> None:
        """Ends the engine's processes. Not collective."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _draw(
        self, of_replicas: Sequence[tuple[Sequence[Prompt], int]], samples: int, version: int
    ) -> list[Rollout]:
        """One rollout a replica. Runs on the engine's thread."""
        assert self._engine is not None
        retries = self._config.rollout.vllm.retries
        for attempt in range(retries + 1):
            requests = [
                self._expected.request(prompt, samples, request_seed(seed, attempt, index))
                for prompts, seed in of_replicas
                for index, prompt in enumerate(prompts)
            ]
            try:
                completions = self._engine.generate(requests)
                check_completions(requests, completions, self._expected)
                # A server may have been restarted meanwhile, with the weights that it starts with.
                check_serving(self._engine, self._sender.run, version)
                break
            except BadCompletion as error:
                if attempt == retries:
                    raise EngineError(
                        f"vLLM's responses cannot be trained on, drawn {retries + 1} times "
                        f"(rollout.vllm.retries={retries}): {error}"
                    ) from error
        else:
            raise AssertionError("the last attempt breaks or raises")
        return self._split(of_replicas, completions, version)

    def _split(
        self,
        of_replicas: Sequence[tuple[Sequence[Prompt], int]],
        completions: Sequence[Sequence[Completion]],
        version: int,
    ) -> list[Rollout]:
        rollouts, start = [], 0
        for prompts, _ in of_replicas:
            own = completions[start : start + len(prompts)]
            rollouts.append(join_rollout(prompts, own, version, self._expected.kept))
            start += len(prompts)
        return rollouts

    def _submit(self, call: Callable[..., T], *args: Any) -> Future[T] | None:
        """The call's future on rank 0, None elsewhere."""
        return None if self._thread is None else self._thread.submit(call, *args)

    def _wait(
        self, future: Future[T] | None, what: Literal["start", "generation", "weight update"]
    ) -> T | None:
        """Every rank waits here for rank 0's engine, in steps that no transport takes for a hang. The result
        on rank 0, None elsewhere; an error on every rank.
        """
        key = "start_timeout_s" if what == "start" else "timeout_s"
        timeout_s = getattr(self._config.rollout.vllm, key)
        deadline = time.monotonic() + timeout_s

        def given_up() -> BaseException | None:
            try:
                if self._engine is not None:
                    self._engine.check_alive()
            except EngineError as error:
                return error
            if time.monotonic() < deadline:
                return None
            return EngineError(
                f"vLLM's {what} took longer than {timeout_s:g} s. Raise rollout.vllm.{key} if it needs more."
            )

        return wait_together(future, self._groups.world, self._device, given_up)

    def _prompt_error(self, prompts: Sequence[Prompt]) -> ValueError | None:
        """Why a prompt of this replica cannot be sent, or None."""
        expected = self._expected
        for prompt in prompts:
            if not prompt.ids:
                return ValueError(
                    f"prompt {prompt.group_id} is empty: every prompt needs at least one token."
                )
            outside = [token for token in prompt.ids if not 0 <= token < expected.vocab_size]
            if outside:
                return ValueError(
                    f"prompt {prompt.group_id} has id {outside[0]}, outside the model's vocabulary "
                    f"[0, {expected.vocab_size}). Use the tokenizer that belongs to the model."
                )
            if len(prompt.ids) >= expected.max_length:
                return ValueError(
                    f"prompt {prompt.group_id} has {len(prompt.ids)} tokens, and the engine takes "
                    f"{expected.max_length}: no room for a response. Shorten the prompt, or raise "
                    "rollout.vllm.max_model_len where the model has more positions."
                )
        return None


def request_seed(seed: int, attempt: int, index: int) -> int:
    """A seed in [0, 2^62) that no two prompts, attempts, steps and replicas share."""
    return int(np.random.SeedSequence([seed, attempt, index]).generate_state(1, np.uint64)[0] >> np.uint64(2))


def checked(start: Callable[[], Engine]) -> Engine:
    """The engine, once all that it is made of have shown that their logprobs are processed ones: under
    top_k=1 they are 0, where raw ones are not. `ValueError` otherwise.
    """
    engine = start()
    try:
        probe = {"temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0}
        request = Request(prompt_ids=[0], num_samples=1, max_new_tokens=1, seed=0, sampling=probe)
        # Request i goes to the i-th of them.
        answers = engine.generate([request] * len(engine.names))
        for name, (answer,) in zip(engine.names, answers, strict=True):
            logprob = answer.logprobs[0]
            if not abs(logprob) < _ZERO_LOGPROB:
                raise ValueError(
                    f"{name} returns raw logprobs: {logprob:.4g} for the only id that top_k=1 keeps, where a "
                    "processed one is 0. Set rollout.vllm.logprobs_mode=processed_logprobs; start a server "
                    "with --logprobs-mode processed_logprobs."
                )
    except BaseException:
        engine.close()
        raise
    return engine


# What float32 makes of log 1, and far below the raw logprob of any id of an untrained or chat model.
_ZERO_LOGPROB = 1e-6


class EngineThread:
    """Runs calls one after the other on a thread of their own, so that training goes on meanwhile. A daemon:
    a call that hangs does not keep the process alive.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future, Callable[..., Any], tuple]] = SimpleQueue()
        threading.Thread(target=self._serve, name="vllm-engine", daemon=True).start()

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """The call's future."""
        future: Future[T] = Future()
        self._calls.put((future, call, args))
        return future

    def _serve(self) -> None:
        while True:
            future, call, args = self._calls.get()
            try:
                future.set_result(call(*args))
            except BaseException as error:
                future.set_exception(error)
