"""The extra `torch`, which the suites and test doubles of some kinds need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dovetail.errors import PluginNeedsError

_TORCH = {"torch", "transformers", "PIL", "jaxtyping", "dovetail_rollouts", "dovetail_stages"}
"""Import names of the packages in the extra `torch`."""


def naming_the_extra(load: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap a module's lazy `__getattr__` so that the error for a missing package names the pip extra to install, `dovetail-sdk[torch]`."""

    def get(name: str) -> Any:
        try:
            return load(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in _TORCH:
                raise
            raise PluginNeedsError(
                f"{name} needs the package {error.name}, which is not installed",
                hint="pip install 'dovetail-sdk[torch]'",
            ) from error

    return get
