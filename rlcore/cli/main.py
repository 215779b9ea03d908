"""Arguments, exit codes and error messages of the `rlcore` command.

Exit codes: 0 done, 2 something the user can fix (one line says what), 1 anything else, 130 interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import traceback
import warnings
from collections.abc import Sequence

from rlcore.cli.bench_command import add_bench_parser
from rlcore.cli.check_command import add_check_parser
from rlcore.cli.lint_command import add_lint_parser

USER_ERROR, OTHER_ERROR, INTERRUPTED = 2, 1, 130


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command and leaves with its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = parse(words)
    try:
        if args.command == "train":
            code = run_train(args, words)
        elif args.command == "check":
            from rlcore.cli.check_command import run_check

            code = run_check(args, words)
        elif args.command == "bench":
            from rlcore.cli.bench_command import run_bench

            code = run_bench(args, words)
        elif args.command == "lint":
            from rlcore.cli.lint_command import run_lint

            code = run_lint(args)
        else:
            from rlcore.cli.plot import plot

            plot(args.run)
            code = 0
    except KeyboardInterrupt:
        code = INTERRUPTED
    except ValueError as error:
        print(f"rlcore: error: {error}", file=sys.stderr)
        code = USER_ERROR
    except Exception:
        traceback.print_exc()
        code = OTHER_ERROR
    sys.stdout.flush()
    sys.stderr.flush()
    raise SystemExit(code)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The parsed command line; leaves with a usage message where it makes no sense."""
    parser = argparse.ArgumentParser(prog="rlcore", description="RL training on Megatron-core.")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="run a config", usage="rlcore train [options] [key=value ...]")
    train.add_argument(
        "--config-name", default="demo", help="file of the config folder, without .yaml (demo)"
    )
    train.add_argument("--config-dir", help="folder of your own configs (those that come with the package)")
    train.add_argument("--nproc", type=int, help="processes to start on this machine (the config's nproc)")
    train.add_argument("--overwrite", action="store_true", help="replace an earlier run in run_dir")
    train.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    add_check_parser(commands)
    add_bench_parser(commands)
    add_lint_parser(commands)
    plot = commands.add_parser("plot", help="draw the pictures of a run again")
    plot.add_argument("run", help="run folder")
    # Options and key=value words may come in any order, which argparse's positional lists do not allow.
    args, rest = parser.parse_known_args(words)
    options = [word for word in rest if word.startswith("-")]
    if options or (rest and args.command not in ("train", "check", "lint")):
        parser.error(f"unrecognized arguments: {' '.join(options or rest)}")
    args.overrides = rest
    return args


def run_train(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Checks the config, then starts the ranks, or is one of them. Returns the exit code."""
    from rlcore.cli import launch
    from rlcore.cli.compose import compose_run_config
    from rlcore.cli.lint_command import lint_before_start
    from rlcore.config_rules import check_model_folder, check_world
    from rlcore.run_log import check_run_folder

    launch.join_slurm(os.environ)
    is_rank = launch.is_rank(os.environ)
    # The linter says it, and once.
    warnings.filterwarnings("ignore", message="temperature=.* acts as", category=UserWarning)
    try:
        config = compose_run_config(args.config_name, args.overrides, args.config_dir)
        if is_rank:
            num_processes = launch.world_size(os.environ)
        else:
            num_processes = config.nproc if args.nproc is None else args.nproc
        check_world(config, num_processes)
        # What the run folder keeps is the run as it is, wherever the number of ranks came from.
        config = dataclasses.replace(config, nproc=num_processes)
        check_model_folder(config)
        check_run_folder(config, args.overwrite)
        # The launcher speaks for its ranks, rank 0 for those of a launcher of your own.
        speaks = not args.as_rank and (not is_rank or os.environ["RANK"] == "0")
        lint_before_start(config, speaks)
        if is_rank:
            from rlcore.cli.train_command import train_rank

            train_rank(config)
            return 0
    except (Exception, SystemExit) as error:  # a task of the user's own may call sys.exit
        if not is_rank:
            raise
        return launch.report_rank_error(error, launched=args.as_rank)
    return launch.start_ranks(words, num_processes)
