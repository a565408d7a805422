"""Facts about an installed plugin that no test of its behaviour shows: whether it is typed and documented, and whether its config can be
imported without heavy packages.
"""

from __future__ import annotations

import json
import subprocess
import sys

import attrs

from dovetail.interfaces import Plugin
from dovetail.plugins.contract import config_of
from dovetail.plugins.entry import PluginEntry
from dovetail.plugins.index import default_index
from dovetail.plugins.manifest import package_directories

_HEAVY = ("torch", "transformers", "ray", "vllm", "sglang", "tensorrt_llm", "megatron")
_ASK = "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); importlib.import_module(sys.argv[2]); print(json.dumps([name for name in sys.argv[3:] if name in sys.modules]))"  # fmt: skip


@attrs.frozen
class Fact:
    """Whether a plugin meets one condition of a quality tier, and the fix if it does not."""

    holds: bool
    reason: str | None = None


def facts_of(entry: PluginEntry, cls: type[Plugin]) -> dict[str, Fact]:
    """Return the conditions of a plugin's quality tier other than passing tests, by name.

    `typed`: the package ships type annotations (py.typed). `documented`: the classes and their public methods have docstrings. `lazy`:
    importing the module of the plugin's config imports no heavy package, such as torch.
    """
    return {
        "typed": _typed(entry),
        "documented": _documented(cls, entry),
        "lazy": _lazy(entry),
    }


def _typed(entry: PluginEntry) -> Fact:
    package = _package(entry)
    if any((place / "py.typed").is_file() for place in package_directories(package)):
        return Fact(True)
    return Fact(False, f"put an empty file py.typed into the package {package} and ship it")


def _documented(cls: type[Plugin], entry: PluginEntry) -> Fact:
    lacking = [] if (vars(cls).get("__doc__") or "").strip() else [f"class {cls.__qualname__}"]
    config = config_of(cls, default_index().kind(entry.kind))
    if not (config.__doc__ or "").strip():
        lacking.append(f"class {config.__qualname__}")
    for name, member in vars(cls).items():
        bare = getattr(member, "__func__", getattr(member, "fget", member))
        own = not name.startswith("_") and hasattr(bare, "__code__")
        inherited = any(name in vars(base) for base in cls.__mro__[1:])
        if own and not inherited and not (bare.__doc__ or "").strip():
            lacking.append(f"{cls.__qualname__}.{name}")
    if not lacking:
        return Fact(True)
    return Fact(False, f"write the missing docstrings: {', '.join(lacking)}")


def _lazy(entry: PluginEntry) -> Fact:
    """Check that importing the module of the plugin's config, as `dovetail check` does, imports no heavy package."""
    module = (entry.manifest.config if entry.manifest else entry.target).partition(":")[0]
    command = [sys.executable, "-c", _ASK, json.dumps(sys.path), module, *_HEAVY]
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter
            command, capture_output=True, text=True, timeout=120, check=True
        )
        heavy = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        return Fact(False, f"{module} can't be imported by itself: {type(error).__name__}")
    if not heavy:
        return Fact(True)
    return Fact(
        False,
        f"importing {module}, as every check of a config does, imports {', '.join(heavy)}; import them where they are "
        "used, and keep the config in a module of its own",
    )


def _package(entry: PluginEntry) -> str:
    return entry.target.split(":")[0].split(".")[0]
