"""`${…}` in values, resolved by OmegaConf over the merged config, defaults included.

Besides OmegaConf's own resolvers there is `share`: `${share:0.2,${data.max_response_length}}` is a fifth of that length.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dovetail.config.keys import KeyPath
from dovetail.config.layers import Layer, is_mapping
from dovetail.config.merge import Merger, SectionDict
from dovetail.config.schema import fields_of
from dovetail.config.selection import Resolver
from dovetail.config.serialise import plain_value

if TYPE_CHECKING:
    from omegaconf import DictConfig

_OPENING = "${"


class Interpolator:
    """Resolves interpolations against everything that the layers and the defaults say.

    OmegaConf is imported only where a config interpolates: most do not, and checking them stays quick.
    """

    def __init__(self, cls: type, layers: Iterable[Layer], resolver: Resolver) -> None:
        self._cls = cls
        self._layers = tuple(layers)
        self._resolver = resolver
        self._context: DictConfig | None = None
        self._literals: dict[str, str] = {}

    def __call__(self, value: str, path: KeyPath) -> Any:
        """The value that a string at that key path stands for.

        Raises:
            ValueError: a key that does not exist, a missing environment variable, a cycle, or bad syntax.
        """
        from omegaconf import DictConfig, ListConfig, OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            node, key = self._place(path)
            node[key] = value
            resolved = node[key]
            if isinstance(resolved, (DictConfig, ListConfig)):
                resolved = OmegaConf.to_container(resolved, resolve=True)
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"can't be interpolated: {reason}; `\\${{` is a literal `${{`"
            ) from error
        except RecursionError as error:
            raise ValueError("can't be interpolated: it refers to itself") from error
        return self._restored(resolved)

    def _place(self, path: KeyPath) -> tuple[Any, str | int]:
        """The container that holds the value, so that `${.sibling}` means what it says, and its key there."""
        from omegaconf import DictConfig, OmegaConf

        if self._context is None:
            OmegaConf.register_resolver("share", share, replace=True, annotation_validation="off")
            merged = Merger(self._resolver).merge(self._cls, self._layers)
            self._context = OmegaConf.create(self._parsable(_with_defaults(merged)))
        node: Any = self._context
        for key in path[:-1]:
            node = node[key] if _holds(node, key) else None
        if isinstance(node, DictConfig) or _holds(node, path[-1]):
            return node, path[-1]
        return self._context, "value"

    def _parsable(self, value: Any) -> Any:
        """The tree without what OmegaConf would stumble over: `${` in templates and patterns, and its own `???`."""
        if is_mapping(value):
            return {key: self._parsable(child) for key, child in value.items()}
        if isinstance(value, list):
            return [self._parsable(child) for child in value]
        if isinstance(value, str) and (value == "???" or not _parses(value)):
            placeholder = f"\0{len(self._literals)}\0"
            self._literals[placeholder] = value
            return placeholder
        return value

    def _restored(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._restored(child) for key, child in value.items()}
        if isinstance(value, list):
            return [self._restored(child) for child in value]
        if isinstance(value, str) and "\0" in value:
            for placeholder, literal in self._literals.items():
                value = value.replace(placeholder, literal)
        return value


def share(part: float, whole: int) -> int:
    """That part of a count, rounded to a whole number, at least 1.

    Raises:
        ValueError: the part is not a number from 0 to 1, or the whole is no whole number.
    """
    if type(part) not in (int, float) or not 0 <= part <= 1 or type(whole) is not int:
        raise ValueError(
            f"share takes a number from 0 to 1 and a whole number, not {part!r} and {whole!r}"
        )
    return max(1, round(part * whole))


def _holds(node: Any, key: str | int) -> bool:
    from omegaconf import DictConfig, ListConfig

    if isinstance(node, ListConfig):
        return isinstance(key, int) and key < len(node)
    return isinstance(node, DictConfig) and key in node


def _parses(text: str) -> bool:
    if _OPENING not in text:
        return True
    from omegaconf import OmegaConf
    from omegaconf.errors import GrammarParseError

    try:
        OmegaConf.create({"value": text})
    except GrammarParseError:
        return False
    return True


def _with_defaults(value: Any) -> Any:
    if isinstance(value, SectionDict):
        filled: dict[str, Any] = {}
        for name, field in fields_of(value.cls).items():
            default = field.default()
            if name not in value and not field.required:
                filled[name] = plain_value(default)
        filled.update({key: _with_defaults(child) for key, child in value.items()})
        return filled
    if isinstance(value, list):
        return [_with_defaults(child) for child in value]
    if isinstance(value, dict):
        return {key: _with_defaults(child) for key, child in value.items()}
    return value
