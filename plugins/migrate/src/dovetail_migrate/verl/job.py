"""The job that verl would run: its composed config, overridden by the keys of a command or a file, and the given keys."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dovetail.errors import ConfigError
from dovetail_migrate.verl.compose import (
    VERSIONS,
    Composer,
    leaves,
    merge,
    nested,
    read_yaml,
    verl_files,
)
from dovetail_migrate.verl.overrides import Override
from dovetail_migrate.verl.spellings import canonical
from dovetail_migrate.verl.words import DEFAULT_CONFIGS, VerlCommand, config_folder


@attrs.frozen(kw_only=True)
class GivenKey:
    """A key that the command or a file gives."""

    key: str
    """The key as the imported version of verl spells it."""
    value: Any
    where: str
    """Source of the key, such as `config.yaml` or `the command`."""
    spelled: str
    """The key as it was written."""
    known: bool = True
    """Whether verl's own config has the key."""


@attrs.define(kw_only=True)
class Job:
    """One verl job: every key's value, and which keys were given."""

    version: str
    config_name: str
    values: dict[str, Any]
    """The composed config, interpolations resolved."""
    given: dict[str, GivenKey] = attrs.field(factory=dict)
    twice: list[str] = attrs.field(factory=list)
    """Messages about keys that were given more than once."""
    command: VerlCommand | None = None
    defaults: dict[str, Any] = attrs.field(factory=dict, repr=False)
    """verl's default values by key."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return a key's value, or the default if the key is absent or null."""
        value: Any = self.values
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return default if value is None else value

    def is_given(self, *keys: str) -> bool:
        """Return whether one of the keys, or a key below it, was given."""
        return any(self.below(key) for key in keys)

    def below(self, key: str) -> list[GivenKey]:
        """Return the given keys that equal `key` or are below `key`."""
        return [
            each for name, each in self.given.items() if name == key or name.startswith(f"{key}.")
        ]

    @property
    def finetunes(self) -> bool:
        """Whether the job is supervised fine-tuning."""
        return "messages_key" in self.values.get("data", {})


def job_of_command(command: VerlCommand, version: str, places: Sequence[Path]) -> Job:
    """Compose the job that a command starts.

    Args:
        command: the result of `read_command`.
        version: a version of verl, one of `VERSIONS`.
        places: folders below which the program's module may be.

    Raises:
        ConfigError: a config is missing, or a config or an override is wrong.
    """
    name = command.config_name or DEFAULT_CONFIGS.get(command.module)
    folder = config_folder(command, places)
    if command.module.startswith("verl.") and name in verl_files(version):
        folder = None  # verl's own files on this machine may be of another version
    if name is None:
        name = _config_of_program(folder, command, places)
    if name is None:
        raise ConfigError(
            f"the config that {command.module} reads is unknown: verl {version} has no program {command.module}, and no source file of this program was found",
            hint="add --config-path DIR --config-name NAME to the command",
        )
    return _job(version, name, folder, command.overrides, command)


def job_of_file(path: Path, version: str, overrides: Sequence[Override] = ()) -> Job:
    """Compose the verl job that a YAML file describes.

    Args:
        path: the file: a resolved config, a config with a defaults list, or only keys that replace verl's defaults.
        version: a version of verl, one of `VERSIONS`.
        overrides: overrides of the file's keys.
    """
    return _job(version, path.stem, path.parent, overrides, None)


def _config_of_program(
    folder: Path | None, command: VerlCommand, places: Sequence[Path]
) -> str | None:
    """Return the name of the config that a recipe's program reads: the config that the program's source names, or else the only config
    in `folder`; None if neither is found.
    """
    parts = command.module.split(".")
    for place in places:
        for start in range(len(parts)):
            source = place.joinpath(*parts[start:-1], f"{parts[-1]}.py")
            if source.is_file() and (
                named := re.search(r"config_name=[\"']([\w.-]+)", source.read_text("utf-8"))
            ):
                return named[1].removesuffix(".yaml")
    names = [path.stem for path in folder.glob("*.yaml")] if folder is not None else []
    return names[0] if len(names) == 1 else None


def _job(
    version: str,
    name: str,
    folder: Path | None,
    overrides: Sequence[Override],
    command: VerlCommand | None,
) -> Job:
    if version not in VERSIONS:
        raise ConfigError(f"verl {version} is not supported; expected {' or '.join(VERSIONS)}")
    groups = {o.key: str(o.value) for o in overrides if not o.sign and "." not in o.key}
    own = folder / f"{name}.yaml" if folder is not None else None
    base_name, from_files = _base(own, command)
    given = [(o.key, o.value) for o in overrides] + list((from_files or {}).items())
    if any(key.endswith("actor.strategy") and value == "megatron" for key, value in given):
        groups.setdefault("model_engine", "megatron")
    if isinstance((from_files or {}).get("model_engine"), str):
        groups.setdefault("model_engine", (from_files or {})["model_engine"])
    composer = Composer(version, None if base_name else folder, dict(groups))
    tree = composer.compose(base_name or name)
    job = Job(
        version=version,
        config_name=name,
        values=tree,
        command=command,
        defaults=_defaults(version, _verls(name, composer, base_name), tuple(groups.items())),
    )
    for spelled, value in (composer.own if from_files is None else from_files).items():
        _give(job, spelled, value, own.name if own else name)
    for override in overrides:
        _apply(job, override, composer)
    job.values = _resolved(tree)
    return job


@functools.cache
def _defaults(version: str, name: str, groups: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Return the values of verl's config `name` by key, composed with the options that `groups` chooses, as (config group, option)."""
    return dict(leaves(_resolved(Composer(version, None, dict(groups)).compose(name))))


def _apply(job: Job, override: Override, composer: Composer) -> None:
    group = override.key.partition("@")[0]
    if group in composer.used_choices or group.startswith("hydra."):
        # A group is not a section, so its finding must not apply to keys below its name.
        job.given[f"{group}@"] = GivenKey(key=f"{group}@", value=override.value, where="the command", spelled=group)  # fmt: skip
    elif override.sign == "~":
        _remove(job.values, override.key)
    elif isinstance(override.value, dict) and override.value:
        for key, value in leaves(override.value):
            _give(job, f"{override.key}.{key}", value, "the command")
    else:
        _give(job, override.key, override.value, "the command")


def _base(
    own: Path | None, command: VerlCommand | None
) -> tuple[str | None, dict[str, Any] | None]:
    """Return the name of the verl config that supplies the keys missing in the file `own`, and the file's own values by key.

    Both are None if there is no such file, or if the file has a defaults list, which names its base itself.
    """
    if own is None or not own.is_file():
        return None, None
    tree = read_yaml(own)
    if "defaults" in tree:
        return None, None
    tree.pop("hydra", None)
    base = "ppo_trainer"
    if (command is not None and command.finetunes) or (
        "optim" in tree and "actor_rollout_ref" not in tree
    ):
        base = "sft_trainer_engine"
    elif "async_training" in tree:
        base = "fully_async_ppo_trainer"
    return base, dict(leaves(tree))


def _verls(name: str, composer: Composer, base: str | None) -> str:
    """Return the name of the verl config whose values count as the defaults of the job.

    It is `base` if given, or `name` if verl has this config, or else the trainer config of verl that the user's config includes.
    """
    known = verl_files(composer.version)
    if base or name in known:
        return base or name
    above = [
        entry
        for entry in composer.read
        if entry in known and "/" not in entry and entry.endswith("trainer")
    ]
    return above[0] if above else "ppo_trainer"


def _give(job: Job, spelled: str, value: Any, where: str) -> None:
    key, value = canonical(spelled, value, job.values)
    before = job.given.get(key)
    if before is not None and before.where == where and before.value != value:
        job.twice.append(
            f"{spelled} is given twice: {before.value!r}, then {value!r}; as in verl, the second value is used"
        )
    known = (
        key in job.defaults
        or any(name.startswith(f"{key}.") for name in job.defaults)
        or any(f".{name}." in f".{key}." for name in _OPEN)
    )
    job.given[key] = GivenKey(key=key, value=value, where=where, spelled=spelled, known=known)
    merge(job.values, nested(key, value))


_OPEN = (
    "engine_kwargs", "override_config", "apply_chat_template_kwargs", "override_transformer_config", "override_ddp_config",
    "override_optimizer_config", "ray_init", "teacher_models", "reward_kwargs", "mm_processor_kwargs", "override_mcore_model_config",
    "sampler_kwargs", "mbridge_config", "model_config", "custom",
)  # fmt: skip
"""Sections of verl's configs whose keys verl does not define."""


def _remove(tree: dict[str, Any], key: str) -> None:
    *above, last = key.split(".")
    inner: Any = tree
    for part in above:
        inner = inner.get(part, {}) if isinstance(inner, dict) else {}
    if isinstance(inner, dict):
        inner.pop(last, None)


def _resolved(tree: dict[str, Any]) -> dict[str, Any]:
    """Resolve interpolations as OmegaConf does.

    Raises:
        ConfigError: an interpolation can't be resolved.
    """
    config = OmegaConf.create(tree)
    try:
        return OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"an interpolation (${{…}}) in verl's config can't be resolved: {first}",
            hint="set the key that the interpolation refers to",
        ) from error
