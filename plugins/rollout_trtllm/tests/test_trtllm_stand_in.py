"""The stand-in speaks the description, and the program that makes descriptions says what a source tree has."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STAND_IN = Path(__file__).parent / "stand_in"
CLASSES = sorted(
    json.loads((Path(__file__).parent / "contract" / "tensorrt_llm.json").read_text("utf-8"))[
        "classes"
    ]
)
SIMPLER = {"load_format"}
"""Arguments whose default is an enumeration in TensorRT-LLM and its value in the stand-in."""


def _taken(full_name: str) -> list[str]:
    """What the stand-in's class takes by name: the fields of a dataclass or an enumeration."""
    module, _, name = full_name.rpartition(".")
    tree = ast.parse(STAND_IN.joinpath(*module.split(".")).with_suffix(".py").read_text("utf-8"))
    node = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    return [
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    ]


def _shape(what: dict[str, Any]) -> Any:
    """What has to be the same: everything but annotations."""
    if "parameters" in what:
        rows = [(one["name"], one["kind"], one["default"]) for one in what["parameters"]]
        return what["async"], rows
    return (what["default"] or "").lower()


@pytest.mark.parametrize("name", [one for one in CLASSES if not one.endswith(".CudaGraphConfig")])
def test_the_stand_in_has_the_described_names_parameters_and_defaults(
    described: Any, name: str
) -> None:
    ours = described.description()["classes"][name]
    found = described.extractor().extract(STAND_IN, {name: [*ours["fields"], *ours["methods"]]})[
        name
    ]
    for kind in ("fields", "methods"):
        for member, what in found[kind].items():
            if member not in SIMPLER:
                assert _shape(what) == _shape(ours[kind][member]), member


@pytest.mark.parametrize(
    "name",
    ["TorchLlmArgs", "KvCacheConfig", "DecodeCudaGraphConfig", "SleepConfig", "SamplingParams"],
)
def test_the_stand_in_takes_nothing_by_name_that_is_not_described(
    described: Any, name: str
) -> None:
    full = next(one for one in CLASSES if one.endswith(f".{name}"))
    taken = _taken(full)
    assert taken
    assert set(taken) <= set(described.description()["classes"][full]["fields"])


SOURCE = """
class Base:
    rank: int = 3

    def __init__(self, engine: "Path", *rest, size: int = 4, **more):
        self.engine = engine
        self.rank = 5

    @property
    def logits(self) -> Optional[Tensor]:
        return None

    async def wait(self, tags: list[str] | None = None, /) -> None:
        secret = "code is not described"
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "base.py").write_text(SOURCE)
    return tmp_path


def test_a_source_tree_is_described_by_names_and_types(described: Any, tree: Path) -> None:
    wanted = {"engine.base.Base": ["rank", "engine", "logits", "__init__", "wait", "none"]}
    found = described.extractor().extract(tree, wanted)["engine.base.Base"]
    assert found["fields"] == {
        "rank": {"annotation": "int", "default": "3"},
        "engine": {"annotation": None, "default": None},
        "logits": {"annotation": "Optional[Tensor]", "default": None},
    }
    wait = found["methods"]["wait"]
    assert wait["async"]
    assert wait["parameters"] == [
        {"name": "tags", "kind": "positional", "annotation": "list[str] | None", "default": "None"}
    ]
    kinds = [(one["name"], one["kind"]) for one in found["methods"]["__init__"]["parameters"]]
    assert kinds == [
        ("engine", "positional"),
        ("rest", "rest"),
        ("size", "keyword"),
        ("more", "keywords"),
    ]
    assert "secret" not in json.dumps(found)


def test_what_another_release_lacks_or_has_otherwise_is_said(described: Any, tree: Path) -> None:
    wanted = {"engine.base.Base": ["rank", "wait", "logits"]}
    ours = described.extractor().extract(tree, wanted)
    source = tree / "engine" / "base.py"
    source.write_text(
        SOURCE.replace("def wait", "def hold").replace("rank: int = 3", "rank: int = 7")
    )
    found = list(
        described.extractor().differences(ours, described.extractor().extract(tree, wanted))
    )
    assert (True, "engine.base.Base.wait is missing") in found
    assert any(not missing and "rank" in text for missing, text in found)
    assert len(found) == 2
    ours["engine.base.Base"]["methods"]["wait"]["later"] = True
    assert (False, "engine.base.Base.wait is missing") in list(
        described.extractor().differences(ours, described.extractor().extract(tree, wanted))
    )


def test_the_check_of_an_installed_engine_fails_where_something_is_missing(
    described: Any, tree: Path
) -> None:
    done = subprocess.run(
        [sys.executable, str(described.CONTRACT / "extract.py"), str(tree), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "MISSING: tensorrt_llm._torch.async_llm.AsyncLLM is missing" in done.stdout
