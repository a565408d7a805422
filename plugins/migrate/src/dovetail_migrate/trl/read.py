"""Reads TRL's configs: from a Python file, which is parsed and not run, or from the YAML that TRL's command takes."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import attrs

from dovetail.errors import ConfigError
from dovetail_migrate.verl.compose import read_yaml

KINDS = {"GRPOConfig": "grpo", "SFTConfig": "sft", "DPOConfig": "dpo"}


@attrs.frozen
class Expression:
    """The source code of a value that is not a literal."""

    source: str


@attrs.define(kw_only=True)
class TrlJob:
    """A config of TRL: its class and the given values."""

    kind: str
    """Kind of the config: grpo, sft or dpo."""
    given: dict[str, Any] = attrs.field(factory=dict)
    """Given values by name; names from LoraConfig and the trainer have a prefix: `peft_config.r`, `trainer.model`."""


def read_trl(path: Path) -> TrlJob:
    """Read the TRL config in a Python file, or in YAML, whose fields determine the kind of config.

    Raises:
        ConfigError: the file can't be read, or holds no TRL config.
    """
    if path.suffix != ".py":
        given = read_yaml(path)
        of_grpo = {"num_generations", "max_completion_length", "reward_funcs"} & given.keys()
        found = "grpo" if of_grpo else "dpo" if "beta" in given else "sft"
        return TrlJob(kind=found, given=given)
    try:
        module = ast.parse(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"the file {path} can't be read: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"the file {path} is not Python: {error}") from error
    names = {
        target.id: node.value
        for node in ast.walk(module)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
    configs = [call for call in calls if _name(call) in KINDS]
    if len(configs) != 1:
        what = ", ".join(KINDS)
        raise ConfigError(
            f"the file {path} creates {len(configs)} TRL configs; expected exactly one of {what}",
            hint="name a file with a single config, or give its fields as YAML",
        )
    job = TrlJob(kind=KINDS[_name(configs[0])], given=_keywords(configs[0], names))
    for call in calls:
        prefix = {"LoraConfig": "peft_config", "GRPOTrainer": "trainer", "SFTTrainer": "trainer", "DPOTrainer": "trainer"}.get(_name(call))  # fmt: skip
        if prefix:
            job.given |= {f"{prefix}.{key}": value for key, value in _keywords(call, names).items()}
    return job


def _name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _keywords(call: ast.Call, names: dict[str, ast.expr]) -> dict[str, Any]:
    return {each.arg: _value(each.value, names) for each in call.keywords if each.arg is not None}


def _value(node: ast.expr, names: dict[str, ast.expr], depth: int = 0) -> Any:
    """Return an expression's literal value, with names replaced by the file's assignments; else the expression's source."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        pass
    if isinstance(node, ast.Name) and node.id in names and depth < 8:
        return _value(names[node.id], names, depth + 1)
    return Expression(ast.unparse(node))
