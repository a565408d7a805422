"""`dovetail plugins …` as a user runs it, with broken distributions of every sort installed."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dovetail.cli.main import main
from dovetail.plugins.index import PluginIndex
from dovetail.plugins.kinds import KINDS

HEAVY = {
    "torch",
    "ray",
    "transformers",
    "structlog",
    "omegaconf",
    "stevedore",
    "pluggy",
    "numpy",
    "rich",
    "attrs",
    "attr",
    "cattrs",
    "pyarrow",
}


def states(output: str) -> dict[str, str]:
    """Name → state, of the plugins of one kind as they are listed."""
    listed = [line.strip() for line in output.split("\n\n", maxsplit=1)[0].splitlines()[1:]]
    return {name: about.split(";")[0] for name, about in itertools.pairwise(listed) if ";" in about}


def test_a_kind_is_listed_with_every_state(dovetail) -> None:
    done = dovetail("plugins", "list", "tracker")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "tracker"
    found = states(done.stdout)
    assert {name: found[name] for name in ("crash", "future", "twin", "bare", "drifted")} == {
        "crash": "compatible",
        "future": "rejected",
        "twin": "conflict",
        "bare": "invalid",
        "drifted": "invalid",
    }
    assert "tracker/future rejected:" in done.stdout
    assert "→ write name: twin@acme-twin-a, or" in done.stdout
    assert "tracker/needy needs acme-engine>=1.5 or acme-engine-cpu>=1.5" in done.stdout
    described = dovetail("plugins", "list", "advantage").stdout
    assert "compatible; acme-good 1.2.0; interface >=1.0,<2\n    can: deterministic" in described


def test_all_kinds_are_listed_by_name_with_their_distributions(dovetail) -> None:
    listed = dovetail("plugins", "list").stdout
    assert "\n  acme_mean (acme-good 1.2.0)\n" in listed
    assert "\n  future [rejected] (acme-future 1.0.0)\n" in listed


def test_kinds_with_many_plugins_are_counted_unless_asked_for(dovetail) -> None:
    listed = dovetail("plugins", "list").stdout
    assert re.search(r"^preset\n  \d+ plugins$", listed, re.MULTILINE)
    assert "dr_grpo" not in listed.partition("preset\n")[2].partition("kl_controller\n")[0]
    for asked in (["--all"], ["preset"], ["--state", "compatible"]):
        assert "dr_grpo" in dovetail("plugins", "list", *asked).stdout.partition("preset\n")[2]


def test_preflight_rules_are_listed_with_what_they_catch(dovetail) -> None:
    listed = dovetail("plugins", "list", "preflight").stdout
    assert "kl_twice (dovetail-stages)\n    The KL" in listed
    rules = json.loads(dovetail("plugins", "list", "preflight", "--json").stdout)["rules"]
    assert {"kl_twice", "tool_agent_unfit"} <= {rule["name"] for rule in rules}
    assert all(rule["doc"] and rule["distribution"] for rule in rules)
    for name in ("kl_twice", "preflight/kl_twice"):
        shown = dovetail("plugins", "show", name)
        assert shown.returncode == 2
        assert "dovetail plugins list" in shown.stderr


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("kind", [[], ["tracker"]])
def test_a_listing_fits_the_terminal(dovetail, width: int, kind: list[str]) -> None:
    listed = dovetail("plugins", "list", *kind, COLUMNS=str(width)).stdout
    lines = [line for line in listed.splitlines() if not line.startswith("  →")]
    assert len(lines) > 20
    assert max(map(len, lines)) <= width


def test_list_as_json(dovetail) -> None:
    done = dovetail("plugins", "list", "--json")
    assert done.returncode == 0
    listing = json.loads(done.stdout)
    assert listing["schema"] == 1
    [needy] = [p for p in listing["plugins"] if p["name"] == "needy"]
    assert needy == {
        "kind": "tracker",
        "name": "needy",
        "aliases": [],
        "state": "compatible",
        "reason": None,
        "fix": None,
        "distribution": "acme-needy",
        "version": "1.0.0",
        "interface": ">=1.0,<2",
        "capabilities": [],
        "needs": [
            {
                "any_of": ["acme-engine>=1.5", "acme-engine-cpu>=1.5"],
                "met": False,
                "found": "not installed",
            }
        ],
        "isolated": False,
        "target": "acme_needy.plugin:T",
    }
    assert "trackr" in {p["kind"] for p in listing["plugins"]}


def test_list_narrows_by_state(dovetail) -> None:
    done = dovetail("plugins", "list", "--state", "conflict")
    assert done.stdout.split("\n\n", maxsplit=1)[0].splitlines() == [
        "tracker",
        "  twin [conflict] (acme-twin-a 1.0.0)",
        "  twin [conflict] (acme-twin-b 2.5.0)",
    ]


def test_show_prints_everything(dovetail) -> None:
    done = dovetail("plugins", "show", "advantage/acme_mean")
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    for part in (
        "plugin advantage/acme_mean",
        "state compatible",
        "distribution acme-good 1.2.0",
        "class acme_good.plugin:Mean",
        f"interface >=1.0,<2 (here: {KINDS['advantage'].api})",
        "aliases acme",
        "requires scores (float32, one a sample): reward of the trajectory",
        "acme.level (float32, dense): difficulty of the prompt",
        "config acme_good.config:MeanConfig",
        "shift: float = 0.5 Subtracted from every advantage.",
        "in a config algorithm: advantage: name: acme_mean shift: 0.5",
    ):
        assert part in text


def test_show_finds_by_alias_and_shows_unusable_ones(dovetail) -> None:
    assert "advantage/acme_mean" in dovetail("plugins", "show", "acme").stdout
    future = dovetail("plugins", "show", "future")
    assert "tracker interface" in future.stdout
    needy = " ".join(dovetail("plugins", "show", "tracker/needy").stdout.split())
    assert "acme-engine>=1.5 or acme-engine-cpu>=1.5: unmet, not installed" in needy
    both = json.loads(dovetail("plugins", "show", "twin", "--json").stdout)["plugins"]
    assert [p["distribution"] for p in both] == ["acme-twin-a", "acme-twin-b"]


@pytest.mark.parametrize("kind", ["advantages", "tracker"])
def test_a_name_under_the_wrong_kind_is_an_error_with_the_right_one(dovetail, kind: str) -> None:
    done = dovetail("plugins", "show", f"{kind}/acme_mean")
    assert done.returncode == 2
    assert "  → did you mean advantage/acme_mean?" in done.stderr


@pytest.mark.parametrize(
    ("command", "home"),
    [("new", "dovetail-sdk"), ("check", "dovetail-sdk"), ("show", "dovetail-console")],
)
def test_a_command_of_another_package_is_named_with_it_where_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, command: str, home: str
) -> None:
    monkeypatch.setattr(PluginIndex, "extensions", lambda *_: [])
    done = CliRunner().invoke(main, ["plugins", command, "advantage"])
    assert done.exit_code == 2
    assert f"there is no command {command!r}" in done.stderr
    assert f"pip install {home}" in done.stderr


def test_lock_and_verify(dovetail, tmp_path: Path) -> None:
    done = dovetail("plugins", "lock", "advantage/acme_mean", "tracker/twin@acme-twin-a")
    assert done.returncode == 0, done.stderr
    path = tmp_path / "plugins.lock.json"
    lock = json.loads(path.read_text())
    assert [p["name"] for p in lock["plugins"]] == ["acme_mean", "twin"]
    assert dovetail("plugins", "verify", "plugins.lock.json").stdout == "unchanged\n"

    lock["plugins"][0]["version"] = "1.0.0"
    path.write_text(json.dumps(lock))
    warned = dovetail("plugins", "verify", ".")
    assert warned.returncode == 0
    assert "advantage/acme_mean was version 1.0.0 and is 1.2.0 now" in warned.stderr
    assert dovetail("plugins", "verify", ".", "--strict").returncode == 1
    (told,) = json.loads(dovetail("plugins", "verify", ".", "--json").stdout)["differences"]
    assert (told["subject"], told["what"], told["was"], told["now"], told["refused"]) == (
        *("advantage/acme_mean", "version", "1.0.0", "1.2.0", False),
    )

    lock["plugins"][0]["api"] = ">=0.9,<1"
    path.write_text(json.dumps(lock))
    refused = dovetail("plugins", "verify", ".")
    assert refused.returncode == 1
    assert "refused: advantage/acme_mean was" in refused.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("dovetail_algorithms") is None, reason="needs the default plugins"
)
def test_show_prints_a_plugins_page_without_importing_it() -> None:
    script = (
        "import sys\n"
        "from dovetail.cli.main import main\n"
        "try:\n"
        "    main(['plugins', 'show', 'preset/dapo'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "print({m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy', 'dovetail_algorithms')})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    text = " ".join(done.stdout.split())
    for part in (
        "DAPO (arXiv 2503.14476)",
        "overlong_share: float or null = 0.2 (> 0, <= 1)",
        "in a config algorithm: preset: name: dapo",
        "stands for, where nothing else is given algorithm: advantage: name: grpo",
    ):
        assert part in text
    assert done.stdout.splitlines()[-1] == "set()"


def test_show_as_json_carries_the_page(dovetail) -> None:
    (plugin,) = json.loads(dovetail("plugins", "show", "acme_mean", "--json").stdout)["plugins"]
    assert plugin["doc"] == ""
    assert plugin["settings"] is None
    assert plugin["config_schema"]["fields"][0]["name"] == "shift"
