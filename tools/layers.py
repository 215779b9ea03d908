"""Import rules and sizes of the code, as tables. `python tools/layers.py [ROOT]`: exit 1 and one line per
violation.

Rules say which of our modules a module may import (standard library, torch and numpy are free), and which
third-party packages may be imported where. An import inside a function is lazy; optional packages must be.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CORE = (
    "rlcore.sampling",
    "rlcore.masks",
    "rlcore.groups",
    "rlcore.collectives",
    "rlcore.batch",
    "rlcore.metrics",
    "rlcore.sampling_mask",
    "rlcore.waiting",
)
INTERFACES = (
    "rlcore.interfaces",
    "rlcore.config",
    "rlcore.config_parse",
    "rlcore.config_rollout",
    "rlcore.config_rules",
    "rlcore.config_rules_advantage",
    "rlcore.config_rules_experts",
    "rlcore.config_rules_loss",
    "rlcore.config_rules_rollout",
)
LINT = ("rlcore.lint", "rlcore.lint_bias", "rlcore.lint_finding", "rlcore.lint_rules", "rlcore.lint_sources")

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    # module or package -> prefixes of ours it may import, itself always included; the longest match counts
    "rlcore.sampling": (),
    "rlcore.transport_errors": (),
    "rlcore.collectives": ("rlcore.transport_errors",),
    "rlcore.groups": ("rlcore.collectives",),
    "rlcore.waiting": ("rlcore.collectives",),
    "rlcore.batch": ("rlcore.sampling_mask",),
    "rlcore.sampling_mask": (),
    "rlcore.batch_import": ("rlcore.batch",),
    "rlcore.quantiles": (),
    "rlcore.metrics": ("rlcore.collectives", "rlcore.quantiles"),
    "rlcore.masks": ("rlcore.metrics",),
    "rlcore.config_parse": (),
    "rlcore.config_rules": (
        "rlcore.config_parse",
        "rlcore.config",
        "rlcore.config_rules_advantage",
        "rlcore.config_rules_experts",
        "rlcore.config_rules_loss",
        "rlcore.config_rules_rollout",
    ),
    "rlcore.config_rules_advantage": ("rlcore.config_parse", "rlcore.config"),
    "rlcore.config_rules_experts": ("rlcore.config_parse", "rlcore.config"),
    "rlcore.config_rules_loss": ("rlcore.config_parse", "rlcore.config"),
    "rlcore.config_rules_rollout": ("rlcore.config_parse", "rlcore.config"),
    "rlcore.step_weights": (*CORE, *INTERFACES, "rlcore.ops"),
    "rlcore.config_rollout": ("rlcore.sampling",),
    "rlcore.config": ("rlcore.config_parse", "rlcore.config_rollout", "rlcore.config_rules"),
    "rlcore.interfaces": ("rlcore.batch", "rlcore.groups"),
    "rlcore.reward_groups": (),
    "rlcore.whitening": ("rlcore.collectives",),
    "rlcore.gae": (),
    "rlcore.advantages": ("rlcore.collectives", "rlcore.reward_groups", "rlcore.whitening"),
    "rlcore.dynamic_sampling": ("rlcore.reward_groups",),
    "rlcore.run_log": (*CORE, *INTERFACES),
    "rlcore.rollouts": (*CORE, *INTERFACES),
    "rlcore.grading": (*CORE, *INTERFACES),
    "rlcore.samples": (*CORE, *INTERFACES, "rlcore.grading"),
    "rlcore.trainer": (
        *(
            *CORE,
            *INTERFACES,
            "rlcore.advantages",
            "rlcore.dynamic_sampling",
            "rlcore.grading",
            "rlcore.samples",
        ),
        *("rlcore.reward_groups", "rlcore.rollouts", "rlcore.ops.kl"),
    ),
    "rlcore.ops": CORE,
    "rlcore.layout": CORE,
    "rlcore.rollout": (*CORE, *INTERFACES, "rlcore.ops", "rlcore.reward_groups", "rlcore.weight_sync"),
    "rlcore.weight_sync": (*CORE, *INTERFACES),
    **dict.fromkeys(LINT, (*CORE, *INTERFACES, *LINT)),
    "rlcore.cli": ("rlcore", "megatron_worker"),
    "megatron_worker": (
        *(*CORE, *INTERFACES, "rlcore.ops", "rlcore.layout", "rlcore.step_weights"),
        *("rlcore.quantiles",),
    ),
}
"""Imports point one way: the trainer sees only interfaces; megatron_worker never sees the loop."""

ONLY_IN: dict[str, tuple[str, ...]] = {
    "megatron": ("megatron_worker",),
    "vllm": ("rlcore.rollout", "rlcore.weight_sync"),
    "hydra": ("rlcore.cli",),
    "rich": ("rlcore.cli",),
    "ray": (),
    "wandb": (),
}
"""Third-party package -> where it may be imported at all."""

LAZY = {
    *("vllm", "transformer_engine", "apex", "triton", "mbridge", "ray", "wandb"),
    *("transformers", "reasoning_gym", "math_verify", "gguf", "accelerate"),
}
"""Optional packages: only inside functions, so that importing a module never needs them."""

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 7
"""`self` and `cls` not counted. Files named triton_*.py are exempt from function sizes and parameters."""
OP_SIGNATURES = ("vocab_parallel_logprob", "linear_vocab_parallel_logprob", "linear_logprob_loss")
"""The public ops, whose parameters the design lists: exempt from MAX_PARAMETERS."""

PACKAGES = ("rlcore", "megatron_worker")
SIZED = ("rlcore", "megatron_worker", "tools", "tests", "examples")


@dataclass(frozen=True)
class Import:
    """One imported module name, where it stands, and whether it runs when the file is imported."""

    name: str
    line: int
    is_lazy: bool


def main(root: Path) -> int:
    """Prints every violation under `root`; returns the exit code."""
    problems = [*import_problems(root), *size_problems(root)]
    for problem in problems:
        print(problem)
    print(f"{len(problems)} violation(s) of the import rules and sizes.")
    return 1 if problems else 0


def import_problems(root: Path) -> Iterator[str]:
    """One line per import that the tables do not allow."""
    for package in PACKAGES:
        for path in sorted(root.joinpath(package).rglob("*.py")):
            module = module_name(path.relative_to(root))
            for found in imports_of(ast.parse(path.read_text(encoding="utf-8")), module, path.name):
                reason = why_forbidden(module, found)
                if reason:
                    yield f"{path.relative_to(root)}:{found.line}: {reason}"


def why_forbidden(module: str, found: Import) -> str | None:
    """What an import breaks, or None."""
    top = found.name.split(".")[0]
    if top in PACKAGES:
        rule = max((name for name in MAY_IMPORT if is_under(module, name)), key=len, default="")
        if any(is_under(found.name, allowed) for allowed in (rule, *MAY_IMPORT.get(rule, ()))):
            return None
        allowed = ", ".join(MAY_IMPORT.get(rule, ())) or "nothing of ours"
        return f"{module} may not import {found.name} (allowed: {allowed})"
    if top in ONLY_IN and not any(is_under(module, place) for place in ONLY_IN[top]):
        return f"{module} may not import {found.name} (only {', '.join(ONLY_IN[top]) or 'nobody'} may)"
    if top in LAZY and not found.is_lazy:
        return f"{module} imports {top}, which is optional, at module level: import it where it is needed"
    return None


def is_under(name: str, prefix: str) -> bool:
    """Is `name` the package `prefix` or inside it?"""
    return name == prefix or name.startswith(prefix + ".")


def module_name(path: Path) -> str:
    """`rlcore/ops/filter.py` -> `rlcore.ops.filter`."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.Module, module: str, file_name: str) -> Iterator[Import]:
    """Every import of a file; `from a import b` counts as `a.b` when it reaches into our packages."""
    package = module if file_name == "__init__.py" else module.rpartition(".")[0]
    lazy_lines = lazy_line_numbers(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" if base in PACKAGES else base for alias in node.names]
        else:
            continue
        for name in dict.fromkeys(names):
            yield Import(name, node.lineno, node.lineno in lazy_lines)


def lazy_line_numbers(tree: ast.Module) -> set[int]:
    """Lines inside functions or `if TYPE_CHECKING:`: importing the file does not run them."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.If):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def size_problems(root: Path) -> Iterator[str]:
    """One line per file, function or parameter list that is too long."""
    for folder in SIZED:
        for path in sorted(root.joinpath(folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            place = path.relative_to(root)
            num_lines = len(text.splitlines())
            if num_lines > MAX_FILE_LINES:
                yield f"{place}: {num_lines} lines, at most {MAX_FILE_LINES}"
            if path.name.startswith("triton_"):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield from function_problems(place, node)


def function_problems(place: Path, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Length (docstring included) and number of parameters of one function."""
    num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if num_lines > MAX_FUNCTION_LINES:
        yield f"{place}:{node.lineno}: {node.name} has {num_lines} lines, at most {MAX_FUNCTION_LINES}"
    arguments = node.args
    names = [arg.arg for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    count = len([name for name in names if name not in ("self", "cls")])
    if count > MAX_PARAMETERS and node.name not in OP_SIGNATURES:
        yield f"{place}:{node.lineno}: {node.name} has {count} parameters, at most {MAX_PARAMETERS}"


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent))
