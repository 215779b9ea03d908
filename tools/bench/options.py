"""What a benchmark run was asked to do, checked before any process starts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

CASES = ("op", "scaling", "fused", "replay", "loss", "transport", "train_step", "real")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Tokens a call where none are asked for: what the case is about, at a size that ends within minutes.
DEFAULT_TOKENS = {
    "op": 256,
    "scaling": 32,
    "fused": 1024,
    "replay": 256,
    "loss": 131_072,
    "transport": 131_072,
    "train_step": 1024,
    "real": 256,
}
DEFAULT_REPEATS = {"op": 4, "scaling": 3, "fused": 2, "replay": 3, "real": 4}
OTHER_REPEATS = 10


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """One run of one case. Build it with `of`."""

    case: str
    tokens: int
    """t: tokens a call."""
    vocab: int
    """V, the whole vocabulary."""
    tp: int
    """Ranks that hold a shard of it each."""
    dtype: torch.dtype
    device: str
    repeats: int
    backend: str
    """As `vocab_parallel_logprob` takes it."""

    @staticmethod
    def of(
        case: str = "op",
        tokens: int | None = None,
        vocab: int = 151_936,
        tp: int = 2,
        repeats: int | None = None,
        **names: str,
    ) -> BenchOptions:
        """Fills in the case's own sizes; `names`: dtype, device, backend. `ValueError` says what is wrong."""
        dtype, device = names.get("dtype", "float32"), names.get("device", "cpu")
        if case not in CASES:
            raise ValueError(f"--case {case}: expected one of {', '.join(CASES)}.")
        if dtype not in DTYPES:
            raise ValueError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}.")
        if device == "cuda" and torch.cuda.device_count() < tp:
            raise ValueError(
                f"--device cuda with --tp {tp}: expected a CUDA device a rank, found "
                f"{torch.cuda.device_count()}. Set --tp 1 or --device cpu."
            )
        if device not in ("cpu", "cuda"):
            raise ValueError(f"--device {device}: expected cpu or cuda.")
        tokens = DEFAULT_TOKENS[case] if tokens is None else tokens
        repeats = DEFAULT_REPEATS.get(case, OTHER_REPEATS) if repeats is None else repeats
        for name, value in (("tokens", tokens), ("tp", tp), ("repeats", repeats)):
            if value < 1:
                raise ValueError(f"--{name} {value}: expected at least 1.")
        if vocab < max(2 * tp, 64):
            raise ValueError(f"--vocab {vocab}: expected at least {max(2 * tp, 64)}.")
        return BenchOptions(
            case=case,
            tokens=tokens,
            vocab=vocab,
            tp=tp,
            dtype=DTYPES[dtype],
            device=device,
            repeats=repeats,
            backend=names.get("backend", "auto"),
        )
