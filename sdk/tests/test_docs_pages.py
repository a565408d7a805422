"""`python -m dovetail_sdk docs`: writes a page for each plugin, from manifests alone, and leaves no stale page."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dovetail.config.plain_yaml import parse
from dovetail_sdk.__main__ import main
from dovetail_sdk.docs import pages, plugins_of
from dovetail_sdk.docs_engines import engine_tables
from dovetail_sdk.docs_index import plugin_table
from dovetail_sdk.manifest import write as write_manifest
from dovetail_sdk.project import read_project

ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = pytest.mark.skipif(not (ROOT / "plugins").is_dir(), reason="needs the checkout")

PYPROJECT = """
[project]
name = "acme-combinations"
version = "0.1.0"

[project.entry-points."dovetail.preset"]
acme = "acme_combinations.plugins:Acme"

[project.entry-points."dovetail.sample_filter"]
odd = "acme_combinations.odd:Odd"

[project.entry-points."dovetail.kl_controller"]
idle = "acme_combinations.plugins:Idle"
"""

CONFIG = '''
import attrs

from dovetail.sections import PluginSection, PresetSection


@attrs.frozen(kw_only=True)
class Limit:
    """One limit."""

    upper: float
    """Largest value; a | b."""


@attrs.frozen(kw_only=True)
class OddConfig(PluginSection):
    """Leaves out what is odd."""

    share: float = attrs.field(default=0.5, validator=attrs.validators.gt(0))
    """Part of the samples; see `a_b` and *this*."""
    limits: tuple[Limit, ...] = (Limit(upper=2.0),)
    """What else counts."""


@attrs.frozen(kw_only=True)
class AcmeConfig(PresetSection):
    """Odd samples out."""

    share: float = 0.25
    """Part of the samples."""

    def settings(self):
        return {
            "algorithm": {
                "advantage": "grpo",
                "sample_filters": [{"name": "odd", "share": self.share}],
                "kl": {"in_loss": None},
            }
        }
'''

ODD = '''
"""Odd samples (arXiv 2402.03300). More of this module."""

import numpy as np

from dovetail.batch import Column
from dovetail.interfaces import SampleFilter
from acme_combinations.config import OddConfig


class Odd(SampleFilter):
    """keep i ⇔ x_i * 2 < limit

    The second paragraph, with `code_in_ticks * 2`.

        y = x * x
    """

    name = "odd"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    columns = (
        Column("acme_combinations.oddness", "float32", "ragged", "how | odd", "reward"),
        Column("acme_combinations.heads", "float32", "ragged", "heads", "reward", inner=(3, None)),
    )
    action = "drop"
    Config = OddConfig

    @classmethod
    def requires(cls, config):
        return frozenset({"scores", "acme_combinations.oddness", "acme_combinations.heads"})

    def keep(self, columns, groups):
        return np.ones(len(columns), bool)
'''

PLUGINS = '''
"""Two plugins, neither of which is arXiv 1111.11111's."""

from dovetail.interfaces import KlController
from dovetail.interfaces import Preset
from acme_combinations.config import AcmeConfig


class Acme(Preset):
    """All that is odd (arXiv 2503.14476)."""

    name = "acme"
    api = ">=1.0,<2"
    Config = AcmeConfig


class Idle(KlController):
    """Does nothing at all. Ever."""

    name = "idle"
    api = ">=1.0,<2"

    @property
    def value(self):
        return 1.0

    def update(self, kl, samples):
        pass
'''


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A third party's package with its manifest written, its modules no longer imported."""
    folder = tmp_path_factory.mktemp("acme")
    package = folder / "src" / "acme_combinations"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    modules = {"__init__": "", "config": CONFIG, "odd": ODD, "plugins": PLUGINS}
    for name, text in modules.items():
        (package / f"{name}.py").write_text(text)
    project = read_project(folder)
    write_manifest(project)
    for name in [name for name in sys.modules if name.startswith("acme_combinations")]:
        del sys.modules[name]
    return project


@pytest.fixture(scope="module")
def texts(project):
    return {str(path): text for path, text in pages([project]).items()}


def docs(*arguments):
    return CliRunner().invoke(main, ["docs", *map(str, arguments)])


def below(folder):
    """The text of every file below a folder, by its path there."""
    return {str(f.relative_to(folder)): f.read_text() for f in folder.rglob("*") if f.is_file()}


def test_there_is_a_page_a_plugin_and_an_index(texts):
    assert texts.keys() == {"README.md", "kl_controller/idle.md", "preset/acme.md", "sample_filter/odd.md"}  # fmt: skip
    index = texts["README.md"]
    assert "odd. | [2402.03300](https://arxiv.org/abs/2402.03300) |" in index  # fmt: skip
    assert "[`idle`](kl_controller/idle.md) | Does" in index
    assert "1111.11111" not in "".join(texts.values())


def test_nothing_of_the_package_is_imported(texts):
    assert "acme_combinations" not in sys.modules


def test_a_page_says_all_that_the_manifest_knows(texts):
    page = texts["sample_filter/odd.md"]
    for part in (
        "\nSample filter of `acme-combinations` · [all plugins](../README.md)\n",
        "Odd samples ([arXiv 2402.03300](https://arxiv.org/abs/2402.03300)). More of this module.",
        r"keep i ⇔ x_i \* 2 \< limit",
        "with `code_in_ticks * 2`",
        "\n        y = x * x".replace("        ", "    "),
        "| `scores` | float32, one a sample | reward of the trajectory: the sum of the token rewards of its sequences |",
        r"| `acme_combinations.oddness` | float32, one a token | how \| odd |",
        "| `acme_combinations.heads` | float32, one a token, each [3, ?] | heads |",
        "`deterministic`",
        r"| `share` | float | `0.5` | > 0 | Part of the samples; see `a_b` and \*this\*. |",
        '| `limits` | a list of Limit | `[{"upper": 2.0}]` |  | What else counts. |',
        r"| `limits[].upper` | float | required |  | Largest value; a \| b. |",
        "algorithm:\n  sample_filters:\n  - name: odd\n    share: 0.5\n    limits:\n    - upper: 2.0\n",
    ):
        assert part in page


def test_a_presets_page_lists_its_settings_and_links_its_parts(texts):
    page = texts["preset/acme.md"]
    settings = page.partition("## What it stands for")[2]
    yaml = settings.partition("```yaml\n")[2].partition("```")[0]
    assert parse(yaml)[0] == {
        "algorithm": {
            "advantage": "grpo",
            "sample_filters": [{"name": "odd", "share": 0.25}],
            "kl": {"in_loss": None},
        }
    }
    assert "Its parts: `grpo`, [`odd`](../sample_filter/odd.md)." in page


@CHECKOUT
def test_the_preflight_rules_of_the_packages_are_on_one_page():
    texts = pages([read_project(ROOT / place) for place in ("plugins/stages", "plugins/agents")])
    page = texts["preflight.md"]
    assert "## kl_twice\n\nThe KL" in page
    assert page.index("\n## kl_twice\n") < page.index("\n## tool_agent_unfit\n")
    assert "ignore: [" in page
    assert "\n## overlong_twice\n" not in page
    assert (
        "| [`kl_twice`](preflight.md#kl_twice) | The KL penalty is both in the loss and in the reward: "
        in texts["README.md"]
    )


def test_every_place_where_a_config_selects_the_kind_is_named(texts):
    page = texts["kl_controller/idle.md"]
    assert "algorithm:\n  kl:\n    in_loss:\n      controller: idle\n" in page
    assert "Or at `algorithm.kl.in_reward.controller`." in page


def test_pages_of_plugins_that_are_gone_are_removed_and_no_other_file(project, texts, tmp_path):
    gone = tmp_path / "policy_loss" / "gone.md"
    gone.parent.mkdir()
    gone.write_text(texts["preset/acme.md"])
    own = tmp_path / "preset" / "notes.md"
    own.parent.mkdir()
    own.write_text("# By hand")
    (tmp_path / "README.md").write_text("out of date")
    done = docs(project.directory, "-o", tmp_path)
    assert (done.exit_code, done.stdout) == (0, f"4 pages → {tmp_path}\n")
    assert below(tmp_path) == {**texts, "preset/notes.md": "# By hand"}
    assert not gone.parent.exists()


@CHECKOUT
def test_a_page_elsewhere_has_the_table_of_a_kind_and_those_of_engines():
    rollouts = [read_project(ROOT / "plugins" / f"rollout_{name}") for name in ("hf", "vllm")]
    known = plugins_of(rollouts)
    [_, _, hf, vllm] = plugin_table("rollout", known, "plugins/")
    assert hf.startswith("| [`hf`](plugins/rollout/hf.md) | ")
    assert vllm.startswith("| [`vllm`](plugins/rollout/vllm.md) | ")
    assert plugin_table("advantage", known) == []
    lines = list(engine_tables(rollouts))
    assert "| capability | `hf` | `vllm` | what it promises |" in lines
    [seeds] = [line for line in lines if "`per_sample_seed`" in line]
    assert seeds.startswith("| `per_sample_seed` | yes |  | ")


def test_pages_say_what_writes_them(texts):
    assert all(
        text.startswith("<!-- Written by `python -m dovetail_sdk docs`") for text in texts.values()
    )


def test_no_package_with_a_plugin_is_refused_and_removes_nothing(project, texts, tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "acme-nothing"\n')
    docs(project.directory, "-o", tmp_path / "pages")
    done = docs(tmp_path, "-o", tmp_path / "pages")
    assert done.exit_code == 1
    assert "no package with plugins" in done.stderr
    assert below(tmp_path / "pages") == texts


def test_a_package_without_a_manifest_is_an_error(project, tmp_path):
    (tmp_path / "src" / "acme_combinations").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    done = docs(tmp_path, "-o", tmp_path)
    assert done.exit_code == 1
    assert "dovetail-plugin.json" in done.stderr


def test_old_manifests_have_pages_too(project, tmp_path):
    path = project.package_directory / "dovetail-plugin.json"
    before = path.read_text()
    manifest = json.loads(before)
    for plugin in manifest["plugins"]:
        plugin.pop("doc")
        plugin.pop("settings", None)
    path.write_text(json.dumps(manifest))
    try:
        texts = {str(file): text for file, text in pages([project]).items()}
    finally:
        path.write_text(before)
    assert "Leaves out what is odd." in texts["sample_filter/odd.md"]
    assert "What it stands for" not in texts["preset/acme.md"]
