"""The docs site: what its generated pages hold, and that pages, links and navigation agree. `make site` builds it."""

from __future__ import annotations

import importlib.util
import posixpath
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from dovetail.config import config_from_mapping
from dovetail.config.explain import all_keys
from dovetail.plugins.index import default_index
from dovetail.plugins.rules import installed_rules
from dovetail_sdk.public import public_names

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    name
    for name in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()
    if "/changes/" not in name and not name.startswith(".github/") and (ROOT / name).is_file()
]  # fmt: skip


@pytest.fixture(scope="module")
def site() -> ModuleType:
    """The hooks of MkDocs."""
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site_pages.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generated(site: ModuleType) -> dict[str, str]:
    """The generated pages, by their place on the site."""
    return site.generated()


@pytest.fixture(scope="module")
def places(site: ModuleType, generated: dict[str, str]) -> set[str]:
    """Every page of the site."""
    docs = {name.removeprefix("docs/") for name in PAGES if name.startswith("docs/")}
    return docs | set(generated) | set(site.outside().values())


@pytest.mark.parametrize("page", PAGES)
def test_the_links_of_a_page_lead_somewhere(page: str, site: ModuleType, places: set[str]) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    for match in site.LINK.finditer(text):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), match[3]))
        assert (ROOT / path).exists() or path.removeprefix("docs/") in places, match[0]


def test_every_page_is_on_the_site(site: ModuleType) -> None:
    assert [p for p in PAGES if not p.startswith("docs/") and p not in site.outside()] == []


def test_the_navigation_has_every_page_written_by_hand_and_no_page_that_is_not_there(
    site: ModuleType, places: set[str]
) -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    nav = repr(site.filled(yaml.safe_load(text[text.index("nav:") :])["nav"], sorted(places)))
    named = re.findall(r"'([^' ]+\.md)'", nav)
    assert len(named) == len(set(named))
    assert set(named) == places


def test_a_pattern_of_the_navigation_is_the_pages_that_no_other_entry_names(
    site: ModuleType,
) -> None:
    nav = [{"One": "a/x.md"}, {"All": ["a/README.md", "a/*.md"]}, {"B": "b/*.md"}, "c.md"]
    pages = ["a/README.md", "a/x.md", "a/y.md", "a/z.md", "b/v.md", "c.md"]
    assert site.filled(nav, pages) == [
        {"One": "a/x.md"},
        {"All": ["a/README.md", "a/y.md", "a/z.md"]},
        {"B": ["b/v.md"]},
        "c.md",
    ]
    plugins = ["plugins/advantage/gae.md", "plugins/advantage/grpo.md", "plugins/preset/dapo.md"]
    assert site.filled([{"Plugins": ["plugins/*/*.md"]}], plugins) == [
        {"Plugins": [{"Advantage estimators": plugins[:2]}, {"Presets": plugins[2:]}]}
    ]


@pytest.mark.parametrize(
    ("page", "link", "shown"),
    [
        ("README.md", "[a](docs/sft.md#data)", "[a](sft.md#data)"),
        ("README.md", "![a](docs/images/report.png)", "![a](images/report.png)"),
        ("README.md", "[`a`](examples/arithmetic)", "`a` (`examples/arithmetic`)"),
        ("docs/sft.md", "[a](rewards.md)", "[a](rewards.md)"),
        ("docs/sft.md", "[a](../plugins/demo/README.md)", "[a](packages/demo.md)"),
        ("docs/sft.md", "[a](plugins/preset/dapo.md)", "[a](plugins/preset/dapo.md)"),
        ("docs/reference/errors.md", "[a](../sft.md)", "[a](../sft.md)"),
        ("plugins/demo/README.md", "[a](../../docs/sft.md)", "[a](../sft.md)"),
        ("plugins/demo/README.md", "[d](src/dovetail_demo/data.py)", "d (`plugins/demo/src/dovetail_demo/data.py`)"),
        ("docs/sft.md", "[a](https://arxiv.org/abs/2106.09685)", "[a](https://arxiv.org/abs/2106.09685)"),
        ("docs/sft.md", "f[a](no_such_file)", "f[a](no_such_file)"),
    ],
)  # fmt: skip
def test_a_link_of_a_page_leads_to_its_place_on_the_site(
    site: ModuleType, page: str, link: str, shown: str
) -> None:
    assert site.with_site_links(link, page) == shown


def test_every_key_of_a_config_is_on_its_page(generated: dict[str, str]) -> None:
    settings = {"model": {"path": "tiny"}, "roles": {"teacher": {}}}
    keys = {
        re.sub(r"\[\d+\]", "", key).replace(".teacher.", ".NAME.")
        for key, _, _ in all_keys(config_from_mapping(settings))
    }
    page = generated["reference/config.md"]
    shown = re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE)
    assert len(shown) == len(set(shown))
    # What a plugin has alone is on its own page.
    plugins = re.findall(r"^\| `([\w.]+)` \| \[[\w ]+\]\(\.\./plugins/", page, re.MULTILINE)
    own = {key for key in keys for plugin in plugins if key.startswith(f"{plugin}.")}
    assert {key for key in keys - own if key not in shown} == set()
    assert {"rollout.temperature", "actor.optim.lr", "roles.NAME.mini_batch_size"} <= set(shown)
    assert "| `data.train_batch_size` | int |" in page
    assert "| `model.path` | str | `required` |" in page


def test_every_plugin_rule_and_public_name_has_its_place(generated: dict[str, str]) -> None:
    for entry in default_index().entries():
        if entry.manifest and entry.distribution.startswith("dovetail"):
            assert f"plugins/{entry.kind}/{entry.name}.md" in generated
    for rule in installed_rules():
        assert f"\n## {rule.name}\n" in generated["plugins/preflight.md"]
    for module, names in public_names().items():
        section = generated["interfaces/public.md"].partition(f"## `{module}`\n")[2]
        table = section.partition("\n## ")[0]
        assert [name for name in names if f"| `{name}` |" not in table] == []


def test_a_table_that_does_not_exist_is_refused(site: ModuleType) -> None:
    with pytest.raises(ValueError, match="no_such_kind"):
        site.tables("no_such_kind", "algorithms.md")
