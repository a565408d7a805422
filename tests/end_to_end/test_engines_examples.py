"""The configs of `examples/two_environments`: what they plan, as they stand and with a GPU for each engine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_environments"
TOGETHER = "pool all (ray): 2 accelerators: actor (tp=2), rollout × 2"
APART = "pool train (ray): 1 accelerator: actor"


def overrides_of_readme() -> list[str]:
    """Those of the command that gives each engine GPUs of its own."""
    found = re.search(r"dovetail train .*\\\n.*", (EXAMPLE / "README.md").read_text())
    assert found is not None
    return shlex.split(found[0].replace("\\\n", ""))[3:]


@pytest.mark.usefixtures("config")
@pytest.mark.parametrize(
    ("engine", "apart", "transport", "placed"),
    [("vllm", False, "cuda_ipc", TOGETHER), ("sglang", True, "nccl", APART)],
    ids=["vllm on the same", "sglang apart"],
)
def test_a_config_plans_two_engines_in_two_environments(
    engine: str,
    apart: bool,
    transport: str,
    placed: str,
    tiny: Path,
    tmp_path: Path,
    planned: Callable[..., str],
) -> None:
    settings = [f"data.{part}_files={tmp_path / part}.jsonl" for part in ("train", "val")]
    settings += [f"model.path={tiny}", "data.train_batch_size=4", "data.max_prompt_length=64"]
    settings += overrides_of_readme() if apart else []
    said = " ".join(planned(str(EXAMPLE / f"megatron_{engine}.yaml"), *settings).split())
    assert f"rollout runs in /opt/{engine}" in said
    assert f"weight_sync {transport} " in said
    assert placed in said
