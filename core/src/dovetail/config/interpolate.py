"""`${…}` in values, resolved by OmegaConf over the merged config, defaults included.

Besides OmegaConf's own resolvers there is `share`: `${share:0.2,${data.max_response_length}}` is a fifth of that length.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dovetail.config.keys import KeyPath
from dovetail.config.layers import ConfigLayer
from dovetail.config.merge import Merger, SectionDict
from dovetail.config.plugin_choice import Resolver
from dovetail.config.schema import fields_of
from dovetail.config.serialise import escaped, plain_value

if TYPE_CHECKING:
    from omegaconf import DictConfig


class Interpolator:
    """Resolver of `${…}` in a config's values, from the merged values of all layers and the defaults.

    OmegaConf is imported only if a config interpolates: most configs do not, and are checked faster without the import.
    """

    def __init__(self, cls: type, layers: Iterable[ConfigLayer], resolver: Resolver) -> None:
        self._cls = cls
        self._layers = tuple(layers)
        self._resolver = resolver
        self._context: DictConfig | None = None
        self.from_environment: dict[KeyPath, tuple[str, Any]] = {}

    from_environment: dict[KeyPath, tuple[str, Any]]
    """Values that contain an environment variable: key path → (the text in the config, the resolved value)."""

    def __call__(self, value: str, path: KeyPath) -> Any:
        """Return what a string at a key path resolves to: a text, or a value of another type if the string is a single `${…}`.

        Raises:
            ValueError: a key or environment variable does not exist, references form a cycle, or the syntax is bad.
        """
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            node, key = self._place(path)
            node[key] = value
            _reads.clear()
            resolved = node[key]
            if OmegaConf.is_config(resolved):
                resolved = OmegaConf.to_container(resolved, resolve=True)
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"the value's `${{…}}` can't be resolved: {reason}; write `\\${{` for a literal `${{`"
            ) from error
        except RecursionError as error:
            raise ValueError("the value's `${…}` can't be resolved: it refers to itself") from error
        if _reads:
            self.from_environment[path] = (value, resolved)
        return resolved

    def _place(self, path: KeyPath) -> tuple[Any, str | int]:
        """Return the container of the value at `path` and its key there, so that relative references such as `${.sibling}` resolve."""
        from omegaconf import OmegaConf

        if self._context is None:
            for name, resolver in (("share", share), ("oc.env", _environment)):
                OmegaConf.register_resolver(
                    name, resolver, replace=True, annotation_validation="off"
                )
            merged = Merger(self._resolver).merge(self._cls, self._layers)
            self._context = OmegaConf.create(_resolvable(merged))
        node: Any = self._context
        for key in path[:-1]:
            node = node[key] if _holds(node, key) else None
        if OmegaConf.is_dict(node) or _holds(node, path[-1]):
            return node, path[-1]
        return self._context, "value"


_reads: list[str] = []
"""Environment variables read since the list was last cleared."""


def _environment(*args: Any) -> Any:
    """Call OmegaConf's own `oc.env`, and record the variable in `_reads`."""
    from omegaconf.resolvers import oc

    _reads.append(args[0])
    return oc.env(*args)


def share(part: float, whole: int) -> int:
    """Return the fraction `part` of the count `whole`, rounded to an integer of at least 1.

    Raises:
        ValueError: `part` is not a number from 0 to 1, or `whole` is not an integer.
    """
    if type(part) not in (int, float) or not 0 <= part <= 1 or type(whole) is not int:
        raise ValueError(
            f"`share` got {part!r} and {whole!r}; expected a number from 0 to 1 and a whole number"
        )
    return max(1, round(part * whole))


def _holds(node: Any, key: str | int) -> bool:
    from omegaconf import OmegaConf

    if OmegaConf.is_list(node):
        return isinstance(key, int) and key < len(node)
    return OmegaConf.is_dict(node) and key in node


def _resolvable(value: object) -> Any:
    """Return a merged value in a form that OmegaConf can load.

    Defaults are filled in. Strings in which `${` is not OmegaConf's syntax, such as regular expressions, are escaped.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import GrammarParseError

    if isinstance(value, SectionDict):
        defaults = {
            name: plain_value(field.default())
            for name, field in fields_of(value.cls).items()
            if name not in value and not field.required
        }
        value = {**defaults, **value}
    if isinstance(value, dict):
        return {key: _resolvable(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_resolvable(child) for child in value]
    if isinstance(value, str) and "${" in value:
        try:
            OmegaConf.create({"value": value})
        except GrammarParseError:
            return escaped(value)
    return value
