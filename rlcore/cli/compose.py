"""From a config name and `key=value` words to a checked `RunConfig`: hydra composes, our rules judge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rlcore
from rlcore.config import RunConfig, load_run_config
from rlcore.config_parse import ConfigError


def config_folder() -> Path:
    """The configs that come with the package: beside it in a checkout, inside it in an installed wheel."""
    package = Path(rlcore.__file__).resolve().parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def compose_run_config(
    config_name: str, overrides: Sequence[str] = (), config_dir: str | None = None
) -> RunConfig:
    """The checked config of one run: `compose_values`, judged. Keys and values that cannot be raise
    `ConfigError` naming what was typed.
    """
    return load_run_config(compose_values(config_name, overrides, config_dir))


def compose_values(
    config_name: str, overrides: Sequence[str] = (), config_dir: str | None = None
) -> dict[str, Any]:
    """What the YAML files and words say, as nested dicts, before any rule of ours.

    `config_dir` is a folder of your own; its files may use the groups that come with the package. Unknown
    names of configs and groups, and words that are no key=value, raise `ConfigError` naming what was typed.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    shipped = config_folder()
    folder = shipped if config_dir is None else Path(config_dir).resolve()
    check_config_name(folder, config_name)
    words = [as_hydra_override(word, [folder, shipped]) for word in overrides]
    search = [] if folder == shipped else [f"hydra.searchpath=['file://{shipped}']"]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            words = [_with_plus(config_name, word, search) for word in words]
            composed = compose(config_name, [*words, *search])
        return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"config {config_name}: {first_line(error)}") from error


def _with_plus(config_name: str, word: str, search: Sequence[str]) -> str:
    """The word as hydra takes it: a config group that the config file does not mention, such as
    `rollout=vllm` in any config, needs a plus sign. A word that is wrong either way stays as it is.
    """
    from hydra import compose
    from hydra.errors import HydraException

    if word.startswith("++"):
        return word
    for spelling in (word, f"+{word}"):
        try:
            compose(config_name, [spelling, *search])
        except HydraException:
            continue
        return spelling
    return word


def check_config_name(folder: Path, config_name: str) -> None:
    """The config file exists, or `ConfigError` listing those that do."""
    if not folder.is_dir():
        raise ConfigError(f"--config-dir {folder}: no such folder.")
    if not folder.joinpath(f"{config_name}.yaml").is_file():
        known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml"))) or "none"
        raise ConfigError(f"--config-name {config_name}: no such file in {folder}. There: {known}.")


def as_hydra_override(word: str, folders: Sequence[Path]) -> str:
    """`key=value` as hydra must see it.

    A key that names a config group chooses a file of it. Any other key is set whether the YAML mentions it or
    not: defaults live in `rlcore.config`, which also says so when no such key exists.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override: Any = OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise ConfigError(f"{word!r}: expected key=value ({first_line(error)}).") from error
    if override.is_sweep_override():
        raise ConfigError(
            f"{word!r}: a list of choices is a sweep; a run takes one value. Start one run a value."
        )
    if override.is_delete() or override.is_add() or override.is_force_add():
        raise ConfigError(f"{word!r}: write it as plain key=value.")
    key = override.key_or_group
    if not any(folder.joinpath(key).is_dir() for folder in folders):
        return f"++{word}"
    known = sorted({path.stem for folder in folders for path in folder.joinpath(key).glob("*.yaml")})
    if override.value() not in known:
        raise ConfigError(f"{word!r}: no such file of the group {key}. There: {', '.join(known)}.")
    return word


def first_line(error: BaseException) -> str:
    """An exception's first line, without a final full stop."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
