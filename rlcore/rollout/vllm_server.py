"""vLLM servers (`vllm serve`) that share a step's prompts, reached by URL.

Each must have been started with `--logprobs-mode processed_logprobs`, with `--enable-scale-out`, without
which it takes no token ids, with the weight receiver as `--worker-extension-cls`, and with
`VLLM_SERVER_DEV_MODE=1`, without which it takes no weights.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.rollout.completions import BadCompletion, Completion, Request, sampled_logprobs
from rlcore.rollout.vllm_engine import RECEIVER, EngineError, EngineSettings

GENERATE = "/inference/v1/generate"
"""Token ids in, token ids out: neither side tokenizes."""
MOST_CONNECTIONS = 256
"""Requests under way at one server."""
_START_HINT = (
    "Start it with: VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode "
    f"processed_logprobs --worker-extension-cls {RECEIVER}, and for sampling.support other than recompute "
    "--max-logprobs of at least top_k + 16."
)
# What the server's JSON says instead of -inf and NaN, neither of which JSON has.
_NO_LOGPROB = -9999.0


class ServerPool:
    """`Engine` over HTTP: request i goes to server i modulo their number."""

    def __init__(self, urls: Sequence[str], settings: EngineSettings, needed_length: int) -> None:
        """Waits until every server answers. `ValueError` naming the one that does not in time, or whose
        context is shorter than `needed_length` tokens.
        """
        self._httpx = _import_httpx()
        self._urls = [url.rstrip("/") for url in urls]
        self.names: Sequence[str] = tuple(self._urls)
        self._settings = settings
        # As vLLM's own `--api-key` reads it.
        key = os.environ.get("VLLM_API_KEY")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = self._httpx.Client(timeout=settings.timeout_s, headers=self._headers)
        deadline = time.monotonic() + settings.start_timeout_s
        try:
            for url in self._urls:
                self._wait_for(url, deadline)
                self._check_length(url, needed_length)
        except BaseException:
            self._client.close()
            raise

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """See `Engine`."""
        return asyncio.run(self._generate(requests))

    def rpc(self, method: str, **kwargs: Any) -> list[Any]:
        """See `Engine`."""
        results: list[Any] = []
        for url in self._urls:
            said = self._post(url, "/collective_rpc", {"method": method, "kwargs": kwargs})
            if not isinstance(said, Mapping) or "results" not in said:
                raise EngineError(f"{url}/collective_rpc answered {said!r} to {method}. {_START_HINT}")
            results += said["results"]
        return results

    def reset_prefix_cache(self) -> None:
        """See `Engine`."""
        for url in self._urls:
            said = self._post(url, "/reset_prefix_cache", None)
            if not isinstance(said, Mapping) or not said.get("success"):
                raise EngineError(
                    f"{url} did not reset its prefix cache ({said!r}): requests are still running, perhaps "
                    "somebody else's. States of the old weights would be drawn from."
                )

    def check_alive(self) -> None:
        """Servers are asked, not watched: a connection to one that has died breaks."""

    def close(self) -> None:
        """Closes the connections; the servers stay."""
        self._client.close()

    def _wait_for(self, url: str, deadline: float) -> None:
        reason: object = "no answer"
        while True:
            try:
                answer = self._client.get(f"{url}/health", timeout=5.0)
                if answer.status_code == 200:
                    return
                reason = f"HTTP {answer.status_code}"
            except self._httpx.HTTPError as error:
                reason = error
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"rollout.vllm.urls: {url} did not answer within rollout.vllm.start_timeout_s="
                    f"{self._settings.start_timeout_s:g} seconds ({reason}). {_START_HINT}"
                )
            time.sleep(0.5)

    def _check_length(self, url: str, needed: int) -> None:
        answer = self._client.get(f"{url}/v1/models")
        if answer.status_code == 401:
            raise ValueError(
                f"rollout.vllm.urls: {url} wants a key (HTTP 401). Set VLLM_API_KEY in the environment, "
                "as for the server."
            )
        self._check(answer, f"{url}/v1/models")
        served = answer.json()["data"]
        longest = min((model.get("max_model_len") or math.inf for model in served), default=math.inf)
        if longest < needed:
            raise ValueError(
                f"rollout.vllm.urls: {url} serves at most {longest} tokens a sequence, the run has up to "
                f"{needed}. Start it with --max-model-len {needed}, or set "
                f"rollout.vllm.max_model_len={longest}."
            )

    def _post(self, url: str, path: str, body: Any) -> Any:
        try:
            answer = self._client.post(f"{url}{path}", json=body)
        except self._httpx.HTTPError as error:
            raise EngineError(f"{url} does not answer to {path}: {type(error).__name__} {error}.") from error
        self._check(answer, f"{url}{path}")
        return answer.json() if answer.content else None

    def _check(self, answer: Any, place: str) -> None:
        """`ValueError` for what the server was not started with, `EngineError` for its failures."""
        if answer.status_code in (403, 404):
            raise ValueError(f"{place} is not served (HTTP {answer.status_code}). {_START_HINT}")
        if answer.status_code >= 400:
            raise EngineError(f"{place} failed: HTTP {answer.status_code}: {answer.text[:500]}")

    async def _generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        limits = self._httpx.Limits(max_connections=MOST_CONNECTIONS * len(self._urls))
        slots = [asyncio.Semaphore(MOST_CONNECTIONS) for _ in self._urls]
        async with self._httpx.AsyncClient(
            timeout=self._settings.timeout_s, limits=limits, headers=self._headers
        ) as client:

            async def one(index: int, request: Request) -> list[Completion]:
                place = index % len(self._urls)
                async with slots[place]:
                    return await self._one(client, self._urls[place], request)

            jobs = [asyncio.ensure_future(one(index, request)) for index, request in enumerate(requests)]
            try:
                return await asyncio.gather(*jobs)
            finally:
                for job in jobs:
                    job.cancel()

    async def _one(self, client: Any, url: str, request: Request) -> list[Completion]:
        """The samples of one request from one server."""
        body = {"token_ids": list(request.prompt_ids), "sampling_params": self._settings.params(request)}
        try:
            answer = await client.post(f"{url}{GENERATE}", json=body)
        except self._httpx.HTTPError as error:
            raise EngineError(f"{url} did not answer: {type(error).__name__} {error}.") from error
        self._check(answer, f"{url}{GENERATE}")
        choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
        return [self._completion(choice) for choice in choices]

    def _completion(self, choice: Mapping[str, Any]) -> Completion:
        content = (choice.get("logprobs") or {}).get("content")
        if content is None or choice.get("token_ids") is None:
            raise BadCompletion("the server returned a sample without token ids or logprobs.")
        logprobs_of = [
            {entry["token_id"]: _logprob(entry) for entry in (*at.get("top_logprobs", ()), at)}
            for at in content
        ]
        return Completion(
            ids=choice["token_ids"],
            logprobs=sampled_logprobs(choice["token_ids"], logprobs_of),
            finished=choice.get("finish_reason") == "stop",
            kept=self._settings.kept(logprobs_of, choice.get("sampling_mask")),
        )


def _logprob(entry: Mapping[str, Any]) -> float:
    return -math.inf if entry["logprob"] <= _NO_LOGPROB else entry["logprob"]


def _import_httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise ValueError(
            "rollout.vllm.urls needs httpx, which is not installed. Install it with: pip install "
            "'rlcore-megatron[vllm]'."
        ) from error
    return httpx
