"""The commands of docs/sft-rl-dpo.md, one after the other, with the configs of the pages that it names."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.timeout(300)
def test_each_run_begins_with_the_model_of_the_one_before(
    root: Path,
    config: Path,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    inside: Callable[..., Any],
) -> None:
    monkeypatch.chdir(tmp_path)
    for page in ("sft.md", "preferences.md"):
        text = (root / "docs" / page).read_text()
        for name, block in re.findall(r"```yaml\n# (\S+)\n(.*?)```", text, re.DOTALL):
            Path(name).write_text(block)
    for name, number in (("rows", 2), ("held_out_rows", 3), ("pairs", 4), ("held_out", 5)):
        right, wrong = str(2 * number), str(2 * number + 1)
        answers = {"response": right} if "rows" in name else {"chosen": right, "rejected": wrong}
        row = {"prompt": f"{number} + {number} =", **answers}
        Path(f"{name}.jsonl").write_text(4 * (json.dumps(row) + "\n"))
    small = "model.dtype=float32 data.train_batch_size=4 trainer.total_steps=2 actor.optim.warmup_steps=0"
    own = {
        "sft": f"model.path={tiny} data.train_files=rows.jsonl data.val_files=held_out_rows.jsonl",
        "grpo": "data.train_files=train.jsonl data.val_files=val.jsonl data.max_response_length=8 "
        "reward.function.path=my_reward.py",
        "dpo": "",
    }
    page = (root / "docs" / "sft-rl-dpo.md").read_text()
    [commands] = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    runs = []
    for line in commands.splitlines():
        _, command, file, *overrides = shlex.split(line)
        name = file.removesuffix(".yaml")
        inside(command, file, *overrides, *small.split(), *own[name].split())
        [run] = Path("runs").glob(f"*/{name}")
        # The page's own override says where the model comes from.
        assert runs[-1:] == [
            o.removeprefix("model.path=").removesuffix("/final") for o in overrides
        ]
        assert (run / "final" / "config.json").is_file()
        runs.append(str(run))
    assert len(runs) == 3
