"""The description of TensorRT-LLM as tests ask it: members with those of base classes, and parameters."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

CONTRACT = Path(__file__).parent / "contract"


@cache
def extractor() -> ModuleType:
    """The program that describes a source tree."""
    spec = importlib.util.spec_from_file_location("trtllm_extract", CONTRACT / "extract.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@cache
def description() -> dict[str, Any]:
    """All of it."""
    found: dict[str, Any] = extractor().described()
    return found


def fields_of(name: str) -> dict[str, Any]:
    """A class's fields, by its full name or the last part of it."""
    return dict(_class(name)["fields"])


def member(name: str, wanted: str) -> dict[str, Any] | None:
    """A field or method of a class, or of a described base of it."""
    one = _class(name)
    found = one["methods"].get(wanted) or one["fields"].get(wanted)
    for base in one["bases"]:
        if found is None and any(full.endswith(f".{base}") for full in description()["classes"]):
            found = member(base, wanted)
    return found


def parameters_of(name: str, method: str) -> dict[str, dict[str, Any]]:
    """A method's parameters by name, in their order."""
    found = member(name, method)
    assert found is not None, f"{name}.{method} is not described"
    return {one["name"]: one for one in found["parameters"]}


def _class(name: str) -> dict[str, Any]:
    classes = description()["classes"]
    full = [one for one in classes if one == name or one.endswith(f".{name}")]
    assert len(full) == 1, f"{name} is described {len(full)} times"
    found: dict[str, Any] = classes[full[0]]
    return found
