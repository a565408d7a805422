"""Reference pages of the interfaces, made from the code: one for each kind of plugin, and pages on hooks, preflight rules, runs, batches
and public names.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dovetail.batch.columns import GLOSSARY
from dovetail.config.keys import format_path
from dovetail.hooks import HOOKS
from dovetail.interfaces import HookSpec, Plugin, Run
from dovetail.plugins.contract import import_object
from dovetail.plugins.kinds import KINDS, Kind
from dovetail_console.plugin_page import places_of
from dovetail_sdk.check.signatures import members, signature_text
from dovetail_sdk.check.suites import suite_name
from dovetail_sdk.docs_capabilities import CAPABILITIES, EVERYWHERE
from dovetail_sdk.docs_source import attribute_docs, bare, markdown
from dovetail_sdk.interfaces import describe_all
from dovetail_sdk.markdown import inline, table
from dovetail_sdk.public import first_paragraph, public_names

_BACK = "[all interfaces](README.md)"

_PLUGIN = """A plugin is a class that extends the interface of its kind and sets the attributes below. An instance is created from its config and its
context, which is cheap; `start` loads models and other heavy objects; `close` releases them. If a config selects the class by its file, `name` and `api` may be left out."""

_HOOKS = """An observer is an object with methods that carry a hook's name and the mark `dovetail.hooks.hookimpl`. Such a method takes any of the hook's arguments, and returns nothing.
If an observer raises, the error is reported, and the run and the other observers continue.
The environment variable `DOVETAIL_SKIP_OBSERVERS=report,other` turns installed observers off, by the names of their entry points.

```python
from dovetail.hooks import hookimpl


class BestReward:
    def __init__(self):
        self.best = float("-inf")

    @hookimpl
    def step_finished(self, metrics):
        self.best = max(self.best, metrics["reward/mean"])
```

```toml
[project.entry-points."dovetail.hooks"]
best_reward = "my_package:BestReward"
```"""

_PREFLIGHT = '''A rule is a function of a config and its plan. It yields a `Finding` for each problem, and nothing if there is none. `dovetail check` and the start of a run
call every rule of the installed packages. Findings show the rule's name, and `preflight.ignore` turns the rule off by this name.

```python
from dovetail.interfaces import Finding


def single_epoch(config, plan):
    """Says in its docstring what it catches: `dovetail plugins list preflight` shows that."""
    if config.actor.epochs > 1:
        yield Finding.warning(f"actor.epochs = {config.actor.epochs}", hint="set actor.epochs=1")
```

```toml
[project.entry-points."dovetail.preflight"]
my_rules = "my_package.my_rules"
```

The entry point names a module, whose public functions are all rules, or one function as `module:function`. `config` is the whole `RunConfig`. `plan` is the run's plan
(stages, models, counts, the chosen plugins), or None if planning failed; its counts of steps are None if the data has not been read. If a rule raises, the error is reported
as a warning, and the run continues. `dovetail_sdk.testing.findings_of` tests one rule on a config; the suite
`dovetail_sdk.testing.conformance.RulesConformance` tests all rules of a package on many configs.'''

_BATCH = """`batch["scores"]` is a column: a NumPy array [N] if its shape is dense, a `Ragged` if it is ragged (`values`, packed end to end, and `lengths` of its rows),
a list if it is object. `batch.with_columns({"scores": …})` returns a new batch. A plugin declares its own columns in its class attribute `columns`:

```python
from dovetail.batch import Column

columns = (
    Column("mypackage.length_share", "float32", "dense", "length / limit", "my_stage"),
    Column("mypackage.heads", "float32", "ragged", "value heads", "my_stage", "response_ids", (3,)),
)
```

`inner` is the shape of one value: the second column is [T, 3]; with `inner=(None,)` it is [T, K], K the same in all rows of a run, such as the K of top-K log-probabilities.
The name before it says which column's rows have the same lengths. A stage makes the second column with `batch["response_ids"].with_values(values)`, values float32 [T, 3], or
with `Ragged.from_list(rows, np.float32, inner=(3,))`, where `inner` matters if all rows are empty. Stages, workers, losses, checks and fault files take [T, K] as they take [T].

Columns of core; `dovetail plan CONFIG --columns` shows which of them a run has, and when:"""

_RUN = (
    ("import", "`from dovetail.interfaces import Run`"),
    ("a double for tests of trainers", "`dovetail_sdk.testing.ScriptedRun`"),
    ("conformance suite", "`dovetail_sdk.testing.conformance.RunConformance`"),
)

_PUBLIC = """Plugins import these names from these packages, and nothing else of `dovetail` and its libraries: modules below them are private and may change.
`dovetail plugins check` names every import that is not public."""


def pages() -> dict[str, str]:
    """Return the Markdown text of every reference page by file name, without the index."""
    described = describe_all()
    texts = {
        f"{name}.md": _page(kind, described["interfaces"][name]) for name, kind in KINDS.items()
    }
    texts["plugin.md"] = _joined(
        "# Every plugin",
        _BACK,
        _PLUGIN,
        *_attributes(
            {name: {"declared": text} for name, text in _declared(Plugin).items()}, Plugin
        ),
        *_methods("## Methods", members(Plugin), Plugin),
        *_capabilities(EVERYWHERE),
        *_types("dovetail.interfaces.plugin", ("PluginContext", "Reduction")),
    )
    hooks = described["hooks"]
    texts["hooks.md"] = _joined(
        "# Hooks",
        f"Version {hooks['api']} · entry-point group `dovetail.hooks` · {_BACK}",
        _HOOKS,
        *_methods("## Hooks", HOOKS, HookSpec),
    )
    texts["preflight.md"] = _joined(
        "# Preflight rules",
        f"Entry-point group `dovetail.preflight` · a package to start from: `dovetail plugins new preflight my_rule` · {_BACK}",
        _PREFLIGHT,
        *_types("dovetail.interfaces.preflight", ("Finding",)),
    )
    texts["run.md"] = _joined(
        "# Run",
        f"{_BACK} · [trainer](trainer.md), which drives it · [stage](stage.md), of which its steps are made",
        markdown(Run.__doc__),
        "\n".join(table(("", ""), _RUN)),
        *_methods("## Methods", members(Run), Run),
        *_types("dovetail.interfaces.run", ("RunPosition",)),
    )
    texts["batch.md"] = _joined(
        "# Batches and their columns",
        f"{_BACK} · [stage](stage.md), which gets and returns a batch",
        _BATCH,
        "\n".join(table(("column", "dtype", "shape", "meaning", "written by"), _columns())),
        *_types("dovetail.batch", ("Batch", "Ragged", "Column")),
    )
    texts["public.md"] = _joined("# What is public", _BACK, _PUBLIC, *_public())
    return texts


def _public() -> Iterator[str]:
    """Yield a table of public names for each public package."""
    for module, names in public_names().items():
        doc = (inspect.getdoc(importlib.import_module(module)) or "").partition("\n")[0]
        rows = [(f"`{name}`", inline(first_paragraph(module, name))) for name in sorted(names)]
        yield f"## `{module}`"
        yield doc
        yield "\n".join(table(("name", ""), rows))


def _columns() -> list[tuple[str, ...]]:
    return [
        (f"`{column.name}`", column.dtype, column.shape, column.meaning, column.owner)
        for column in GLOSSARY.values()
    ]


def interface_table() -> list[str]:
    """Return the lines of the table of all kinds of plugin, with links to their pages."""
    rows = [
        (
            f"[`{kind.name}`]({kind.name}.md)",
            _class_name(kind),
            kind.api,
            _first_line(import_object(kind.interface)),
            ", ".join(f"`{place}`" for place in _places(kind)),
        )
        for kind in KINDS.values()
    ]
    return table(("kind", "interface", "version", "", "in a config"), rows)


def _page(kind: Kind, described: Mapping[str, Any]) -> str:
    interface = import_object(kind.interface)
    own = {n: m for n, m in described["methods"].items() if _owner(interface, n) is not Plugin}
    wanted = [name for name, method in own.items() if method["required"]]
    given = [n for n in own if _owner(interface, n).__module__.startswith("dovetail.dispatch")]
    rest = [name for name in own if name not in (*wanted, *given)]
    common = _declared(Plugin)
    attributes = {n: a for n, a in described["attributes"].items() if n not in common}
    facts = [
        ("import", f"`from dovetail.interfaces import {_class_name(kind)}`"),
        (
            "version",
            f"{kind.api}: a plugin that needs all of it says `api = {_range(kind)}`",
        ),
        ("entry-point group", f"`{kind.group}`"),
        (
            "in a config",
            ", ".join(f"`{place}`" for place in _places(kind)) or "no config selects it",
        ),
        ("its `Config` extends", f"`{kind.section.replace(':', '.')}`"),
        ("conformance suite", f"`dovetail_sdk.testing.conformance.{suite_name(kind.name)}`"),
        ("a package to start from", f"`dovetail plugins new {kind.name} my_{kind.name}`"),
    ]
    return _joined(
        f"# {kind.name}: {_class_name(kind)}",
        f"{_BACK} · [what every plugin has](plugin.md)",
        markdown(interface.__doc__),
        "\n".join(table(("", ""), facts)),
        *_attributes(attributes, interface),
        *_methods("## Methods to write", wanted, interface),
        *_methods("## Methods with a default", rest, interface),
        *_methods("## Methods that are given", given, interface),
        *_capabilities(CAPABILITIES.get(kind.name, {})),
        *_types(interface.__module__, tuple(described["types"])),
    )


def _attributes(attributes: Mapping[str, Mapping[str, Any]], cls: type) -> Iterator[str]:
    if attributes:
        docs = attribute_docs(cls)
        yield "## Class attributes"
        rows = [(f"`{a['declared']}`", inline(docs.get(n, ""))) for n, a in attributes.items()]
        yield "\n".join(table(("attribute", "meaning"), rows))


def _methods(heading: str, names: Iterable[str], cls: type) -> Iterator[str]:
    found = members(cls)
    if names:
        yield heading
    for name in names:
        yield f"### {name}"
        yield f"```python\n{signature_text(found[name], name)}\n```"
        yield markdown(bare(found[name]).__doc__)


def _capabilities(capabilities: Mapping[str, str]) -> Iterator[str]:
    if capabilities:
        yield "## Capabilities"
        rows = [(f"`{name}`", meaning) for name, meaning in capabilities.items()]
        yield "\n".join(table(("a plugin that claims", "promises"), rows))


def _types(module: str, names: tuple[str, ...]) -> Iterator[str]:
    """Yield the Markdown sections on the types with these names, which an interface's module declares for parameters and results."""
    if names:
        yield "## Types"
    for name in names:
        cls = getattr(importlib.import_module(module), name)
        yield f"### {name}"
        yield markdown(cls.__doc__)
        docs, declared = attribute_docs(cls), _declared(cls)
        if declared:
            rows = [(f"`{text}`", inline(docs.get(n, ""))) for n, text in declared.items()]
            yield "\n".join(table(("", ""), rows))
        for method, member in members(cls).items():
            yield f"`{name}.{signature_text(member, method)}`: " + markdown(bare(member).__doc__)


def _declared(cls: type) -> dict[str, str]:
    """Return `name: type` of each public annotated attribute, or the values of an enumeration, by name."""
    if values := getattr(cls, "__members__", None):
        return {name: f"{name} = {value.value!r}" for name, value in values.items()}
    found = {}
    for name, declared in vars(cls).get("__annotations__", {}).items():
        if not name.startswith("_"):
            text = declared if isinstance(declared, str) else inspect.formatannotation(declared)
            found[name] = f"{name}: {text}"
    return found


def _range(kind: Kind) -> str:
    return f'">={kind.api},<{int(kind.api.partition(".")[0]) + 1}"'


def _owner(interface: type, name: str) -> type:
    return next(base for base in interface.__mro__ if name in vars(base))


def _class_name(kind: Kind) -> str:
    return kind.interface.partition(":")[2]


def _places(kind: Kind) -> list[str]:
    return [format_path(path) for path, _ in places_of(kind.name)]


def _first_line(cls: type) -> str:
    return inline((cls.__doc__ or "").strip().splitlines()[0])


def _joined(*chapters: str) -> str:
    return "\n\n".join(chapter for chapter in chapters if chapter) + "\n"
