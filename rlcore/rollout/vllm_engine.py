"""vLLM inside this process; its model runs in processes of vLLM's own, one for each of its ranks."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from rlcore.rollout.completions import Completion, Request, kept_candidates, sampled_logprobs

CLOSE_TIMEOUT_S = 10.0
"""An engine leaves within some seconds, its shared memory given back; it is killed where it does not."""
RECEIVER = "rlcore.weight_sync.vllm_receiver.WeightReceiver"
"""What vLLM's workers are extended by, so that weights arrive whole or not at all."""


class EngineError(RuntimeError):
    """The engine is gone, or does not answer: nothing that a retry would mend."""


class Engine(Protocol):
    """One vLLM, or several that share the prompts. Not collective; raises `EngineError` when one is gone."""

    @property
    def names(self) -> Sequence[str]:
        """What messages call each: request i goes to the i-th of them, modulo their number."""
        ...

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Responses to each request. `BadCompletion` for one that cannot be trained on."""
        ...

    def rpc(self, method: str, **kwargs: Any) -> list[Any]:
        """Calls a method of the weight receiver in every worker process of every engine."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix: it was computed with weights that are no longer served."""
        ...

    def check_alive(self) -> None:
        """`EngineError` when a process of an engine of this run's own has ended; from any thread, at any
        time. A call to an engine that has died may not return.
        """
        ...

    def close(self) -> None:
        """Ends the processes that this engine started."""
        ...


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What every engine of a run is told."""

    sampling: Mapping[str, Any]
    """Of vLLM's `SamplingParams`, by its names, plain values; seeds and the number of samples come with each
    request.
    """
    num_candidates: int
    """Candidates asked for at each position, from which kept ids are read; 0: kept ids are not asked for, or
    come as vLLM's own `sampling_mask`.
    """
    lists_all: bool
    """The candidates are the whole vocabulary: no id can be missing among them."""
    sampling_mask: bool
    """Kept ids come as vLLM's `sampling_mask`."""
    start_timeout_s: float
    timeout_s: float

    def params(self, request: Request) -> dict[str, Any]:
        """Keyword arguments of `SamplingParams` for one request."""
        logprobs = {"logprobs": self.num_candidates} if self.num_candidates else {}
        of_request = {"n": request.num_samples, "seed": request.seed, "max_tokens": request.max_new_tokens}
        return {**self.sampling, **logprobs, **of_request, **request.sampling}

    def kept(
        self, logprobs_of: Sequence[Mapping[int, float]], sampling_mask: Sequence[Sequence[int]] | None
    ) -> Sequence[Sequence[int]] | None:
        """The kept ids of one response in what the engine returned of it."""
        if self.sampling_mask:
            return sampling_mask
        if not self.num_candidates:
            return None
        return kept_candidates(logprobs_of, None if self.lists_all else self.num_candidates)


class LocalEngine:
    """`Engine` of this run's own. Its processes end with this one."""

    names = ("vLLM",)

    def __init__(self, folder: str, arguments: Mapping[str, Any], settings: EngineSettings) -> None:
        """Starts vLLM on the model of `folder` (about half a minute). `ValueError` with vLLM's reason when it
        does not start. `arguments`: vLLM's engine arguments by name.
        """
        vllm = import_vllm()
        self._settings = settings
        self._sampling_params = vllm.SamplingParams
        before = set(multiprocessing.active_children())
        # vLLM leaves the files of its sockets behind.
        self._sockets = tempfile.mkdtemp(prefix="rlcore_vllm_")
        try:
            with engine_environment(settings.start_timeout_s, self._sockets):
                if arguments.get("weight_transfer_config", {}).get("backend") == "ipc":
                    # Handles of GPU memory are objects, and go to processes of our own over local sockets.
                    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
                self._llm = vllm.LLM(folder, worker_extension_cls=RECEIVER, **arguments)
        except Exception as error:
            shutil.rmtree(self._sockets, ignore_errors=True)
            raise ValueError(
                f"vLLM did not start on {folder}: {type(error).__name__}: {error}. Its own log above says "
                "why; rollout.vllm.engine_args changes its arguments."
            ) from error
        self._processes = set(multiprocessing.active_children()) - before
        self.rpc("end_with", pid=os.getpid())

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """See `Engine`."""
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        params = [self._sampling_params(**self._settings.params(request)) for request in requests]
        with engine_errors():
            outputs = self._llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
        return [[self._completion(sample) for sample in output.outputs] for output in outputs]

    def _completion(self, sample: Any) -> Completion:
        logprobs_of = [{token: entry.logprob for token, entry in at.items()} for at in sample.logprobs or ()]
        mask = getattr(sample, "sampling_mask", None)
        return Completion(
            ids=list(sample.token_ids),
            logprobs=sampled_logprobs(sample.token_ids, logprobs_of),
            finished=sample.finish_reason == "stop",
            kept=self._settings.kept(logprobs_of, None if mask is None else mask.token_ids),
        )

    def prompt_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Raw logprob of each token of each sequence but its first: the engine's own, before temperature and
        truncation, whatever its `logprobs_mode`.
        """
        params = self._sampling_params(prompt_logprobs=0, max_tokens=1, detokenize=False)
        prompts = [{"prompt_token_ids": list(ids)} for ids in sequences]
        with engine_errors():
            outputs = self._llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
        return [
            [at[token].logprob for token, at in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
            for ids, output in zip(sequences, outputs, strict=True)
        ]

    def rpc(self, method: str, **kwargs: Any) -> list[Any]:
        """See `Engine`."""
        with engine_errors():
            return self._llm.collective_rpc(method, timeout=self._settings.timeout_s, kwargs=kwargs)

    def reset_prefix_cache(self) -> None:
        """See `Engine`."""
        with engine_errors():
            if not self._llm.reset_prefix_cache():
                raise EngineError("vLLM did not reset its prefix cache: requests are still running.")

    def check_alive(self) -> None:
        """See `Engine`."""
        for process in self._processes:
            if not process.is_alive():
                raise EngineError(f"{_DIED} (process {process.pid}, exit code {process.exitcode}).")

    def close(self) -> None:
        """See `Engine`."""
        self._llm.llm_engine.engine_core.shutdown(timeout=CLOSE_TIMEOUT_S)
        shutil.rmtree(self._sockets, ignore_errors=True)


def import_vllm() -> Any:
    """The package, or `ValueError` saying how to install it."""
    try:
        with engine_environment():
            import vllm
    except ImportError as error:
        raise ValueError(
            f"rollout.engine=vllm needs vLLM, which cannot be imported: {error}. Install it with: pip "
            "install 'rlcore-megatron[vllm]' on a GPU machine; without a GPU see the README."
        ) from error
    return vllm


@contextmanager
def engine_errors() -> Iterator[None]:
    """Turns vLLM's report of a dead engine into `EngineError`."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise EngineError(f"{_DIED}.") from error


_DIED = (
    "vLLM's engine process has died. Its own log above says why; killed without a word, it most likely ran "
    "out of memory"
)


# What torchrun tells a rank about itself; vLLM would take it for its own place.
_LAUNCHER = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_LAUNCHER += ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


@contextmanager
def engine_environment(start_timeout_s: float | None = None, sockets: str | None = None) -> Iterator[None]:
    """The environment that vLLM and the processes it starts read, its only way to be told these; ours again
    afterwards. What the user has set of vLLM's stays. `sockets`: the folder of its sockets.
    """
    before = dict(os.environ)
    for name in list(os.environ):
        if name in _LAUNCHER or name.startswith("TORCHELASTIC_"):
            del os.environ[name]
    # Not fork: this process has transports and, on a GPU, a context that a fork would break.
    os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "spawn"
    if sockets is not None:
        os.environ["VLLM_RPC_BASE_PATH"] = sockets
    if start_timeout_s is not None:
        os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = str(max(1, int(start_timeout_s)))
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            # vLLM reads its own settings later, too; the sockets are this engine's alone.
            if not name.startswith("VLLM_") or name == "VLLM_RPC_BASE_PATH":
                del os.environ[name]
        os.environ.update(before)


_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    # GiB of key/value cache of a CPU engine, where vLLM would take half of the machine.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # CPU ranks share the cores with the engine: nobody is bound to one.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    # torch renames collectives that vLLM still calls by their old names.
    "PYTHONWARNINGS": "ignore::FutureWarning",
}
