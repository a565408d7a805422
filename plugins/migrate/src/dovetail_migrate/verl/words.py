"""Reads the words of a command: verl's program, the config, the overrides, and the number of processes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import attrs

from dovetail.errors import ConfigError
from dovetail_migrate.verl.overrides import Override, is_override, read_override

_PYTHON = re.compile(r"(.*/)?(python[\d.]*|pypy3?)")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_WRAPPERS = frozenset({"nohup", "exec", "time", "sudo", "env", "stdbuf", "numactl", "nice", "timeout", "srun", "setsid"})  # fmt: skip
"""Programs that start the command that follows their options."""
_WITH_VALUE = frozenset({
    "--address", "--runtime-env", "--runtime-env-json", "--working-dir", "--entrypoint-num-cpus", "--entrypoint-num-gpus",
    "--submission-id", "--job-id", "--metadata-json", "--extra", "--group", "--with", "--with-editable", "--project",
    "--python", "-p", "--env-file", "--directory", "--config-path", "--config-name", "--config-dir", "-cp", "-cn", "-cd",
    "--index-url", "--nodes", "--ntasks", "-N", "-n", "-u", "-i", "-m",
})  # fmt: skip
"""Options of ray, uv, Hydra and wrappers that are followed by their value."""
DEFAULT_CONFIGS = {
    "verl.trainer.main_ppo": "ppo_trainer",
    "verl.trainer.main_ppo_v0": "ppo_trainer",
    "verl.trainer.main_ppo_sync": "ppo_trainer",
    "verl.trainer.sft_trainer": "sft_trainer_engine",
    "verl.trainer.sft_trainer_ray": "sft_trainer_engine",
    "verl.trainer.fsdp_sft_trainer": "sft_trainer_engine",
    "verl.experimental.fully_async_policy.fully_async_main": "fully_async_ppo_trainer",
    "verl.experimental.one_step_off_policy.main_ppo": "one_step_off_ppo_trainer",
}
"""verl's programs that train → the config that each program reads."""
OTHERS = {
    "verl.trainer.main_generation": "dovetail generate",
    "verl.trainer.main_generation_server": "dovetail generate",
    "verl.trainer.main_eval": "dovetail eval",
    "verl.model_merger": "dovetail export",
}
"""verl's programs that do not train → the equivalent Dovetail command."""


@attrs.frozen(kw_only=True)
class VerlCommand:
    """A command that starts a Python program, such as one of verl's."""

    words: tuple[str, ...]
    """The command as it was recorded."""
    module: str
    """The program, such as `verl.trainer.main_ppo`; for a file, the file's path with dots."""
    config_name: str | None = None
    config_path: str | None = None
    overrides: tuple[Override, ...] = ()
    rest: tuple[str, ...] = ()
    """Words that are neither Hydra's options nor overrides."""
    processes: int | None = None
    """Number of processes per node, from torchrun's `--nproc_per_node`."""
    nodes: int | None = None

    @property
    def trains(self) -> bool:
        """Whether the command starts training, judged only by its program and arguments."""
        if self.module in OTHERS or re.search(r"(?i)preprocess|main_(eval|gen)|data_process|\bgenerat", self.module):  # fmt: skip
            return False
        return self.module in DEFAULT_CONFIGS or bool(self.overrides or self.config_name)

    @property
    def finetunes(self) -> bool:
        """Whether the program is verl's supervised fine-tuning."""
        return "sft" in self.module.rpartition(".")[2]


def read_command(words: Sequence[str]) -> VerlCommand | None:
    """Parse a command, skipping launchers and wrappers; return None if the command starts no Python program."""
    left = list(words)
    processes = nodes = None
    while left:
        if _ASSIGNMENT.fullmatch(left[0]):
            left.pop(0)
        elif (launched := _launched(left)) is not None:
            left, processes, nodes = _torchrun(launched)
        elif (inner := _unwrapped(left)) is not None:
            left = inner
        else:
            break
    if not left or not _PYTHON.fullmatch(left[0]):
        return None
    return _python(tuple(words), left[1:], processes, nodes)


def _launched(words: list[str]) -> list[str] | None:
    """Return the words after `torchrun`, or after `python -m` and torchrun's module; None for a command that starts otherwise."""
    if PurePosixPath(words[0]).name == "torchrun":
        return words[1:]
    if _PYTHON.fullmatch(words[0]) and words[1:2] == ["-m"] and words[2:3] and words[2] in _LAUNCHERS:  # fmt: skip
        return words[3:]
    return None


def _unwrapped(words: list[str]) -> list[str] | None:
    """Return the command that a launcher such as ray or uv starts; None if the command is no launcher."""
    first = PurePosixPath(words[0]).name
    if first == "ray" and words[1:3] == ["job", "submit"]:
        return words[words.index("--") + 1 :] if "--" in words else _past_options(words[3:])
    if first == "uv" and words[1:2] == ["run"]:
        left = _past_options(words[2:])
        return ["python", *left] if left and left[0].endswith(".py") else left
    if first in ("accelerate", "deepspeed"):
        return ["python", *_past_options(words[2 if first == "accelerate" else 1 :])]
    if first in _WRAPPERS:
        return _past_options(words[1:])[1 if first == "timeout" else 0 :]
    return None


def _python(
    words: tuple[str, ...],
    left: list[str],
    processes: int | None,
    nodes: int | None,
) -> VerlCommand | None:
    while left and left[0].startswith("-") and left[0] != "-m":
        if left[0] in ("-c", "-"):
            return None
        left = left[2:] if left[0] in ("-W", "-X") else left[1:]
    if left[:1] == ["-m"]:
        left = left[1:]
        module = left[0] if left else ""
    else:
        module = left[0].removesuffix(".py").lstrip("./").replace("/", ".") if left else ""
    if not module:
        return None
    options: dict[str, str] = {}
    overrides, rest = [], []
    arguments = iter(left[1:])
    for word in arguments:
        name, equals, value = word.partition("=")
        if name in ("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd"):
            options[name] = value if equals else next(arguments, "")
        elif is_override(word) and not (word.startswith("--") and "." not in name):
            overrides.append(read_override(word))
        else:
            rest.append(word)
    config_name = options.get("--config-name", options.get("-cn"))
    paths = [options[key] for key in options if key not in ("--config-name", "-cn")]
    return VerlCommand(
        words=words,
        module=module,
        config_name=config_name.removesuffix(".yaml") if config_name else None,
        config_path=paths[0] if paths else None,
        overrides=tuple(overrides),
        rest=tuple(rest),
        processes=processes,
        nodes=nodes,
    )


def _past_options(words: list[str]) -> list[str]:
    """Return the words after the leading options and their values; an option `-m` is not skipped, but becomes `python -m`."""
    left = iter(enumerate(words))
    for at, word in left:
        if word == "--":
            return words[at + 1 :]
        if not word.startswith("-"):
            return words[at:]
        if word in _WITH_VALUE:
            if word == "-m":  # uv run -m module
                return ["python", *words[at:]]
            next(left, None)
    return []


def _torchrun(words: list[str]) -> tuple[list[str], int | None, int | None]:
    """Return the Python command in torchrun's arguments, the number of processes on a node, and the number of nodes (None if not given)."""
    found: dict[str, str] = {}
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-m":
        name, equals, value = words[at].partition("=")
        key = name.lstrip("-").replace("-", "_")
        if not equals and key not in ("standalone", "no_python", "use_env"):
            at += 1
            value = words[at] if at < len(words) else ""
        found[key] = value
        at += 1
    processes, nodes = (
        int(found[key]) if found.get(key, "").isdigit() else None
        for key in ("nproc_per_node", "nnodes")
    )
    return ["python", *words[at:]], processes, nodes


def config_folder(command: VerlCommand, places: Sequence[Path]) -> Path | None:
    """Return the folder with the command's config files: `--config-path`, by default `config`; None if the default does not exist.

    Args:
        command: the command. A relative path is searched in the folder of the command's module, then in `places` themselves.
        places: folders to search: the working directory, the script's folder and its parent folders.

    Raises:
        ConfigError: `--config-path` names a folder that can't be found.
    """
    wanted = Path(command.config_path or "config").expanduser()
    found = [folder for folder in _candidates(command, wanted, places) if folder.is_dir()]
    if found:
        return found[0]
    if command.config_path and command.config_path not in ("config", "./config"):
        raise ConfigError(
            f"--config-path={command.config_path} was not found in the working directory or beside the source file of {command.module}",
            hint="run the import in the folder where the command would run, or give the full path of the config folder",
        )
    return None


def _candidates(command: VerlCommand, wanted: Path, places: Sequence[Path]) -> Iterator[Path]:
    parts = command.module.split(".")[:-1]
    if wanted.is_absolute():
        yield wanted
    for place in () if wanted.is_absolute() else places:
        # For Hydra, a path is relative to the folder of the program's module. Recipes may be beside verl, without the folder `recipe`.
        yield from (place.joinpath(*parts[start:]) / wanted for start in range(len(parts)))
        yield place / wanted
    # The script's path may be of another machine, such as /workspace/verl/recipe/dapo/config.
    for start in range(1, len(wanted.parts)):
        yield from (place / Path(*wanted.parts[start:]) for place in places)
