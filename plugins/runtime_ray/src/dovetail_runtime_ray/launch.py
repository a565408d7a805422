"""Starting processes as Ray actors, and the state that all processes of a run share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import attrs
import ray

from dovetail.errors import DovetailError
from dovetail.interfaces import Logger
from dovetail_runtime_ray.health import CallTimeouts, Health, why_lost
from dovetail_runtime_ray.logs import last_printed
from dovetail_runtime_ray.process import CONTROL, CONTROL_THREADS
from dovetail_runtime_ray.wire import ProcessSetup


@attrs.frozen(kw_only=True)
class RunProcesses:
    """The controller's state that is common to all processes of a run."""

    health: Health
    limits: CallTimeouts
    logger: Logger
    """The logger of the processes' warnings and deaths."""
    run_directory: str | None
    """The directory of the processes' log files; None outside a run."""
    ending: ExitStack = attrs.field(factory=ExitStack)
    """The exit stack that ends the processes when the runtime is closed."""

    def printed(self, name: str) -> str:
        """Return the last lines that the process of this name printed, for an error; empty if they can't be read."""
        return last_printed(self.run_directory, name)

    def started(
        self,
        refs: Mapping[int, Any],
        timeout: float,
        label: str,
        *,
        late: Callable[[list[int]], DovetailError],
        died: Callable[[int, str], DovetailError],
    ) -> list[Any]:
        """Wait for the answers of starting processes, and return them in order.

        Args:
            refs: Ray's references by the processes' numbers.
            timeout: seconds for all processes together.
            label: the prefix of the processes' log files.
            late: a function that returns the error, given the numbers of the processes that did not answer in time.
            died: a function that returns the error, given the number of a process that died and the cause.
        """
        _, waiting = ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout)
        if waiting:
            raise late([number for number, ref in refs.items() if ref in waiting])
        answers = []
        for number, ref in refs.items():
            try:
                answers.append(ray.get(ref))
            except ray.exceptions.RayError as error:
                # The error contains the last output, since a run that does not start keeps no directory.
                why = f"{why_lost(error)}{self.printed(f'{label}-{number}')}"
                raise died(number, why) from error
        return answers


def start_actor(process: type, setup: ProcessSetup, **options: Any) -> Any:
    """Start a process, and return its handle without waiting. Extra threads run control methods, such as `stacks`, during other calls.

    Args:
        process: the process's class.
        setup: the process's set-up.
        options: Ray's options for placement and resources.
    """
    remote: Any = ray.remote
    actor = remote(concurrency_groups={CONTROL: CONTROL_THREADS})(process)
    return actor.options(max_restarts=0, runtime_env=setup.runtime_env(), **options).remote(setup)
