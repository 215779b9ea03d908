"""How near each pass over the logits comes to the memory's speed: GB/s of every pass beside those of a copy.

`python tools/bench/gpu_bandwidth.py [--tokens T] [--vocab V] [--dtype D] [--device cuda] [--backend auto]`

The times are medians. Bytes are those that a pass has to move: the logits once, and for the gradient once
more.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable

import torch

from rlcore.ops.passes import Passes, Wanted, compute_dtype, select_passes

REPEATS = 20
# At temperature 1 the Triton passes divide nothing.
TEMPERATURES = (1.0, 0.7)


def main(words: list[str]) -> int:
    """Prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32", "float64"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args(words)
    generator = torch.Generator(device=options.device).manual_seed(0)
    logits_tv = torch.empty(
        (options.tokens, options.vocab), dtype=getattr(torch, options.dtype), device=options.device
    ).normal_(0.0, 3.0, generator=generator)
    passes = select_passes(options.backend, logits_tv)
    read_bytes = logits_tv.numel() * logits_tv.element_size()

    copy_speed = 2 * read_bytes / seconds_of(logits_tv.clone, options.device)
    print(f"{options.tokens} x {options.vocab} {options.dtype} on {options.device}, passes: {passes.name}")
    print(f"{'':32}{'ms':>9}{'GB/s':>9}{'of copy':>9}")
    print(f"{'copy':32}{2 * read_bytes / copy_speed * 1e3:9.3f}{copy_speed / 1e9:9.0f}{1:9.0%}")
    for temperature in TEMPERATURES:
        for name, (run, factor) in pass_calls(passes, logits_tv, temperature).items():
            seconds = seconds_of(run, options.device)
            speed = factor * read_bytes / seconds
            label = f"{name}, T={temperature}"
            print(f"{label:32}{seconds * 1e3:9.3f}{speed / 1e9:9.0f}{speed / copy_speed:9.0%}")
    return 0


def pass_calls(
    passes: Passes, logits_tv: torch.Tensor, temperature: float
) -> dict[str, tuple[Callable[[], torch.Tensor], int]]:
    """Name -> (the call, how often it moves the logits' bytes)."""
    dtype = compute_dtype(logits_tv)
    temperature_t = torch.full((logits_tv.shape[0],), temperature, dtype=dtype, device=logits_tv.device)
    nothing_t = torch.full_like(temperature_t, math.inf)
    max_t = passes.block_maxima(logits_tv, None, temperature_t, nothing_t).amax(dim=1)
    log_t = passes.exp_sums(logits_tv, None, temperature_t, max_t, nothing_t, False)[:, 0].log().to(dtype)
    threshold_t, ones_t, zeros_t = max_t - 6.0, torch.ones_like(max_t), torch.zeros_like(max_t)
    pivot_tp = torch.stack([max_t - 4.0, threshold_t, max_t - 8.0], dim=1)
    # Upstream gradients of the truncated logprob alone, as in training, and of everything.
    one_tc = torch.stack([log_t - 0.1, -ones_t, log_t, *[zeros_t] * 5], dim=1)
    all_tc = torch.stack([log_t - 0.1, -ones_t, log_t, ones_t, ones_t, log_t, ones_t, log_t], dim=1)

    def run(function: Callable[..., torch.Tensor], *arguments: object) -> Callable[[], torch.Tensor]:
        return lambda: function(logits_tv, None, temperature_t, *arguments)

    return {
        "block_maxima": (run(passes.block_maxima, nothing_t), 1),
        "exp_sums": (run(passes.exp_sums, max_t, threshold_t, False), 1),
        "exp_sums, entropy": (run(passes.exp_sums, max_t, threshold_t, True), 1),
        "sums_above": (run(passes.sums_above, max_t, threshold_t, False), 1),
        "pivot_sums, 3 pivots": (run(passes.pivot_sums, max_t, pivot_tp), 1),
        "gradient of the logprob": (
            run(passes.gradient, max_t, threshold_t, ones_t, one_tc, Wanted(True, False, False)),
            2,
        ),
        "gradient of everything": (
            run(passes.gradient, max_t, threshold_t, ones_t, all_tc, Wanted(True, True, True)),
            2,
        ),
    }


def seconds_of(run: Callable[[], torch.Tensor], device: str) -> float:
    """Median of REPEATS runs after one that compiles."""
    run()
    times = []
    for _ in range(REPEATS):
        wait(device)
        started = time.perf_counter()
        run()
        wait(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def wait(device: str) -> None:
    """Until the device has finished: the clock is the host's."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
