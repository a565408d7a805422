"""StepProfile: profiles of selected steps of a run, on the workers of selected roles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dovetail.dispatch.profiling import ProfileSpec
from dovetail.interfaces.plugin import Logger
from dovetail.sections import RunConfig

FOLDER = "profiles"
"""Folder of profiles below the run directory."""


def check_profile(config: RunConfig, groups: Mapping[str, Any], directory: Path) -> None:
    """Check that the profiler can record on every selected worker.

    Args:
        config: the run's config.
        groups: worker groups by role.
        directory: the run's directory.

    Raises:
        ConfigError: the profiler can't record on a worker.
    """
    for group in _asked(config, groups).values():
        group.check_profile(_spec(config, directory, *config.profile.steps)).result()


class StepProfile:
    """Runs the profiler during the steps that `profile` in the config selects.

    Args:
        config: the run's config.
        groups: worker groups by role.
        directory: the run's directory.
        steps: the number of steps of the run; None if unknown.
        logger: a logger with the standard methods.
    """

    def __init__(
        self,
        config: RunConfig,
        groups: Mapping[str, Any],
        directory: Path,
        *,
        steps: int | None,
        logger: Logger,
    ) -> None:
        self._config, self._logger, self._directory = config, logger, directory
        self._first, last = config.profile.steps
        self._last = min(last, steps or last)
        self._groups = _asked(config, groups)
        self._running = False

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Run the block as a step, and profile it if the step is selected. A resumed run profiles the selected steps that remain."""
        if self._first <= number <= self._last and not self._running:
            self._running = True
            spec = _spec(self._config, self._directory, number, self._last)
            for role, group in self._groups.items():
                group.start_profile(spec).result()
                self._logger.info("profile started", role=role, tool=spec.tool, step=number)
        over = True
        try:
            yield
            over = number >= self._last
        finally:
            if over and self._running:
                self._running = False
                self._stop()

    def _stop(self) -> None:
        for group in self._groups.values():
            try:
                paths = group.stop_profile().result() or []
            except Exception as error:  # noqa: BLE001 - the run goes on, or ends by an error of its own
                self._logger.warning("a profile could not be written", error=repr(error))
                continue
            for path in filter(None, paths):
                self._logger.info("profile written", path=path)


def _asked(config: RunConfig, groups: Mapping[str, Any]) -> dict[str, Any]:
    """Return the worker groups of the roles in `profile.roles`; empty if `profile.tool` is None."""
    named = config.profile.roles if config.profile.tool is not None else ()
    return {role: groups[role] for role in named if groups.get(role) is not None}


def _spec(config: RunConfig, directory: Path, first: int, last: int) -> ProfileSpec:
    return ProfileSpec(
        tool=str(config.profile.tool),
        directory=directory.resolve() / FOLDER,
        first=first,
        last=last,
        ranks=config.profile.ranks,
    )
