"""The server pool against an HTTP server of our own that answers in vLLM's shapes."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlcore.rollout.completions import BadCompletion, Request
from rlcore.rollout.vllm_engine import EngineError, EngineSettings
from rlcore.rollout.vllm_server import GENERATE, ServerPool

pytest.importorskip("httpx")
SETTINGS = EngineSettings(
    sampling={"temperature": 0.5, "stop_token_ids": [1]},
    num_candidates=2,
    lists_all=False,
    sampling_mask=False,
    start_timeout_s=5.0,
    timeout_s=5.0,
)


def entry(token, logprob, *others):
    top = [{"token_id": other, "logprob": value} for other, value in others]
    return {"token_id": token, "logprob": logprob, "top_logprobs": top}


class Handler(BaseHTTPRequestHandler):
    """What the test set as `server.answers[path]`: a status and a body, or a function of the request."""

    def do_GET(self):
        self._answer({})

    def do_POST(self):
        length = int(self.headers["Content-Length"] or 0)
        self._answer(json.loads(self.rfile.read(length) or b"{}") or {})

    def _answer(self, body):
        self.server.seen.append((self.path, body))
        answer = self.server.answers.get(self.path, (404, {}))
        status, content = answer(body) if callable(answer) else answer
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def good_sample(body):
    """One sample a prompt: the prompt's first id, then the end; candidate 8 was not kept."""
    first = body["token_ids"][0]
    content = [entry(first, -0.25, (first, -0.25), (8, -9999.0)), entry(1, 0.0, (1, 0.0), (8, -9999.0))]
    choice = {"index": 0, "token_ids": [first, 1], "finish_reason": "stop", "logprobs": {"content": content}}
    return 200, {"choices": [choice]}


@pytest.fixture
def servers():
    """Two servers; the URL of each is `server.url`."""
    started = []
    for _ in range(2):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.seen = []
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        server.answers = {
            "/health": (200, {}),
            "/v1/models": (200, {"data": [{"max_model_len": 64}]}),
            GENERATE: good_sample,
            "/collective_rpc": (200, {"results": [{"version": 3}]}),
            "/reset_prefix_cache": (200, {"success": True}),
        }
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        started.append(server)
    yield started
    for server in started:
        server.shutdown()
        server.server_close()


def pool_of(servers, needed=64, settings=SETTINGS):
    return ServerPool([f"{server.url}/" for server in servers], settings, needed)


def requests_of(*first_ids):
    return [Request(prompt_ids=[token], num_samples=1, max_new_tokens=4, seed=token) for token in first_ids]


def test_prompts_are_spread_and_answers_come_in_order(servers):
    pool = pool_of(servers)
    completions = pool.generate(requests_of(5, 6, 7))
    assert [samples[0].ids for samples in completions] == [[5, 1], [6, 1], [7, 1]]
    assert completions[1][0].logprobs == [-0.25, 0.0] and completions[1][0].finished
    # -9999 is how the server says that a candidate was not kept.
    assert completions[1][0].kept == [[6], [1]]
    asked = [[body for path, body in server.seen if path == GENERATE] for server in servers]
    assert sorted(body["token_ids"][0] for body in asked[0]) == [5, 7]
    assert asked[1][0]["sampling_params"] == {
        **SETTINGS.sampling,
        **{"logprobs": 2, "n": 1, "seed": 6, "max_tokens": 4},
    }


def test_every_server_is_called_and_reset(servers):
    pool = pool_of(servers)
    assert pool.rpc("load", version=3) == [{"version": 3}, {"version": 3}]
    pool.reset_prefix_cache()
    for server in servers:
        assert server.seen[-2:] == [
            ("/collective_rpc", {"method": "load", "kwargs": {"version": 3}}),
            ("/reset_prefix_cache", {}),
        ]


@pytest.mark.parametrize("answer", [{"success": False}, None])
def test_a_cache_that_was_not_reset_is_an_error(servers, answer):
    """vLLM says so with HTTP 200."""
    servers[1].answers["/reset_prefix_cache"] = (200, answer)
    with pytest.raises(EngineError, match=f"{servers[1].url} did not reset its prefix cache"):
        pool_of(servers).reset_prefix_cache()


def test_a_server_that_wants_a_key_is_given_the_environments(servers, monkeypatch):
    servers[0].answers["/v1/models"] = (401, {})
    with pytest.raises(ValueError, match=r"wants a key \(HTTP 401\). Set VLLM_API_KEY"):
        pool_of(servers)
    servers[0].answers["/v1/models"] = servers[1].answers["/v1/models"]
    monkeypatch.setenv("VLLM_API_KEY", "open sesame")
    assert pool_of(servers)._client.headers["Authorization"] == "Bearer open sesame"


def test_a_server_without_the_receiver_is_told_how_to_start(servers):
    servers[0].answers["/collective_rpc"] = (200, None)
    with pytest.raises(EngineError, match=r"answered None to weights_state. Start it with"):
        pool_of(servers).rpc("weights_state")


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ((500, {"error": "CUDA out of memory"}), EngineError, "HTTP 500.*out of memory"),
        ((403, {"error": "disabled"}), ValueError, "--enable-scale-out"),
        (
            (200, {"choices": [{"index": 0, "token_ids": [5]}]}),
            BadCompletion,
            "without token ids or logprobs",
        ),
    ],
)
def test_a_server_that_fails_says_what_and_what_to_do(servers, answer, error, message):
    pool = pool_of(servers)
    servers[1].answers[GENERATE] = answer
    with pytest.raises(error, match=message):
        pool.generate(requests_of(5, 6))


def test_a_sampled_id_without_a_logprob_is_minus_infinity_not_a_number(servers):
    """The checks of completions then refuse it."""
    content = [entry(5, -9999.0)]
    choice = {"index": 0, "token_ids": [5], "finish_reason": "length", "logprobs": {"content": content}}
    servers[0].answers[GENERATE] = (200, {"choices": [choice]})
    (sample,) = pool_of(servers[:1]).generate(requests_of(5))[0]
    assert sample.logprobs == [float("-inf")]


def test_a_server_that_is_gone_or_never_came(servers):
    pool = pool_of(servers)
    servers[1].shutdown()
    servers[1].server_close()
    with pytest.raises(EngineError, match=f"{servers[1].url} did not answer"):
        pool.generate(requests_of(5, 6))
    with pytest.raises(EngineError, match="does not answer to /collective_rpc"):
        pool.rpc("load")
    late = EngineSettings(**{**vars(SETTINGS), "start_timeout_s": 0.1})
    with pytest.raises(
        ValueError, match=r"did not answer within rollout.vllm.start_timeout_s=0.1.*vllm serve"
    ):
        pool_of(servers, settings=late)


def test_a_server_with_a_short_context_is_refused(servers):
    with pytest.raises(ValueError, match=r"at most 64 tokens a sequence.*--max-model-len 65"):
        pool_of(servers, needed=65)
