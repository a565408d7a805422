"""Every method of an interface and every hook is documented, on its page, and exercised by a suite or a test."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail.batch import Column
from dovetail.batch.columns import GLOSSARY
from dovetail.hooks import HOOKS, Observers
from dovetail.interfaces import HookSpec, Plugin, Run, RunPosition
from dovetail.plugins.contract import import_object
from dovetail.plugins.index import default_index
from dovetail.plugins.kinds import KINDS
from dovetail_console.conformance_report import TIERS
from dovetail_sdk.check.signatures import members
from dovetail_sdk.check.suites import suite_name
from dovetail_sdk.docs_capabilities import CAPABILITIES, EVERYWHERE
from dovetail_sdk.docs_interfaces import interface_table, pages
from dovetail_sdk.docs_source import attribute_docs, bare, markdown
from dovetail_sdk.testing import conformance

ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="needs the checkout")

METHODS = [
    (kind, name)
    for kind, described in KINDS.items()
    for name in members(import_object(described.interface))
    if name not in vars(Plugin)
]

THROUGH = {
    ("reward_manager", "selects"): "plugins/rewards/tests/test_rewards_in_lock.py",
    ("engine", "shape"): "plugins/console/tests/test_memory.py",
    ("source", "forecast"): "plugins/rollouts/tests/test_measured_run.py",
    ("source", "launch"): "plugins/datasets/tests/test_datasets_conformance.py",
    ("source", "named_by_rows"): "plugins/rewards/tests/test_rewards_in_lock.py",
    ("source", "verdicts"): "plugins/datasets/tests/test_data_commands.py",
    ("reward_function", "of_function"): "plugins/rollouts/tests/scoring/test_reward_functions.py",
}
"""Methods that tests reach through what calls them, and where."""


@pytest.fixture(scope="module")
def texts():
    return pages()


@functools.cache
def suite_source(kind):
    """The source of a kind's suite, with all modules of the kit that the suite uses."""
    suite = getattr(conformance, suite_name(kind))
    modules = {sys.modules[base.__module__] for base in suite.__mro__}
    return "".join(inspect.getsource(m) for m in modules if m.__name__.startswith("dovetail_sdk"))


@functools.cache
def all_tests():
    """The source of all tests in the checkout, except this file."""
    files = [*ROOT.glob("*/tests/**/*.py"), *ROOT.glob("plugins/*/tests/**/*.py")]
    files += ROOT.glob("tests/**/*.py")
    return "".join(f.read_text(encoding="utf-8") for f in files if f != Path(__file__))


def section(page, name):
    """The section of a page about a method: signature and docstring."""
    return page.partition(f"\n### {name}\n")[2].partition("\n### ")[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kinds_page_has_all_of_its_methods_with_their_docstrings(texts, kind):
    page = texts[f"{kind}.md"]
    interface = import_object(KINDS[kind].interface)
    assert f"`{KINDS[kind].group}`" in page
    assert f"conformance.{suite_name(kind)}`" in page
    assert markdown(interface.__doc__) in page
    for name, member in members(interface).items():
        if name in vars(Plugin):
            continue
        assert (bare(member).__doc__ or "").strip(), f"{interface.__name__}.{name} has no docstring"
        assert markdown(bare(member).__doc__) in section(page, name), name
        assert f"{name}(" in section(page, name) or f"{name}: " in section(page, name)


def test_what_every_plugin_has_is_on_a_page_of_its_own(texts):
    for name, member in members(Plugin).items():
        assert (bare(member).__doc__ or "").strip(), name
        assert markdown(bare(member).__doc__) in section(texts["plugin.md"], name)
    for name, text in attribute_docs(Plugin).items():
        assert f"| `{name}: " in texts["plugin.md"]
        assert text


def test_the_page_of_a_run_has_all_that_a_trainer_calls(texts):
    assert markdown(Run.__doc__) in texts["run.md"]
    for name, member in members(Run).items():
        assert markdown(bare(member).__doc__) in section(texts["run.md"], name), name
    assert all(f"| `{name}: " in texts["run.md"] for name in attribute_docs(RunPosition))


def test_the_page_of_batches_has_every_column_and_a_declaration_that_works(texts):
    page = texts["batch.md"]
    assert [name for name in GLOSSARY if f"| `{name}` |" not in page] == []
    source = page.split("```python\n")[1].split("```")[0]
    declared: dict[str, Any] = {}
    exec(source, declared)
    assert isinstance(declared["columns"][0], Column)


def test_every_class_attribute_of_an_interface_is_documented():
    for kind in KINDS.values():
        interface = import_object(kind.interface)
        declared = [n for n in vars(interface).get("__annotations__", {}) if not n.startswith("_")]
        assert set(declared) <= attribute_docs(interface).keys(), kind.name


def test_every_hook_is_documented_and_on_the_page(texts):
    for name, arguments in HOOKS.items():
        doc = getattr(HookSpec, name).__doc__
        assert (doc or "").strip(), name
        told = section(texts["hooks.md"], name)
        assert markdown(doc) in told
        assert all(f"{argument}: " in told for argument in arguments)


def test_the_observer_on_the_page_observes(texts):
    [code] = re.findall(r"```python\n(from .*?)```", texts["hooks.md"], re.DOTALL)
    names = {}
    exec(code, names)
    observer, observers = names["BestReward"](), Observers()
    observers.add(observer)
    for step, mean in enumerate((0.25, 0.75, 0.5), start=1):
        observers.hook.step_finished(step=step, metrics={"reward/mean": mean})
    assert observer.best == 0.75
    assert not observers.failures


@CHECKOUT
def test_the_index_links_every_page(texts):
    index = (ROOT / "docs" / "interfaces" / "README.md").read_text() + "".join(interface_table())
    assert [name for name in texts if f"({name})" not in index] == []


@CHECKOUT
@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_every_method_is_exercised_by_its_kinds_suite_or_by_a_test(kind, name):
    if (kind, name) in THROUGH:
        assert (ROOT / THROUGH[kind, name]).is_file()
        return
    # A test calls the method, or defines a plugin with this method, which core calls.
    used = rf"(\.|def ){name}\b"
    assert re.search(used, suite_source(kind)) or re.search(used, all_tests())


@CHECKOUT
@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_emitted_and_observed_by_a_test(hook):
    files = [*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
    assert any(f"hooks.{hook}(" in file.read_text() for file in files)
    assert re.search(rf"def {hook}\(|\"{hook}\"", all_tests())


def test_every_capability_that_is_claimed_or_asked_for_is_explained():
    explained = {kind: {*EVERYWHERE, *CAPABILITIES.get(kind, {})} for kind in KINDS}
    for entry in default_index().entries():
        if entry.manifest and entry.distribution.startswith("dovetail") and entry.kind in KINDS:
            assert set(entry.manifest.capabilities) <= explained[entry.kind], entry.name
    for kind in KINDS:
        asked = re.findall(r"needs\(\"(\w+)\"\)", suite_source(kind))
        assert set(asked) <= explained[kind], kind


@CHECKOUT
def test_the_tiers_of_the_publishing_page_are_those_that_are_worked_out():
    text = (ROOT / "docs" / "publishing.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (\w+) \|", text.partition("| tier |")[2], re.MULTILINE) == list(TIERS)


def test_a_docstrings_sections_become_lists():
    text = markdown(
        "Do it.\n\n    Args:\n        one: what\n            goes on.\n        two: else.\n\n"
        "    Returns:\n        A figure,\n        in nats.\n\n    Raises:\n        ValueError: never."
    )
    assert text == (
        "Do it.\n\n*Args:*\n\n- `one`: what goes on.\n- `two`: else.\n\n"
        "*Returns:* A figure, in nats.\n\n*Raises:*\n\n- `ValueError`: never."
    )
