"""Everything that the plugin uses of TensorRT-LLM is in the description of its source, as the plugin takes it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import dovetail_rollout_trtllm
from dovetail.interfaces import SamplingParams
from dovetail.sections import ModelSection
from dovetail_rollout_trtllm import calls, engine_imports, engine_types
from dovetail_rollout_trtllm.engine_args import engine_arguments
from dovetail_rollout_trtllm.worker import DovetailWorker

PROTOCOLS = sorted(engine_types.DESCRIBED_AS)
PACKAGE = Path(dovetail_rollout_trtllm.__file__).parent
ENGINE_ARGUMENTS = "TorchLlmArgs"


def _methods(protocol: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(protocol).items():
        if inspect.isfunction(value) and name not in ("__init__", "__subclasshook__"):
            yield name, value


def _trees() -> Iterator[tuple[str, ast.Module]]:
    for file in sorted(PACKAGE.glob("*.py")):
        yield file.stem, ast.parse(file.read_text(encoding="utf-8"))


def _called(tree: ast.AST, function: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else None
            name = node.func.id if isinstance(node.func, ast.Name) else name
            if name == function:
                yield node


def test_every_protocol_of_the_engine_names_its_class(described: Any) -> None:
    classes = {
        name
        for name, value in vars(engine_types).items()
        if inspect.isclass(value) and value.__module__ == engine_types.__name__
    }
    assert classes == set(engine_types.DESCRIBED_AS)
    assert (
        set(engine_types.DESCRIBED_AS.values()) - set(described.description()["classes"]) == set()
    )


@pytest.mark.parametrize("name", PROTOCOLS)
def test_fields_that_the_plugin_reads_are_there(described: Any, name: str) -> None:
    protocol = getattr(engine_types, name)
    for field in get_type_hints(protocol):
        assert described.member(engine_types.DESCRIBED_AS[name], field) is not None, field


@pytest.mark.parametrize("name", PROTOCOLS)
def test_methods_take_what_the_plugin_gives_them(described: Any, name: str) -> None:
    for method, function in _methods(getattr(engine_types, name)):
        theirs = described.parameters_of(engine_types.DESCRIBED_AS[name], method)
        ours = dict(list(inspect.signature(function).parameters.items())[1:])
        order = list(theirs)
        for position, (parameter, what) in enumerate(ours.items()):
            assert parameter in theirs, f"{method}({parameter})"
            if what.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
                assert order[position] == parameter, f"{method}: {parameter} is at another place"
            if what.default is not inspect.Parameter.empty:
                assert theirs[parameter]["default"] == repr(what.default), f"{method}({parameter})"
        needed = {
            parameter
            for parameter, what in theirs.items()
            if what["default"] is None and what["kind"] in ("positional", "keyword")
        }
        assert needed <= set(ours), f"{method} needs {needed - set(ours)}"


@pytest.mark.parametrize("name", PROTOCOLS)
def test_what_is_awaited_is_asynchronous(described: Any, name: str) -> None:
    for method, function in _methods(getattr(engine_types, name)):
        found = described.member(engine_types.DESCRIBED_AS[name], method)
        assert found is not None
        waited = str(inspect.signature(function).return_annotation).startswith("Awaitable")
        assert found["async"] == waited, method


def test_methods_of_later_releases_are_marked_as_such(described: Any) -> None:
    for protocol, methods in engine_types.LATER.items():
        for method in methods:
            found = described.member(engine_types.DESCRIBED_AS[protocol], method)
            assert found is not None
            assert found["later"], method


def test_what_is_taken_by_name_where_a_release_has_it_is_described(described: Any) -> None:
    """A name that none has would be passed over without a word."""
    tree = ast.parse((PACKAGE / "engine_imports.py").read_text(encoding="utf-8"))
    taken = {
        (ast.unparse(call.args[0]), ast.literal_eval(call.args[1]))
        for call in _called(tree, "getattr")
        if isinstance(call.args[1], ast.Constant)
    }
    assert taken
    for owner, name in taken:
        found = described.member(owner.removeprefix("imported('").removesuffix("')"), name)
        assert found is not None, name
        assert found["later"], name


def test_every_import_is_described(described: Any) -> None:
    for name, module in engine_imports.WHERE.items():
        assert name in described.description()["exports"][module], name
    for missing, instead in engine_imports.FALLBACKS.items():
        assert {missing, instead} <= set(engine_imports.WHERE)


def test_nothing_else_is_imported_or_reached_for(described: Any) -> None:
    """TensorRT-LLM is imported in one module, by names that are described; attributes by name are those that are listed."""
    late = {method for methods in engine_types.LATER.values() for method in methods}
    for module, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in ("tensorrt_llm", "ray"), module
            elif isinstance(node, ast.Import):
                assert not {"tensorrt_llm", "ray"} & {one.name for one in node.names}, module
        if module != "engine_imports":
            assert not list(_called(tree, "import_module")), module
        for call in _called(tree, "imported"):
            if isinstance(call.args[0], ast.Constant):
                assert call.args[0].value in engine_imports.WHERE, module
        for call in _called(tree, "call_if_there"):
            assert ast.literal_eval(call.args[1]) in late, module
        for call in _called(tree, "_on_modules"):
            hooks = {ast.literal_eval(one) for one in call.args[1:]}
            assert hooks <= set(described.description()["module_hooks"]), module


@pytest.mark.parametrize("module", ["calls", "driver", "host", "server", "worker"])
def test_who_holds_the_engine_sees_it_through_the_protocols_only(module: str) -> None:
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    assert not list(_called(tree, "getattr"))


def test_the_workers_extension_touches_its_worker_through_the_protocol_only() -> None:
    """Its methods have the worker as an untyped `self`: they hand it on, and look at nothing of it."""
    tree = ast.parse((PACKAGE / "worker.py").read_text(encoding="utf-8"))
    extension = next(
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == DovetailWorker.__name__
    )
    touched = [
        node.attr
        for node in ast.walk(extension)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    ]
    assert touched == []


def test_the_workers_extension_has_no_name_that_workers_have() -> None:
    """TensorRT-LLM refuses an extension otherwise."""
    names = {name for name in dir(DovetailWorker) if not name.startswith("__")}
    assert all(name.startswith("dovetail_") for name in names)


def test_workers_are_asked_for_methods_of_the_extension() -> None:
    tree = ast.parse((PACKAGE / "driver.py").read_text(encoding="utf-8"))
    asked = {ast.literal_eval(call.args[0]) for call in _called(tree, "_everywhere")}
    assert asked == {name for name in dir(DovetailWorker) if name.startswith("dovetail_")}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enforce_eager": True, "offload": True, "prefix_caching": False},
        {
            "tensor_parallel_size": 2,
            "expert_parallel_size": 1,
            "max_model_len": 64,
            "max_num_seqs": 8,
            "max_num_tokens": 512,
            "kv_cache_dtype": "fp8",
        },
    ],
    ids=["plain", "eager", "all"],
)
def test_engine_arguments_are_described(
    described: Any, config: Any, context: Any, tiny: Path, settings: Any
) -> None:
    model = ModelSection(path=str(tiny), tokenizer_path=str(tiny), revision="main")
    arguments = engine_arguments(config(**settings), context(weights_follow=True, model=model))
    assert {"tokenizer", "revision", "load_format"} <= set(arguments)
    known = described.fields_of(ENGINE_ARGUMENTS)
    assert set(arguments) <= set(known)
    for name, kind in engine_imports.NESTED.items():
        assert kind in known[name]["annotation"]
        for fallback in filter(None, (kind, engine_imports.FALLBACKS.get(kind))):
            assert set(arguments.get(name) or ()) <= set(described.fields_of(fallback))
    kinds = {one["default"] for one in described.fields_of("ExecutorMemoryType").values()}
    modes = (arguments.get("sleep_config") or {}).get("restore_modes", {})
    assert {repr(kind) for kind in modes} <= kinds
    for mode in modes.values():
        assert repr(mode) in described.fields_of("SleepConfig")["restore_modes"]["annotation"]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_new_tokens=4),
        SamplingParams(max_new_tokens=4, temperature=0.0, log_probs=True),
        SamplingParams(max_new_tokens=4, top_k=5, top_p=0.9, stop=("x",), stop_token_ids=(3,)),
    ],
    ids=["plain", "greedy", "all"],
)
def test_sampling_arguments_are_described(described: Any, sampling: SamplingParams) -> None:
    known = set(described.fields_of("SamplingParams"))
    assert set(calls.sampling_arguments(sampling, "processed")) <= known
    assert set(calls.scoring_arguments()) <= known


def test_ends_of_samples_and_kinds_of_log_probs_are_described(described: Any) -> None:
    annotation = described.fields_of("CompletionOutput")["finish_reason"]["annotation"]
    for reason in calls._REASONS:
        assert repr(reason) in annotation
    assert "PROCESSED" in described.fields_of("LogprobMode")


def test_the_openai_server_is_made_of_what_it_takes(described: Any) -> None:
    tree = ast.parse((PACKAGE / "engine_imports.py").read_text(encoding="utf-8"))
    made = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Call)
        and ast.unparse(node.func) == "imported('OpenAIServer')"
    )
    theirs = described.parameters_of("OpenAIServer", "__init__")
    assert len(made.args) == 1
    given = {next(iter(theirs)), *(one.arg for one in made.keywords)}
    needed = {name for name, what in theirs.items() if what["default"] is None}
    assert needed <= given <= set(theirs)
