"""The README names files that exist, and every file of the packages has its line in the tree."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = ROOT.joinpath("README.md").read_text(encoding="utf-8")
TREE = TEXT.split("## Tree")[1].split("```")[1]


def tree_paths() -> list[str]:
    return [line.split()[0] for line in TREE.strip().splitlines()]


def test_every_path_in_the_tree_exists_and_says_what_it_is():
    missing = [path for path in tree_paths() if not ROOT.joinpath(path).exists()]
    assert not missing
    assert all(len(line.split()) > 1 for line in TREE.strip().splitlines())


def test_every_path_in_the_text_exists():
    """Backticked words that look like a path of ours, in the tables and the six lines."""
    named = set(re.findall(r"`([\w.]+(?:/[\w.]+)*/?\.?\w*)`", TEXT))
    paths = {word for word in named if re.search(r"\.(py|md|yaml|toml)$", word) or word == "LICENSE"}
    assert len(paths) > 25
    assert not sorted(path for path in paths if not ROOT.joinpath(path).exists())


def test_every_file_is_in_the_tree():
    """Package markers say nothing and are left out."""
    packages = [ROOT.joinpath(name) for name in ("rlcore", "megatron_worker", "tools")]
    files = {path.relative_to(ROOT).as_posix() for package in packages for path in package.rglob("*.py")}
    files |= {path.relative_to(ROOT).as_posix() for path in ROOT.glob("configs/*.yaml")}
    silent = {path for path in files if Path(path).name in ("__init__.py", "__main__.py")}
    assert sorted(files - silent - set(tree_paths())) == []


def test_the_train_step_crosses_at_most_five_files():
    """The path from the loop to the loss, as the README walks it."""
    steps = TEXT.split("## One train step in six lines")[1].split("## ")[0]
    assert len(re.findall(r"^\d\. ", steps, flags=re.MULTILINE)) == 6
    first = [
        re.search(r"`([\w/]+\.py)`", step) for step in re.split(r"^\d\. ", steps, flags=re.MULTILINE)[1:]
    ]
    walk = {match.group(1) for match in first if match} - {"megatron_worker/microbatches.py"}
    assert len(walk) == 5
