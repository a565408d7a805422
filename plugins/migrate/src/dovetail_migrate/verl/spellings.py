"""Maps spellings of verl's keys in its versions, in its docs and on users' pages to the keys of the tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail_migrate.verl.compose import key_tables

_A = "actor_rollout_ref"
_LEGACY = ("custom_reward_function", "reward_model", "sandbox_fusion")
"""Root sections that verl still accepts, and copies to `reward`."""


def canonical(key: str, value: Any, tree: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the spelling of a verl key that the translation tables use, and the value converted for this spelling.

    Args:
        key: the key as written.
        value: the value as written.
        tree: the composed config; a key that it contains is already spelled as in the tables, except sections in `_LEGACY`.
    """
    finetunes = _A not in tree
    for pattern, becomes in key_tables()["finetuning" if finetunes else "spellings"]:
        if _has(tree, key) and key.partition(".")[0] not in _LEGACY:
            break
        if (match := pattern.fullmatch(key)) is not None:
            key = match.expand(becomes)
    if key.endswith("actor.lora.enabled") and not value:
        return f"{_A}.model.lora_rank", 0
    if key.endswith("rollout.dtype") and value == "fp8":
        return key.removesuffix("dtype") + "quantization", "fp8"
    return key, value


def _has(tree: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return False
        tree = tree[part]
    return True
