"""Pictures of a run: the reward curve, and why tokens left the loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcore.masks import WHY_LEFT

WINDOW = 10
"""Steps averaged along the reward curve, and at either end of a run's report."""
REWARD_FILE = "reward.png"
TOKENS_FILE = "tokens.png"

# One colour for what trains, warm ones for what was lost on the way, greys for what never counts.
_COLOURS = {
    "tokens/trained": "#2c7fb8",
    "tokens/dropped_keep": "#fdae61",
    "tokens/dropped_keep_old": "#f46d43",
    "tokens/dropped_importance": "#d73027",
    "tokens/dropped_sequence": "#7b3294",
    "tokens/sample_masked": "#969696",
    "tokens/prompt": "#d9d9d9",
}


def draw_pictures(records: Sequence[dict[str, float]], folder: Path) -> list[Path]:
    """Every picture of the run, as PNG files in its folder; returns their paths."""
    paths = [draw_reward(records, folder / REWARD_FILE)]
    # A run whose updates were all empty or refused has counted nothing.
    counted = [record for record in records if WHY_LEFT[0] in record]
    return [*paths, draw_tokens(counted, folder / TOKENS_FILE)] if counted else paths


def draw_reward(records: Sequence[dict[str, float]], path: Path) -> Path:
    """Mean reward by step, with its running mean."""
    steps = [record["step"] + 1 for record in records]
    rewards = [record["reward/mean"] for record in records]
    running = [
        sum(part) / len(part)
        for i in range(len(rewards))
        if (part := rewards[max(0, i + 1 - WINDOW) : i + 1])
    ]
    figure, axes = _figure("mean reward")
    axes.plot(steps, rewards, color="tab:blue", alpha=0.35, linewidth=1, label="step")
    axes.plot(steps, running, color="tab:blue", linewidth=2, label=f"mean of the last {WINDOW} steps")
    axes.legend(loc="best", frameon=False)
    figure.savefig(path, dpi=130)
    return path


def draw_tokens(records: Sequence[dict[str, float]], path: Path) -> Path:
    """The tokens of the last update of each step by the reason they left, stacked up to all of them."""
    figure, axes = _figure("tokens of an update")
    token_layers(records, axes)
    handles, names = axes.get_legend_handles_labels()
    # From top to bottom, as the layers lie.
    axes.legend(handles[::-1], names[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, dpi=130)
    return path


def token_layers(records: Sequence[dict[str, float]], axes: Any = None) -> list[Any]:
    """The layers of that picture, lowest first, drawn on `axes`."""
    axes = _figure("")[1] if axes is None else axes
    steps = [record["step"] + 1 for record in records]
    counts = {name: [record[name] for record in records] for name in WHY_LEFT}
    total = sum(sum(values) for values in counts.values())
    labels = [
        f"{name.removeprefix('tokens/').replace('_', ' ')}: {sum(values) / total:.2%}"
        for name, values in counts.items()
    ]
    colours = [_COLOURS[name] for name in WHY_LEFT]
    axes.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)
    return axes.stackplot(steps, list(counts.values()), labels=labels, colors=colours, step="mid")


def _figure(what: str) -> tuple[Any, Any]:
    """A figure without a display, and its axes over steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_xlabel("step")
    axes.set_ylabel(what)
    axes.grid(alpha=0.3)
    return figure, axes
