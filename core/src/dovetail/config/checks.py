"""Checks across the fields of a config, such as sizes that do not fit each other and missing files; torch is not imported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dovetail.config.problems import ConfigProblem
from dovetail.errors import nearest
from dovetail.sections import RunConfig
from dovetail.sections.training import RefSection


def cross_field_problems(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield the contradictions between fields of a config that can be found without files or devices."""
    yield from _mini_batch(config)
    yield from _token_budgets(config)
    yield from _profile(config)


def missing_files(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield a problem for each local data file that the config names and this machine lacks."""
    if config.data.source.name == "files":
        data = config.data
        mixture = [(("mixture", name, "files"), each.files) for name, each in data.mixture.items()]
        named = [(("train_files",), data.train_files), (("val_files",), data.val_files), *mixture]
        for key, files in named:
            for index, file in enumerate(files):
                if not Path(file).expanduser().exists() and not set(file) & set("*?["):
                    yield ConfigProblem(
                        path=("data", *key, index),
                        value=file,
                        text=f"no such file; looked in {Path.cwd()}",
                    )


def _mini_batch(config: RunConfig) -> Iterator[ConfigProblem]:
    batch = config.data.train_batch_size
    for role, section in config.role_sections.items():
        mini = None if isinstance(section, RefSection) else section.mini_batch_size
        if mini is None or batch % mini == 0:
            continue
        both = "(both count prompts or examples, not samples)"
        if mini > batch:
            default = "the actor's" if role == "critic" else "the whole batch"
            text = f"larger than data.train_batch_size = {batch} {both}; at most {batch}, or null for {default}"
        else:
            nearest_sizes = _divisors_around(batch, mini)
            text = f"does not divide data.train_batch_size = {batch} {both}; nearest that do: {nearest_sizes}"
        yield ConfigProblem(
            path=(*config.role_key(role).split("."), "mini_batch_size"),
            value=mini,
            text=text,
            touches=(("data", "train_batch_size"),),
        )


def _divisors_around(batch: int, mini: int) -> str:
    below = next(size for size in range(mini, 0, -1) if batch % size == 0)
    above = next(size for size in range(mini, batch + 1) if batch % size == 0)
    return f"{below} and {above}"


def _token_budgets(config: RunConfig) -> Iterator[ConfigProblem]:
    longest, keys = config.data.longest
    for role, budget in (
        ("actor", config.actor.max_tokens_per_micro_batch),
        ("ref", config.ref.max_tokens_per_micro_batch),
        *(
            (f"roles.{name}", role.max_tokens_per_micro_batch)
            for name, role in config.roles.items()
        ),
    ):
        if budget is not None and budget < longest:
            yield ConfigProblem(
                path=(*role.split("."), "max_tokens_per_micro_batch"),
                value=budget,
                text=f"too small for one sequence ({keys} tokens); expected at least {longest}",
                touches=tuple(
                    ("data", key)
                    for key in ("max_prompt_length", "max_response_length", "max_length")
                ),
            )


def _profile(config: RunConfig) -> Iterator[ConfigProblem]:
    profile, known = config.profile, list(config.role_sections)
    for index, role in enumerate(profile.roles):
        if role not in known:
            near = nearest(role, known)
            instead = f"did you mean {near!r}?" if near else f"allowed: {', '.join(known)}"
            if role == "rollout":
                instead = (
                    f"rollout engines have profilers of their own; allowed: {', '.join(known)}"
                )
            yield ConfigProblem(
                path=("profile", "roles", index),
                value=role,
                text=f"not a role that can be profiled; {instead}",
            )
    first, last = profile.steps
    if not 1 <= first <= last:
        yield ConfigProblem(
            path=("profile", "steps"),
            value=[first, last],
            text="expected the first and the last step to profile, counted from 1, such as [2, 3]",
        )
    if profile.tool is not None and not profile.roles:
        yield ConfigProblem(
            path=("profile", "roles"), value=[], text="expected at least one role, such as actor"
        )
    if not profile.ranks or min(profile.ranks) < 0:
        yield ConfigProblem(
            path=("profile", "ranks"),
            value=list(profile.ranks),
            text="expected at least one rank, counted from 0",
        )
