"""Stubs for packages whose names load on first use: type checkers see them as plain imports.

`dovetail.interfaces` and the kit import nothing before it is asked for, through a module's `__getattr__`. What that gives is
an object of any type to a type checker, so that each such package has an `__init__.pyi` made from its table of names.
"""

from __future__ import annotations

import importlib
from pathlib import Path

PACKAGES = ("dovetail.interfaces", "dovetail_sdk.testing", "dovetail_sdk.testing.conformance")
COMMAND = "python -m dovetail_sdk interfaces"
"""What writes them, together with the description of the interfaces."""


def stub(package: str) -> str:
    """The stub of a package, from its tables."""
    module = importlib.import_module(package)
    homes: dict[str, list[tuple[str, str]]] = {}
    for name, home in module._MODULE_OF.items():  # noqa: SLF001 - the table that its own __getattr__ reads
        homes.setdefault(f"{package}.{home}", []).append((name, name))
    if package == "dovetail.interfaces":
        for name, (home, real) in module._ELSEWHERE.items():  # noqa: SLF001
            homes.setdefault(home, []).append((real, name))
    lines = [
        f"# Written by `{COMMAND}` from the table of names in __init__.py.",
        "# fmt: off",
        "# ruff: noqa: I001, RUF100",
        "",
    ]
    for home, names in sorted(homes.items()):
        renamed = [pair for pair in names if pair[0] != pair[1]]
        lines += [f"from {home} import {real} as _{real}" for real, _ in sorted(renamed)]
        lines += [
            f"from {home} import {name} as {name}" for name, same in sorted(names) if name == same
        ]
    renamed = [pair for names in homes.values() for pair in sorted(names) if pair[0] != pair[1]]
    lines += ["", *(f"{name} = _{real}" for real, name in renamed)] if renamed else []
    return "\n".join(lines) + "\n"


def place(package: str) -> Path:
    """Where the stub of a package lies."""
    return Path(str(importlib.import_module(package).__file__)).with_suffix(".pyi")


def write() -> None:
    """Write every stub."""
    for package in PACKAGES:
        place(package).write_text(stub(package), encoding="utf-8")


def drift() -> list[str]:
    """The stubs that are not what their tables say."""
    return [
        f"{place(package)} is not what its package's table says"
        for package in PACKAGES
        if not place(package).is_file()
        or place(package).read_text(encoding="utf-8") != stub(package)
    ]
