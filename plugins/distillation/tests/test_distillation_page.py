"""The configs in docs/distillation.md can be planned, with models and files of this machine."""

import re
from pathlib import Path

import pytest
import yaml

from dovetail import plan

PAGE = Path(__file__).parents[3] / "docs" / "distillation.md"
BLOCKS = [
    yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
]


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_config_of_the_page_plans(number, config, student, teacher, tmp_path):
    block = BLOCKS[number]
    # A partial config replaces sections of the first config.
    document = block if "model" in block else {**BLOCKS[0], **block}
    served = any("endpoints" in stage for stage in document.get("algorithm", {}).get("stages", []))
    roles = {} if served else document.get("roles", {})
    document["roles"] = {role: {**section, "path": str(teacher)} for role, section in roles.items()}
    document["model"] = {"path": str(student), "dtype": "float32"}
    document["data"] |= {"train_files": str(tmp_path / "rows.jsonl"), "train_batch_size": 4}
    document["data"].pop("val_files", None)
    document["output_dir"] = str(tmp_path / "runs")
    document["reward"] = yaml.safe_load(config.read_text())["reward"]
    path = tmp_path / "page.yaml"
    path.write_text(yaml.safe_dump(document))
    stages = [stage["name"] for stage in plan(path)["stages"]]
    assert "score_teacher" in stages
    assert stages.index("score_teacher") < stages.index("update_actor")
