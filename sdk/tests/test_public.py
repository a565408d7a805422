"""Public names: every listed name loads, and imports of other names are reported."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from dovetail.errors import PluginBrokenError
from dovetail_sdk.public import check_imports, private_imports, public_names


@pytest.mark.parametrize("module", public_names())
def test_every_public_name_loads(module: str) -> None:
    for name in public_names()[module]:
        assert getattr(importlib.import_module(module), name) is not None


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("from dovetail.interfaces.plugin import Plugin", "from dovetail.interfaces import Plugin"),
        (
            "from dovetail_serving.weight_wire import Outcome",
            "from dovetail_serving import Outcome",
        ),
        ("from dovetail.data.ledger import Ledger", "dovetail.data.ledger.Ledger is private"),
        ("from dovetail.batch import Raged", "public name is dovetail.batch.Ragged"),
        ("from dovetail import preflight", "dovetail.preflight is private"),
        ("import dovetail.run.build", "dovetail.run.build is private"),
        (
            "def f():\n    from dovetail.plugins.load import make_plugin",
            "from dovetail.plugins import",
        ),
    ],
)
def test_a_private_import_is_named_with_what_to_write(
    tmp_path: Path, line: str, advice: str
) -> None:
    (tmp_path / "plugin.py").write_text(f"{line}\n")
    [found] = private_imports(tmp_path)
    assert advice in found
    assert found.startswith(f"{tmp_path / 'plugin.py'}:")
    with pytest.raises(PluginBrokenError, match=r"plugin\.py"):
        check_imports(tmp_path)


def test_public_imports_and_those_of_others_pass(tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text(
        "import dovetail\nimport dovetail.batch\nimport dovetail_mine.parts\nimport numpy\n"
        "from dovetail import __version__, batch\nfrom dovetail.batch import Batch\n"
        "from dovetail.errors import ConfigError\nfrom . import parts\n"
    )
    check_imports(tmp_path)


def test_a_file_that_is_not_python_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text("import numpy\ndef f(:\n")
    with pytest.raises(PluginBrokenError, match=r"plugin\.py:2 is not Python"):
        check_imports(tmp_path)


@pytest.mark.parametrize("library", ["dovetail_datasets", "dovetail_rollouts", "dovetail_stages"])
def test_a_library_imports_its_own_modules(library: str) -> None:
    package = importlib.import_module(library)
    (place,) = package.__path__
    check_imports(Path(place))
