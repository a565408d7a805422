"""The page of metrics names every metric: those that packages write, and those of a run."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from dovetail.run.run import train
from dovetail_diagnosis.figures import KEY_FIGURES

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = "actor advantage critic data distill episode filter logprob_check perf prompt_length response_length reward rollout rollout_corr time val weight_check"
LITERAL = re.compile(rf'f?"((?:{FAMILIES.replace(" ", "|")})/[\w@/{{}}.]+)"')


def patterns() -> list[re.Pattern[str]]:
    """The names on the page, as patterns."""
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    found = []
    for row in re.findall(r"^\| (.+?) \|", page, re.MULTILINE):
        for name in re.findall(r"`([a-zA-Z_]+/[\w@/]+)`", row):
            pattern = re.sub(
                r"\bNAME\b", r"[\\w@./{}-]+", re.sub(r"(?<=[@_])N\b", r"[\\w{}.]+", name)
            )
            found.append(re.compile(rf"{pattern}(/low|/high)?"))
    return found


def unnamed(names: set[str]) -> list[str]:
    """Return the metrics that the page does not have, where those of a critic count as the actor's too."""
    known = patterns()
    return sorted(
        name
        for name in names
        if not any(
            p.fullmatch(name) or p.fullmatch(name.replace("critic/", "actor/")) for p in known
        )
    )


def test_every_metric_in_the_code_is_on_the_page() -> None:
    files = subprocess.run(
        ["git", "ls-files", "core/src/*.py", "plugins/*/src/*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    names = {name for file in files for name in LITERAL.findall((ROOT / file).read_text())}
    assert len(names) > 100
    # Where all of a name is worked out, there is nothing to compare.
    assert unnamed({n for n in names if not re.fullmatch(r"\w+(/\{[\w.]+\})+|.*/", n)}) == []


def test_every_metric_of_a_run_with_a_critic_is_on_the_page(config: Path) -> None:
    run = Path(train(config, ["algorithm.preset=ppo", "trainer.validate_every=1"])["directory"])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row} - {"step", "time"}
    assert {"actor/loss", "critic/value_loss", "val/mean@1", "reward/mean"} <= names
    assert unnamed(names) == []


@pytest.mark.parametrize("figure", KEY_FIGURES, ids=lambda figure: figure.short)
def test_every_key_figure_is_on_the_page(figure) -> None:
    assert unnamed({figure.metric.replace(r"\d+", "1")}) == []


def test_a_metric_that_is_not_there_is_found() -> None:
    assert unnamed({"actor/los", "reward/mean"}) == ["actor/los"]
