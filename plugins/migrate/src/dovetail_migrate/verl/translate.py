"""Translates one job of verl to a draft of a Dovetail config, with a finding for every given key."""

from __future__ import annotations

import functools
import re
from typing import Any

from dovetail.errors import nearest
from dovetail_migrate.draft import Draft, KeyFinding, KeyOutcome
from dovetail_migrate.verl import policy, recipes, roles, samples, schedule
from dovetail_migrate.verl.compose import VERSIONS, Composer, key_tables, leaves
from dovetail_migrate.verl.job import Job
from dovetail_migrate.verl.rules import Rules, apply_tables, note_inert

_OFF: tuple[Any, ...] = (None, False, 0, "", "disabled", -1, {}, [], "none", "None", 0.0)
"""Values that turn a key's feature off."""


def translate(job: Job, rows: int | None = None) -> Draft:
    """Translate a verl job into the draft of a Dovetail config.

    Args:
        job: a job of verl.
        rows: the number of rows of the training files, if known; needed if the warm-up is a fraction of the run's steps.
    """
    draft = Draft()
    if (program := recipes.foreign_program(job)) is not None:
        draft.problems.append(program)
    rules = Rules(job=job, draft=draft, sizes=schedule.counts(job), rows=rows)
    if job.finetunes:
        recipes.finetuning(rules)
        apply_tables(rules)
        roles.engine(rules)
        roles.optimizer(rules, "optim", "actor", 1)
    else:
        schedule.asynchronous(rules)
        apply_tables(rules)
        samples.data(rules)
        schedule.batches(rules)
        samples.rollout(rules)
        samples.reward(rules)
        roles.engine(rules)
        roles.optimizer(rules, "actor.optim", "actor", rules.sizes.updates)
        policy.algorithm(rules)
        roles.critic(rules)
        recipes.distillation(rules)
        recipes.self_play(rules)
    schedule.trainer(rules)
    schedule.runtime(rules)
    note_inert(rules)
    _judge_rest(job, draft)
    return draft


def _judge_rest(job: Job, draft: Draft) -> None:
    """Add findings for the given keys that no rule has handled; refused keys that were not given become problems of the whole job."""
    refused = [f for f in draft.findings if f.outcome is KeyOutcome.REFUSED and not job.is_given(f.theirs)]  # fmt: skip
    draft.problems += [f"{f.theirs} (verl's default, not given): {f.why}" for f in refused]
    tables = key_tables()
    for key, given in job.given.items():
        value = job.get(key)
        if missing := _found(tables["missing"], key):
            note = draft.idle if value in _OFF else draft.refuse
            note(f"not supported{', but off' if value in _OFF else ''}: {missing}", key)
        elif draft.outcome_of(key) is not None:
            continue
        elif (value is True or value not in (*_OFF, 1)) and (why := _found(tables["changed"], key)):
            draft.change(why, key)
        elif why := _found(tables["needless"], key):
            draft.idle(why, key)
        elif given.known and (value in _OFF or value == job.defaults.get(key)):
            draft.idle("the key is off, or has verl's default value", key)
        elif given.known:
            draft.refuse("Dovetail has no equivalent", key)
        elif version := next((v for v in VERSIONS if v != job.version and key in _keys(v)), None):
            draft.refuse(f"verl {job.version} has no such key; verl {version} has it", key)
        else:
            near = nearest(given.spelled, job.defaults)
            why = f"verl {job.version} has no such key" + (
                f"; did you mean {near}?" if near else ""
            )
            draft.findings.append(KeyFinding(KeyOutcome.UNKNOWN, key, why=why))


def _found(patterns: list[tuple[re.Pattern[str], str]], key: str) -> str | None:
    return next((why for pattern, why in patterns if pattern.fullmatch(key)), None)


@functools.cache
def _keys(version: str) -> frozenset[str]:
    """Return every key of the trainer configs of a version of verl."""
    names = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer_engine")
    return frozenset(key for n in names for key, _ in leaves(Composer(version).compose(n)))
