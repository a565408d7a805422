"""Advice of `dovetail check` on keys and values of verl or TRL in a config."""

from __future__ import annotations

import functools
import re

from dovetail_migrate.trl.translate import DEFAULTS, TRL_KEYS
from dovetail_migrate.verl.compose import VERSIONS, Composer, key_tables, leaves
from dovetail_migrate.verl.spellings import canonical

_HYDRAS = ("defaults", "hydra", "_target_")
_VERLS_ROOTS = ("actor_rollout_ref", "custom_reward_function", "ray_kwargs", "async_training", "global_profiler")  # fmt: skip
_KL = ("algorithm.kl.in_loss", "algorithm.kl.in_reward")
_KL_ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
"""Names of KL estimators in verl, and their names in Dovetail."""


def verl_advice(key: str, _value: str) -> str | None:
    """Return advice on a key of verl or Hydra, by its full path; None for other keys."""
    parts = key.split(".")
    if parts[0] in _HYDRAS or parts[-1] == "_target_":
        return "this is a key of Hydra; leave it out"
    if key not in _known() and parts[0] not in _VERLS_ROOTS:
        return None
    full, _ = canonical(key, None, _ppo())
    said = "`dovetail import verl` translates verl's configs and commands"
    short, tables = full.removeprefix("actor_rollout_ref."), key_tables()
    ours = next((o for theirs, o, _ in tables["direct"] + tables["every"] if theirs == short), None)
    if ours:
        return f"this is a key of verl; use {ours}; {said}"
    why = next((why for pattern, why in tables["needless"] if pattern.fullmatch(full)), None)
    return f"this is a key of verl; {f'leave it out: {why}; ' if why else ''}{said}"


@functools.cache
def _ppo() -> dict[str, object]:
    return Composer(VERSIONS[0]).compose("ppo_trainer")


@functools.cache
def _known() -> frozenset[str]:
    """Return the dotted keys of verl's configs and of the sections that contain them; root sections are left out."""
    names = ("ppo_trainer", "ppo_megatron_trainer", "fully_async_ppo_trainer")
    keys = {key for name in names for key, _ in leaves(Composer(VERSIONS[0]).compose(name))}
    parts = (key.split(".") for key in keys)
    return frozenset(".".join(each[:depth]) for each in parts for depth in range(2, len(each) + 1))


def trl_advice(key: str, _value: str) -> str | None:
    """Return advice on a key whose last name is a field of TRL; None for other keys."""
    parts = key.split(".")
    name = parts[-1]
    known = name in TRL_KEYS or any(name in fields for fields in DEFAULTS.values())
    if not known or parts[0] in _VERLS_ROOTS or ("_" not in name and len(parts) > 2):
        return None
    meant = f"use {TRL_KEYS[name]}; " if name in TRL_KEYS else ""
    return f"this is a key of TRL; {meant}`dovetail import trl` translates TRL's configs"


def kl_advice(key: str, value: str) -> str | None:
    """Return advice on a KL penalty that is written as in verl or TRL: as one value, or with verl's name of the estimator.

    None for other keys and values.
    """
    section = key.removesuffix(".estimator")
    if section not in _KL:
        return None
    ours = _KL_ESTIMATORS.get(value.removesuffix("+"))
    # `+` replaces the gradient of the estimator; a penalty in the reward has no gradient, and k2's is already that of the KL.
    if ours and value.endswith("+") and section == _KL[0] and ours != "k2":
        ours += "+"
    if section != key:
        return ours and f'verl\'s "{value}" is "{ours}"'
    if value == "False":
        return f"write {key}=null for no penalty"
    if value == "True":
        return f"write {key}.coef=WEIGHT, the weight of the penalty"
    if re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", value):
        return f"write {key}.coef={value}"
    return f"write {key}.estimator={ours or value}"
