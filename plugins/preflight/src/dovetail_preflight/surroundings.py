"""Rules about files and trackers that a config names twice, the Python environments of roles, and the section `profile`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from dovetail.dispatch import recorder
from dovetail.errors import ConfigError
from dovetail.interfaces import Finding, PluginRef
from dovetail.planning import Plan
from dovetail.plugins import default_index
from dovetail.sections import RunConfig

_ROLLOUT = ("rollout", "rollout.weight_transport")
_TRAINING = (
    "algorithm.policy_loss",
    "algorithm.loss_aggregation",
    "algorithm.rollout_correction",
)


def file_twice(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Warn if the config names a data file twice for training, twice for validation, or for training and validation.

    Rows of a file that is read twice count double. Metrics on held-out rows mean nothing if the model was trained on these rows.
    """
    train, val = config.data.training_files, config.data.val_files
    trained = "data.mixture" if config.data.mixture else "data.train_files"
    for key, files in ((trained, train), ("data.val_files", val)):
        for file in _repeated(files):
            yield Finding.warning(
                f"{key} names {file} more than once: each of its prompts would be used as many times",
                hint="name the file once",
            )
    places = {_place(file) for file in train}
    for file in dict.fromkeys(file for file in val if _place(file) in places):
        yield Finding.warning(
            f"data.val_files and {trained} both name {file}: validation would use training rows",
            hint="set data.val_files= to files with held-out prompts",
        )


def tracker_twice(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Report an error if the config selects a tracker twice with the same settings: everything would be logged twice."""
    trackers = list(config.tracking)
    for number, tracker in enumerate(trackers):
        if tracker in trackers[:number]:
            yield Finding.error(
                f"tracking[{number}] repeats the tracker {tracker.name or tracker.path} with the same settings: everything would "
                "be logged twice",
                hint=f"remove tracking[{number}]",
            )


def environment_unfit(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Warn if the Python environment of a role is missing or lacks a requirement, or this machine has too few accelerators for the run.

    `runtime.environments` names the environments, and the pools of `runtime` need the accelerators. These problems are only warnings, since
    the run may take place on another machine. On the run's machine, the same problem is an error.
    """
    if plan is None:
        return
    if (shortage := config.runtime.shortage(plan.placement.pools)) is not None:
        yield Finding.warning(f"runtime: {shortage.message}", hint=shortage.hint)
    wanted = {
        role: [
            {"kind": ref.kind, "name": ref.name, "distribution": ref.distribution}
            for ref in _refs(plan, role)
            if ref.path is None
        ]
        for role in config.runtime.environments
    }
    for problem in config.runtime.unfit_environments(wanted):
        yield Finding.warning(problem.message, hint=problem.hint)


def environment_missing(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Report an error if a plugin needs a Python environment of its own, but the config names none.

    A plugin whose requirements the current environment meets needs no environment of its own.
    """
    if plan is None:
        return
    roles = [*(["rollout"] if plan.generates else []), *(model.role for model in plan.models)]
    for role in roles:
        ref = _refs(plan, role)[0]
        if role in config.runtime.roles_apart or ref.path is not None:
            continue
        if role == "rollout" and config.rollout.joined:
            continue  # its needs are met where the joined engines run
        entry = default_index().find(ref.kind, f"{ref.name}@{ref.distribution}")
        unmet = [need for need in entry.needs if not need.met]
        if not unmet or entry.manifest is None or not entry.manifest.isolated:
            continue
        wanted = " and ".join(f"{need} ({need.found})" for need in unmet)
        yield Finding.error(
            f"{entry.kind} {entry.name!r} of {entry.distribution} needs {wanted} in a Python environment of its own, "
            f"but the config names no environment for it",
            hint=f"create one (`python -m venv DIRECTORY`, and in it `{entry.install_command}` with dovetail-runtime-ray), then set "
            f"runtime.name=ray runtime.environments.{role}=DIRECTORY",
        )


def _refs(plan: Plan, role: str) -> list[PluginRef]:
    """Return the plugins that a role's processes load, the role's own plugins first."""
    if role == "rollout":
        return [plan.refs[path] for path in _ROLLOUT]
    (model,) = (model for model in plan.models if model.role == role)
    own = [model.engine, *([model.objective.plugin] if model.objective else [])]
    besides = [plan.refs[path] for path in _TRAINING if path in plan.refs]
    sends = role == "actor" and plan.generates
    transport = [plan.refs["rollout.weight_transport"]] if sends else []
    steps = [f"{model.key}.optim", f"{model.key}.optim.schedule"] if model.trained else []
    return [*own, *transport, *besides, *(plan.refs[path] for path in steps)]


def profile_misses_the_run(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Warn if the section `profile` names steps, roles or ranks that the run does not have: nothing would be recorded for them.

    Report an error if the profiler `profile.tool` can't record on the device of a role.
    """
    profile = config.profile
    if profile.tool is None or plan is None:
        return
    (first, last), steps = profile.steps, plan.counts.steps
    if steps is not None and last > steps:
        lost = f"only steps {first} to {steps} are"
        if first >= steps:
            lost = "nothing is" if first > steps else f"only step {steps} is"
        yield Finding.warning(
            f"profile.steps = [{first}, {last}] exceeds the run's {steps} "
            f"{'step' if steps == 1 else 'steps'}: {lost} recorded",
            hint=f"set profile.steps=[{min(first, steps)},{steps}]",
        )
    meshes = {model.role: model.mesh for model in plan.models}
    for role in profile.roles:
        if role not in meshes:
            yield Finding.warning(
                f"profile.roles names {role!r}, which this run does not have: its models are {', '.join(meshes)}",
                hint=f"set profile.roles={next(iter(meshes), 'actor')}",
            )
            continue
        if (device := plan.device_of(role)) is not None:
            try:
                recorder(profile.tool, device)
            except ConfigError as error:
                yield Finding.error(error.message, hint=error.hint)
        beyond = [rank for rank in profile.ranks if rank >= meshes[role].size]
        if beyond:
            yield Finding.warning(
                f"profile.ranks = {list(profile.ranks)}, but {role} has {meshes[role].size} "
                f"{'rank' if meshes[role].size == 1 else 'ranks'}: nothing is recorded for {beyond}",
                hint="set profile.ranks=[0]",
            )


def _repeated(files: tuple[str, ...]) -> list[str]:
    """Return the files that the list names more than once, each by its first spelling."""
    counts = Counter(_place(file) for file in files)
    first = {_place(file): file for file in reversed(files)}
    return [first[place] for place, count in counts.items() if count > 1]


def _place(file: str) -> Path | str:
    """Return the absolute path of a file, without symbolic links, so that all spellings of a path are equal; a URL is returned unchanged."""
    return file if "://" in file else Path(file).expanduser().resolve()
