"""`rlcore check`: one layout against one process, on ranks of its own; a table and an exit code."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.config import RunConfig

MATCH, MISMATCH = 0, 1
_WIDTH = 130
_SIZES = ("tp", "pp", "cp", "dp")
_LAYOUT = ("tp", "pp", "vpp", "cp")
_GIVEN = (*_SIZES, "vpp", "ep")
_DEMO = "demo"
"""The config of a command line that names none."""
# Lets a config with cp > 1 through its rules; the check chooses its own budget for its tiny batch.
_PLACEHOLDER_BUDGET = 2**31


def add_check_parser(commands: Any) -> None:
    """Registers the command."""
    check = commands.add_parser(
        "check",
        help="compare a layout with one process, on a tiny model of a config's architecture",
        usage="rlcore check [options] [key=value ...]",
        epilog="Exit codes: 0 the layout matches, 1 it does not, 2 it cannot be built.",
    )
    check.add_argument("--config-name", default=_DEMO, help="the run's config, without .yaml (demo)")
    check.add_argument("--config-dir", help="folder of your own configs (those that come with the package)")
    for name, text in (
        ("tp", "tensor parallel size"),
        ("pp", "pipeline parallel size"),
        ("vpp", "virtual stages a pipeline rank"),
        ("cp", "context parallel size; packs"),
        ("dp", "data parallel size; with --ep as large as that needs"),
        ("ep", "expert parallel size; gives a dense model experts"),
    ):
        check.add_argument(f"--{name}", type=int, help=f"{text} (1; without any of the six, the config's)")
    check.add_argument("--sp", action="store_true", help="sequence parallelism")
    check.add_argument("--microbatches", type=int, help="of each data-parallel rank (2; with --vpp, pp)")
    check.add_argument("--packed", action="store_true", help="packed rows, as train.token_budget gives")
    check.add_argument(
        "--token-budget", type=int, help="tokens of a packed row; implies --packed (fits --microbatches)"
    )
    check.add_argument("--json", metavar="FILE", help="also write the table to this file")
    check.add_argument("--result", help=argparse.SUPPRESS)
    check.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)


def run_check(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Checks the layout on ranks of this machine, or is one of them. Returns the exit code."""
    from rlcore.cli import launch  # imports main, which imports this file

    launch.silence_dependencies()
    launch.join_slurm(os.environ)
    if launch.is_rank(os.environ):
        return _run_rank(args)
    check_json_file(args.json)
    config, layout = check_problem_of(args)
    with tempfile.TemporaryDirectory(prefix="rlcore_check_") as folder:
        result = Path(folder) / "result.json"
        code = launch.start_ranks([*words, "--result", str(result)], layout.world_size)
        if code:
            return code
        lines = json.loads(result.read_text(encoding="utf-8"))
    return report(lines, describe(config, layout), args.json)


def check_problem_of(args: argparse.Namespace) -> tuple[RunConfig, Any]:
    """The tiny config and the `CheckLayout` that the command line asks for. `ValueError` for a layout that
    cannot be built, naming why.
    """
    from megatron_worker.check_problem import CheckLayout, run_architecture, tiny_config
    from rlcore.cli.compose import compose_run_config

    check_layout_given_once(args)
    words = [*args.overrides, *layout_words(args)]
    run = compose_run_config(args.config_name, words, args.config_dir)
    sizes = {name: getattr(run.parallel, name) for name in _LAYOUT}
    replica = sizes["tp"] * sizes["pp"] * sizes["cp"]
    # A config's own layout fills its nproc; one given by sizes has one replica unless --dp or --ep says more.
    gives = _gives_layout(args)
    dp = _data_parallel_size(args) if gives else _run_data_parallel_size(run, replica)
    ep = _size(args, "ep") if gives else run.parallel.ep
    layout = CheckLayout(
        **sizes,
        dp=dp,
        ep=ep,
        adds_experts=ep > 1 and run_architecture(run).num_moe_experts is None,
        sequence_parallel=run.parallel.sequence_parallel,
        num_microbatches=_microbatches(args, run.parallel.microbatch_multiple),
        packed=args.packed or run.train.token_budget is not None,
        token_budget=args.token_budget,
    )
    return tiny_config(run, layout), layout


def check_layout_given_once(args: argparse.Namespace) -> None:
    """`ValueError` for a layout key beside the options that say the whole layout: it would do nothing."""
    options = {f"parallel.{name}": f"--{name}" for name in (*_LAYOUT, "ep")}
    options["parallel.sequence_parallel"] = "--sp"
    for word in args.overrides:
        key = word.lstrip("+").partition("=")[0]
        says_sp = args.sp and key == "parallel.sequence_parallel"
        if key in options and (says_sp or _gives_layout(args)):
            raise ValueError(
                f"{word}: the layout is given by options here, which say all of it. Write {options[key]} "
                "instead, or leave out every one of --tp, --pp, --vpp, --cp, --dp, --ep and --sp."
            )


def check_json_file(path: str | None) -> None:
    """`ValueError` for a table that could not be written: before any rank starts, not after the work."""
    if path is not None and (Path(path).is_dir() or not Path(path).resolve().parent.is_dir()):
        raise ValueError(f"--json {path}: expected a file in a folder that exists.")


def layout_words(args: argparse.Namespace) -> list[str]:
    """The layout as `key=value`, so that the config's own rules judge it. A layout given by any size has 1
    for those left out and no sequence parallelism unless asked for. EP is judged by the tiny model, which has
    experts where the config's has none.
    """
    words = []
    if _gives_layout(args):
        words = [f"parallel.{name}={_size(args, name)}" for name in _LAYOUT]
        words += ["parallel.ep=1", f"parallel.sequence_parallel={str(args.sp).lower()}"]
        words += _layers_of_the_demo(args)
    elif args.sp:
        words.append("parallel.sequence_parallel=true")
    if args.packed or args.token_budget is not None or (_gives_layout(args) and _size(args, "cp") > 1):
        words.append(f"train.token_budget={_PLACEHOLDER_BUDGET}")
    return words


def report(lines: Sequence[Mapping[str, Any]], title: str, json_file: str | None = None) -> int:
    """Prints the table, writes it where asked; returns 0 where every line is within its tolerance, else 1.

    `lines`: fields of `megatron_worker.layout_check.Difference`, and `ok`.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    # In a narrow terminal names and notes fold; a number cut short would say nothing.
    table.add_column("quantity", overflow="fold")
    table.add_column("largest difference", justify="right", no_wrap=True)
    table.add_column("tolerance", justify="right", no_wrap=True)
    table.add_column("ok", no_wrap=True)
    table.add_column("note", overflow="fold", min_width=12)
    for line in lines:
        said = "[green]yes[/green]" if line["ok"] else "[bold red]NO[/bold red]"
        table.add_row(
            line["quantity"], f"{line['largest']:.1e}", f"{line['tolerance']:.1e}", said, line["note"]
        )
    console = Console()
    # A file or a pipe has no width of its own, and names must not be cut.
    (console if console.is_terminal else Console(width=_WIDTH)).print(table)
    if json_file is not None:
        # JSON has no infinity.
        finite = [
            {**line, "largest": line["largest"] if line["largest"] < math.inf else None} for line in lines
        ]
        Path(json_file).write_text(
            json.dumps({"layout": title, "lines": finite}, indent=1) + "\n", encoding="utf-8"
        )
    wrong = [line["quantity"] for line in lines if not line["ok"]]
    if not wrong:
        print("the layout matches one process.")
        return MATCH
    print(f"MISMATCH: {len(wrong)} of {len(lines)} quantities differ from one process by more than rounding.")
    return MISMATCH


def describe(config: RunConfig, layout: Any) -> str:
    """One line: the layout and the tiny model."""
    shown = [name for name in ("tp", "pp", "vpp", "cp", "dp") if name != "vpp" or layout.vpp > 1]
    sizes = " x ".join(f"{name.upper()}{getattr(layout, name)}" for name in shown)
    model, budget = config.model, config.train.token_budget
    rows = "padded rows" if budget is None else f"packed rows of at most {budget} tokens"
    if layout.token_budget is None:
        rows = f"{layout.num_microbatches} microbatches, {rows}"
    tied = "tied" if model.tie_word_embeddings else "untied"
    sizes += f", EP{layout.ep}" if layout.ep > 1 else ""
    experts = ""
    if model.num_moe_experts is not None:
        experts = f", {model.num_moe_experts} experts, {model.moe_router_topk} a token"
        experts += " (the config's model is dense and has none)" if layout.adds_experts else ""
    return (
        f"{sizes}{' + sequence parallel' if layout.sequence_parallel else ''}, {rows}; "
        f"{model.num_layers} layers, {model.num_attention_heads} heads on {model.num_query_groups} "
        f"key/value heads, {tied} head, {'' if model.qkv_bias else 'no '}QKV bias"
        f"{experts}"
    )


def _run_rank(args: argparse.Namespace) -> int:
    """One rank: measures, and rank 0 hands the table to the launcher, or prints it where there is none."""
    from rlcore.cli import launch

    try:
        config, layout = check_problem_of(args)
        num_processes = launch.world_size(os.environ)
        if num_processes != layout.world_size:
            raise ValueError(
                f"{num_processes} processes were started and the layout takes {layout.world_size}. Start "
                "so many, or change --tp, --pp, --cp, --dp."
            )
        from megatron_worker.layout_check import check_on_rank

        differences = check_on_rank(config, layout)
    except Exception as error:
        return launch.report_rank_error(error, launched=args.as_rank)
    lines = [{**dataclasses.asdict(line), "ok": line.ok} for line in differences]
    is_first = os.environ["RANK"] == "0"
    if args.as_rank:
        if is_first:
            Path(args.result).write_text(json.dumps(lines), encoding="utf-8")
        # A mismatch is a result, not a failure of the rank.
        return MATCH
    if is_first:
        return report(lines, describe(config, layout), args.json)
    return MATCH if all(line["ok"] for line in lines) else MISMATCH


def _gives_layout(args: argparse.Namespace) -> bool:
    return any(getattr(args, name) is not None for name in _GIVEN)


def _data_parallel_size(args: argparse.Namespace) -> int:
    """What --dp says, else the least whose data x context parallel ranks EP divides."""
    if args.dp is not None:
        return args.dp
    ep = max(1, _size(args, "ep"))
    return ep // math.gcd(ep, max(1, _size(args, "cp")))


def _run_data_parallel_size(run: RunConfig, replica: int) -> int:
    """Replicas of a config's own layout on the processes that there are, or that it asks for. `ValueError`
    where they do not factor; a config that leaves nproc at 1 is for a launcher of its own and has one.
    """
    from rlcore.cli import launch
    from rlcore.config_rules import data_parallel_size

    if launch.is_rank(os.environ):
        return data_parallel_size(run, launch.world_size(os.environ))
    return data_parallel_size(run, replica if run.nproc == 1 else run.nproc)


def _microbatches(args: argparse.Namespace, multiple: int) -> int:
    """Two unless asked for, raised to what virtual stages take."""
    return -(-2 // multiple) * multiple if args.microbatches is None else args.microbatches


def _layers_of_the_demo(args: argparse.Namespace) -> list[str]:
    """The demo's two layers make no four stages. The check's model is a tiny one of its own anyway, so where
    no other config and no model is asked for, there are as many layers as virtual stages.
    """
    has_model = any(word.lstrip("+").startswith("model.") for word in args.overrides)
    if _size(args, "vpp") == 1 or args.config_name != _DEMO or has_model:
        return []
    return [f"model.num_layers={_size(args, 'pp') * _size(args, 'vpp')}"]


def _size(args: argparse.Namespace, name: str) -> int:
    value = getattr(args, name)
    return 1 if value is None else value
