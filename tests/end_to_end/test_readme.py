"""What the README shows works as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dovetail.run.run import train


def snippets(root: Path) -> dict[str, str]:
    """The README's Python files by the name in their first line."""
    blocks = re.findall(
        r"```python\n# (\S+)\n(.*?)```", (root / "README.md").read_text(), re.DOTALL
    )
    return dict(blocks)


@pytest.mark.parametrize(
    ("file", "overrides"),
    [
        ("my_reward.py", ["reward.function.path={}"]),
        ("my_adv.py", ["algorithm.advantage.path={}", "algorithm.advantage.attribute=MyEstimator"]),
    ],
)
def test_the_files_in_the_readme_train(config, root, tmp_path, file, overrides):
    path = tmp_path / "from_readme" / file
    path.parent.mkdir()
    path.write_text(snippets(root)[file])
    summary = train(config, [o.format(path) for o in overrides] + ["trainer.total_steps=1"])
    assert summary["status"] == "completed"


def test_an_estimator_that_errs_is_named_with_its_line(config, tmp_path):
    from dovetail.errors import PluginBrokenError

    path = tmp_path / "bad_adv.py"
    path.write_text(
        "from dovetail.interfaces import AdvantageEstimator\n\n\nclass Bad(AdvantageEstimator):\n"
        '    scope, level = "group", "sample"\n\n    def estimate(self, columns, groups):\n'
        "        return columns['scores'] - groups.no_such_thing\n"
    )
    with pytest.raises(PluginBrokenError, match=r"no_such_thing.*bad_adv.py, line 8"):
        train(config, [f"algorithm.advantage.path={path}", "algorithm.advantage.attribute=Bad"])
