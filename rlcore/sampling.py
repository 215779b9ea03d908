"""What the sampler did to the logits, as plain numbers: the one description both engines share.

Source of the rules: vLLM's sampler (order, off values, the raise of tiny temperatures).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

Ties = Literal["share", "all"]

# A cut that float32 rounding could move counts as an equality: relative width of that band.
CUT_SLACK = 1e-6
# Below this vLLM decodes greedily: there is no distribution to score.
GREEDY_TEMPERATURE = 1e-5
# Range of presence and frequency penalties that vLLM accepts: at most this much either way.
MAX_PENALTY = 2.0
# vLLM raises temperatures between GREEDY_TEMPERATURE and this value to this value.
MIN_TEMPERATURE = 1e-2


# The penalties of a spec, and the value that switches each off.
PENALTIES_OFF = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass(frozen=True, kw_only=True)
class SamplingSpec:
    """The sampling distribution of one request. Order: penalties, temperature, min-p, top-k, top-p on what
    top-k left.

    Raises `ValueError` on construction for a value no sampler accepts; the message names the field.
    """

    temperature: float = 1.0
    """Divides the logits. Below 1e-5 the sampler is greedy: refused. 1e-5 <= T < 0.01 acts as 0.01, with a
    warning.
    """
    top_k: int | None = None
    """Number of most likely ids kept. None, 0 and -1 are off; so is any value >= the vocabulary size."""
    top_p: float | None = None
    """Nucleus mass in (0, 1]. None and 1.0 are off."""
    min_p: float = 0.0
    """Ids less likely than min_p times the most likely one are dropped. In [0, 1]; 0 is off."""
    ties: Ties = "share"
    """Ids tied at the cut: `share` keeps exactly k (or the minimal count) of weight, spread evenly over the
    tied group; `all` keeps the whole group with full weight.
    """
    repetition_penalty: float = 1.0
    """Of ids seen in the prompt or the response: divides positive logits, multiplies others. 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of ids seen in the response. In [-2, 2]; 0 is off."""
    frequency_penalty: float = 0.0
    """Subtracted as often as the id stands in the response. In [-2, 2]; 0 is off."""

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, low=0.0, high=math.inf)
        if self.temperature < GREEDY_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature} is greedy decoding for the sampler (below "
                f"{GREEDY_TEMPERATURE}): "
                "there is no distribution to train on. Set temperature >= 0.01."
            )
        if self.temperature < MIN_TEMPERATURE:
            warnings.warn(
                f"temperature={self.temperature} acts as {MIN_TEMPERATURE}: the sampler raises it, so the "
                "trainer does.",
                stacklevel=3,
            )
        if self.top_k is not None:
            if isinstance(self.top_k, bool) or not isinstance(self.top_k, int):
                raise ValueError(f"top_k={self.top_k!r}: expected an integer or None (None, 0, -1 are off).")
            if self.top_k < -1:
                raise ValueError(f"top_k={self.top_k}: expected None, 0 or -1 (off), or a count >= 1.")
        if self.top_p is not None:
            _check_number("top_p", self.top_p, low=0.0, high=1.0)
            if self.top_p <= 0.0:
                raise ValueError(f"top_p={self.top_p}: expected a mass in (0, 1]; 1.0 or None is off.")
        _check_number("min_p", self.min_p, low=0.0, high=1.0)
        if self.ties not in ("share", "all"):
            raise ValueError(f"ties={self.ties!r}: expected 'share' or 'all'.")
        _check_number("repetition_penalty", self.repetition_penalty, low=0.0, high=math.inf)
        if self.repetition_penalty <= 0.0:
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty}: expected a number > 0; 1.0 is off."
            )
        _check_number("presence_penalty", self.presence_penalty, low=-MAX_PENALTY, high=MAX_PENALTY)
        _check_number("frequency_penalty", self.frequency_penalty, low=-MAX_PENALTY, high=MAX_PENALTY)

    @property
    def effective_temperature(self) -> float:
        """The temperature both engines really divide by."""
        return max(float(self.temperature), MIN_TEMPERATURE)

    @property
    def effective_top_k(self) -> int | None:
        """`top_k`, or None when it is switched off by its value."""
        return None if self.top_k in (None, 0, -1) else self.top_k

    @property
    def effective_top_p(self) -> float | None:
        """`top_p`, or None when it is switched off by its value."""
        return None if self.top_p is None or self.top_p >= 1.0 else float(self.top_p)

    @property
    def truncates(self) -> bool:
        """Can a position have an id outside its support? A property of the spec alone, so the same on every
        rank.
        """
        return self.effective_top_k is not None or self.effective_top_p is not None or self.min_p > 0.0

    @property
    def penalises(self) -> bool:
        """Do logits depend on the tokens before a position?"""
        return bool(self.penalty_fields)

    @property
    def penalty_fields(self) -> str:
        """The penalties that are on, as `field=value`, for messages."""
        on = {name: getattr(self, name) for name, off in PENALTIES_OFF.items() if getattr(self, name) != off}
        return ", ".join(f"{name}={value}" for name, value in on.items())

    def without_penalties(self) -> SamplingSpec:
        """The distribution of logits that are penalised already."""
        return replace(self, **PENALTIES_OFF) if self.penalises else self

    @property
    def top_p_cut(self) -> float:
        """Mass which the ids above must not reach for an id to be kept: `top_p` less the rounding band.

        The band is relative to the smaller side of the cut, so a nucleus close to 1 keeps its tail. 1.0 when
        off.
        """
        p = self.effective_top_p
        return 1.0 if p is None else p - CUT_SLACK * min(p, 1.0 - p)

    @property
    def min_p_cut(self) -> float:
        """Log of the smallest kept probability relative to the largest, less the rounding band. -inf when
        off.
        """
        return math.log(self.min_p * (1.0 - CUT_SLACK)) if self.min_p > 0.0 else -math.inf

    def unfiltered(self) -> SamplingSpec:
        """The same penalties and temperature without truncation (what a reference policy is scored under)."""
        penalties = {name: getattr(self, name) for name in PENALTIES_OFF}
        return SamplingSpec(temperature=self.effective_temperature, ties=self.ties, **penalties)

    def to_vllm(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's `SamplingParams` that draw from this distribution and return its
        logprob.

        The engine must run with `logprobs_mode="processed_logprobs"`; `logprobs=0` returns the sampled id's
        entry.
        """
        penalties = {name: float(getattr(self, name)) for name in PENALTIES_OFF} if self.penalises else {}
        return {
            "temperature": self.effective_temperature,
            "top_k": self.effective_top_k or 0,
            "top_p": self.effective_top_p or 1.0,
            "min_p": float(self.min_p),
            "logprobs": 0,
            **penalties,
        }


@dataclass(frozen=True, kw_only=True)
class RowSampling:
    """One sampling distribution per row, as tensors, for batches that mix requests. Build it with `of`, at
    the border.

    The flags say what any row needs, so that no tensor has to be read back in the op.
    """

    temperature_t: torch.Tensor
    """`[t]` float64, as all that is not a count: float64 logits then see what a `SamplingSpec` says."""
    top_k_t: torch.Tensor
    """`[t]` int64; 0 is off."""
    top_p_cut_t: torch.Tensor
    """`[t]` float64: `SamplingSpec.top_p_cut`; inf is off."""
    min_p_cut_t: torch.Tensor
    """`[t]` float64: `SamplingSpec.min_p_cut`; -inf is off."""
    max_top_k: int
    """Largest top-k of any row; 0 when none has one."""
    all_top_k: bool
    """Does every row have a top-k?"""
    any_top_p: bool
    any_min_p: bool
    ties: Ties = "share"
    repetition_penalty_t: torch.Tensor | None = None
    """`[t]` float64; None, as all three then are: no row has a penalty."""
    presence_penalty_t: torch.Tensor | None = None
    """`[t]` float64."""
    frequency_penalty_t: torch.Tensor | None = None
    """`[t]` float64."""

    @staticmethod
    def of(specs: Sequence[SamplingSpec], device: torch.device | str = "cpu") -> RowSampling:
        """One row per spec. Raises `ValueError` when there is none, or when they differ in `ties`."""
        if not specs or len({spec.ties for spec in specs}) != 1:
            raise ValueError("expected at least one SamplingSpec, and the same `ties` in all of them.")
        top_ks = [spec.effective_top_k or 0 for spec in specs]

        def tensor(values: list, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        penalties = {
            f"{name}_t": tensor([getattr(spec, name) for spec in specs], torch.float64)
            for name in PENALTIES_OFF
            if any(spec.penalises for spec in specs)
        }
        cuts = [math.inf if spec.effective_top_p is None else spec.top_p_cut for spec in specs]
        return RowSampling(
            temperature_t=tensor([spec.effective_temperature for spec in specs], torch.float64),
            top_k_t=tensor(top_ks, torch.int64),
            top_p_cut_t=tensor(cuts, torch.float64),
            min_p_cut_t=tensor([spec.min_p_cut for spec in specs], torch.float64),
            max_top_k=max(top_ks),
            all_top_k=all(top_ks),
            any_top_p=any(spec.effective_top_p is not None for spec in specs),
            any_min_p=any(spec.min_p > 0 for spec in specs),
            ties=specs[0].ties,
            **penalties,
        )

    @property
    def num_rows(self) -> int:
        """t."""
        return self.temperature_t.shape[0]

    @property
    def truncates(self) -> bool:
        """Can any row drop an id?"""
        return self.max_top_k > 0 or self.any_top_p or self.any_min_p

    @property
    def penalises(self) -> bool:
        """Has any row a penalty?"""
        return bool(self.penalty_fields)

    @property
    def penalty_fields(self) -> str:
        """The penalties that some row may have, for messages."""
        return ", ".join(name for name in PENALTIES_OFF if getattr(self, f"{name}_t") is not None)

    def without_penalties(self) -> RowSampling:
        """The distributions of logits that are penalised already."""
        return replace(self, **{f"{name}_t": None for name in PENALTIES_OFF})

    def rows(self, chunk: slice) -> RowSampling:
        """The parameters of some rows; the flags stay those of the whole."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name.endswith("_t")}
        return replace(self, **{name: v[chunk] for name, v in tensors.items() if v is not None})


def _check_number(name: str, value: Any, *, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}={value!r}: expected a number in [{low}, {high}].")
    if math.isnan(value) or math.isinf(value) or not low <= value <= high:
        raise ValueError(f"{name}={value}: expected a finite number in [{low}, {high}].")
