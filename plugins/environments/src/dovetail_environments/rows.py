"""EnvironmentRows: the dataset source that provides the tasks of environments as rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dovetail.errors import DataError, DovetailError, PluginBrokenError, nearest
from dovetail.interfaces import DatasetSource
from dovetail_environments.config import HELD_OUT, EnvironmentRowsConfig
from dovetail_environments.loop import made


class EnvironmentRows(DatasetSource):
    """Reads the tasks of environments as rows: the path `NAME` gives training tasks, `NAME/held_out` held-out tasks.

    A row's `data_source` is the environment's name, so that validation metrics are split by environment.

    The agent loop `environments` selects this data source by default.
    """

    name = "environments"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = EnvironmentRowsConfig

    def read(self, paths: Sequence[str]) -> list[Mapping[str, Any]]:
        """Return one row per task of the named environments, in order.

        Raises:
            DataError: an environment does not exist, or has no tasks in this split.
            DovetailError: a package that an environment needs is missing.
        """
        return [row for path in paths for row in self._rows(path)]

    def _rows(self, path: str) -> Iterator[Mapping[str, Any]]:
        name, _, part = path.partition("/")
        known = self.config.environments
        if name not in known or part not in ("", HELD_OUT):
            all_parts = [place for each in known for place in (each, f"{each}/{HELD_OUT}")]
            near = nearest(path, all_parts)
            raise DataError(
                f"the environment {path!r} is not configured; configured: {', '.join(known) or 'none'}",
                hint=f"did you mean {near!r}?"
                if near
                else "add the environment to rollout.agent_loop.environments",
            )
        section = known[name]
        environment = made(name, section, self.context)
        count = section.held_out if part else section.tasks
        try:
            tasks = environment.tasks(count, held_out=bool(part))
        except DovetailError:
            raise
        except Exception as error:
            raise PluginBrokenError(
                f"the tasks of environment {name!r} can't be read: its `tasks` raised {type(error).__name__}: {error}",
                hint=f"correct rollout.agent_loop.environments.{name}, or report it to the author of the environment",
            ) from error
        finally:
            environment.close()
        if not tasks:
            raise DataError(
                f"environment {name!r} has no {'held-out ' if part else ''}tasks",
                hint=f"held-out tasks follow the training tasks: set rollout.agent_loop.environments.{name}.tasks to fewer than the "
                "environment has, or held_out=0"
                if part
                else f"check rollout.agent_loop.environments.{name}.tasks, the number of tasks, and the environment's settings",
            )
        for task in tasks[:count]:
            prompt = task.prompt
            yield {
                "prompt": [{"role": "user", "content": prompt}]
                if isinstance(prompt, str)
                else list(prompt),
                "data_source": name,
                "reward_model": {"ground_truth": task.ground_truth},
                "extra_info": {"environment": name, "task": dict(task.data)},
            }
