"""Every file that docs/writing-sources.md shows trains."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail import check, train

BLOCK = re.compile(r"```python\n# (\w+\.py)\n(.*?)```.*?```yaml\n(.*?)```", re.DOTALL)
FILES = ("widest.py", "recorded.py")


@pytest.fixture
def shown(root: Path) -> dict[str, tuple[str, str]]:
    """The Python files by name, each with the config that selects it."""
    text = (root / "docs" / "writing-sources.md").read_text()
    return {file: (code, selection) for file, code, selection in BLOCK.findall(text)}


def test_every_file_is_tried(shown: dict[str, tuple[str, str]]) -> None:
    assert set(FILES) == shown.keys()


@pytest.mark.parametrize("file", FILES)
def test_a_source_trains_when_it_is_selected_as_shown(
    config: Path, tmp_path: Path, shown: dict[str, tuple[str, str]], file: str
) -> None:
    code, selection = shown[file]
    (tmp_path / file).write_text(code)
    document: dict[str, Any] = yaml.safe_load(config.read_text())
    selected = yaml.safe_load(selection.replace(file, str(tmp_path / file)))
    document["source"] = selected["source"]
    document["algorithm"] |= selected.get("algorithm", {})
    if file == "recorded.py":
        rows = tmp_path / "recorded.jsonl"
        answers = [{"prompt": f"{n}+1=", "response": str(n + 1), "extra_info": {"score": n % 2}} for n in range(8)]  # fmt: skip
        rows.write_text("".join(json.dumps(row) + "\n" for row in answers))
        document["data"] |= {"train_files": str(rows), "val_files": []}
        document["algorithm"] = selected["algorithm"]
    config.write_text(yaml.safe_dump(document))
    if file == "recorded.py":
        document["algorithm"]["logprob_check"] = {"every": 1}
        config.write_text(yaml.safe_dump(document))
        (unused,) = check(config).findings
        assert unused.rule == "rollout_unused"
        assert "policy_loss" not in unused.message
    summary = train(config, ["trainer.total_steps=2", "trainer.validate_before=false"])
    assert summary["status"] == "completed"
    steps = (Path(summary["directory"]) / "metrics.jsonl").read_text().splitlines()
    logged: dict[str, float] = {}
    for line in steps:
        logged |= json.loads(line)
    if file == "widest.py":
        assert logged["widest/groups"] == (document["data"]["train_batch_size"] + 1) // 2
    else:
        assert logged["actor/updates"] == 1
