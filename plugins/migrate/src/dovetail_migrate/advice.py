"""What `check` says of a config's key that is verl's or TRL's: the import translates it."""

from __future__ import annotations

import functools

from dovetail.errors import DovetailError
from dovetail_migrate.trl.translate import DEFAULTS, TRL_KEYS
from dovetail_migrate.verl.job import job_of_words
from dovetail_migrate.verl.translate import translate

_HYDRAS = ("defaults", "hydra", "_target_")


@functools.lru_cache(maxsize=256)
def verl_advice(key: str, value: str) -> str | None:
    """Return what to say of a key that is verl's, by its whole path; None for one that is not."""
    parts = key.split(".")
    if parts[0] in _HYDRAS or parts[-1] == "_target_":
        return "this is Hydra's key; leave it out"
    try:
        job = job_of_words([f"{key}={value}"])
        given = next(iter(job.given.values()))
        if not given.known:
            return None
        found = translate(job).outcome_of(given.key)
    except (DovetailError, ValueError, TypeError):
        return "this is verl's key; dovetail import verl translates configs and commands"
    if found is None or (not found.ours and not found.why):
        return None
    meant = f"Dovetail's is {found.ours}" if found.ours else found.why
    return f"this is verl's key; {meant}; dovetail import verl translates configs and commands"


def trl_advice(key: str, _value: str) -> str | None:
    """Return what to say of a key whose last name is a field of TRL's; None for one that is not."""
    parts = key.split(".")
    name = parts[-1]
    known = name in TRL_KEYS or any(name in fields for fields in DEFAULTS.values())
    if not known or ("_" not in name and len(parts) > 2):
        return None
    meant = f"Dovetail's is {TRL_KEYS[name]}; " if name in TRL_KEYS else ""
    return f"this is TRL's key; {meant}dovetail import trl translates its configs"
