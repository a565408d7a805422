"""Rules: the shared state of functions that translate a job, and the tables of keys that are translated one by one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from dovetail_migrate.draft import Draft
from dovetail_migrate.verl.compose import key_tables
from dovetail_migrate.verl.job import Job

_SHORT = ("actor", "ref", "rollout", "model")


@attrs.frozen(kw_only=True)
class Sizes:
    """The counts of a training step in verl's terms: prompts, samples, updates and GPUs."""

    prompts: int
    n: int
    mini_batch: int
    epochs: int
    longest: int
    """Tokens of the longest prompt and response together."""
    gpus: int

    @property
    def updates(self) -> int:
        """Number of optimizer steps per training step."""
        return math.ceil(self.prompts / self.mini_batch) * self.epochs


@attrs.frozen(kw_only=True)
class Rules:
    """A verl job, the draft of its Dovetail config, and the counts of a step.

    Methods take verl's keys without `actor_rollout_ref.`; a key with a leading `=` is taken literally.
    """

    job: Job
    draft: Draft
    sizes: Sizes
    rows: int | None = None
    """Number of rows of the training files, if known."""

    def full(self, key: str) -> str:
        """Return verl's full key for a shortened key."""
        if key.startswith("="):
            return key[1:]
        short = key.partition(".")[0] in _SHORT and not self.job.finetunes
        return f"actor_rollout_ref.{key}" if short else key

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a verl key, or the default if the key is absent or null."""
        return self.job.get(self.full(key), default)

    def given(self, key: str) -> bool:
        """Return whether the key, or a key below it, was given."""
        return self.job.is_given(self.full(key))

    def put(self, ours: str, value: Any, *theirs: str, why: str = "") -> None:
        """Set the Dovetail key `ours`, as `Draft.put` does; the verl keys `theirs` may be shortened."""
        self.draft.put(ours, value, *map(self.full, theirs), why=why)

    def same(self, theirs: str, ours: str, cast: Callable[[Any], Any] = str) -> None:
        """Set the Dovetail key `ours` to the value of verl's key `theirs`, converted by `cast`, unless the value is null."""
        if (value := self.get(theirs)) is not None and (made := cast(value)) is not None:
            self.put(ours, made, theirs)

    def idle(self, why: str, *theirs: str) -> None:
        """Record verl keys that need no counterpart in Dovetail, for the reason `why`."""
        self.draft.idle(why, *map(self.full, theirs))

    def change(self, why: str, *theirs: str) -> None:
        """Record verl keys that have no Dovetail key, and whose effect differs in Dovetail as `why` explains."""
        self.draft.change(why, *map(self.full, theirs))

    def refuse(self, why: str, *theirs: str) -> None:
        """Record verl keys that can't be imported, for the reason `why`."""
        self.draft.refuse(why, *map(self.full, theirs))

    @property
    def steps(self) -> int | None:
        """Number of steps of the run, or None if unknown."""
        if (steps := self.get("trainer.total_training_steps")) is not None:
            return int(steps)
        if self.rows is None:
            return None
        return self.rows // self.sizes.prompts * int(self.get("trainer.total_epochs", 1))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Numbers of query heads, key heads and experts of the model; all 0 if the model's config.json is not on this machine."""
        file = Path(str(self.get("model.path", ""))).expanduser() / "config.json"
        whole = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        text = whole.get("text_config", whole)
        heads, experts = int(text.get("num_attention_heads") or 0), ("num_experts", "num_local_experts", "n_routed_experts")  # fmt: skip
        return heads, int(text.get("num_key_value_heads") or heads), next((int(text[key]) for key in experts if text.get(key)), 0)  # fmt: skip

    @property
    def trains_critic(self) -> bool:
        """Whether verl trains a critic in this job."""
        return bool(self.get("critic.enable", self.get("algorithm.adv_estimator") == "gae"))


def fitting(size: int, *counts: int) -> int:
    """Return the largest divisor of `size` that also divides all counts."""
    return max(n for n in range(1, size + 1) if not any(count % n for count in (size, *counts)))


def on(value: Any) -> bool | None:
    """Return True for a true value; else None, which leaves Dovetail's key at its default."""
    return True if value else None


def as_list(value: Any) -> Any:
    """Return verl's value of a setting that names files as a string if there is one path, else as a list of strings.

    Args:
        value: a path, a list of paths, or such a list as text: `[a, b]`.
    """
    from dovetail_migrate.verl.overrides import read_value

    listed = read_value(value) if isinstance(value, str) and value.startswith("[") else value
    texts = [str(item) for item in listed] if isinstance(listed, (list, tuple)) else [str(listed)]
    return texts[0] if len(texts) == 1 else texts


_CASTS: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "flag": on,
    "files": as_list,
    "positive": lambda size: int(size) or None,
    "streaming": lambda is_on: "streaming" if is_on else None,
}
"""The conversions from verl's values to Dovetail's, by their names in the tables."""


def apply_tables(rules: Rules) -> None:
    """Translate the keys in the tables `direct` and `every`, and verl's sections with arbitrary keys, such as `model.override_config`.

    The table `every` applies to all jobs, `direct` to jobs other than fine-tuning.
    """
    tables = key_tables()
    for theirs, ours, cast in tables["every"] + ([] if rules.job.finetunes else tables["direct"]):
        rules.same(theirs, ours, _CASTS[cast])
    for given in rules.job.below(rules.full("model.override_config")):
        name = given.key.rpartition(".")[2]
        dropout = name.endswith(("dropout", "pdrop")) and given.value == 0
        if given.value in ({}, None) or dropout or ".moe_config." in given.key or name == "num_nextn_predict_layers":  # fmt: skip
            rules.draft.idle("Dovetail trains without dropout and without layers of multi-token prediction", given.key)  # fmt: skip
        elif name == "attn_implementation":
            rules.draft.put("model.attn_implementation", given.value, given.key)
        else:
            rules.draft.put(f"model.override_config.{name}", given.value, given.key)
    for key, value in (rules.get("ray_kwargs.ray_init") or {}).items():
        if key not in ("runtime_env", "num_cpus"):
            rules.put(f"runtime.ray_init.{key}", value, f"ray_kwargs.ray_init.{key}")
    for key, value in (rules.get("data.apply_chat_template_kwargs") or {}).items():
        rules.put(f"data.chat_template_args.{key}", value, f"data.apply_chat_template_kwargs.{key}")
    if (path := rules.get("data.custom_cls.path")) is not None:
        rules.put("data.source.name", "verl")
        rules.put("data.source.file", path, "data.custom_cls.path", why="the package dovetail-verl-shim loads classes that were written for verl")  # fmt: skip
        rules.put("data.source.class_name", rules.get("data.custom_cls.name"), "data.custom_cls.name")  # fmt: skip


def note_inert(rules: Rules) -> None:
    """Record the keys that have no effect. Called last, so that earlier findings on the same keys take precedence."""
    states = {"critic": rules.trains_critic, "agent_loop": "rollout.agent_loop.name" in rules.draft.values}  # fmt: skip
    for keys, condition, why in key_tables()["inert"]:
        wanted, of = condition[:1], condition[1:]
        if not condition or bool(states.get(of, rules.get(of))) == (wanted == "+"):
            rules.idle(why, *keys.split())
