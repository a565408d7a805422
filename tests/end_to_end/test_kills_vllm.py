"""A run with vLLM that is killed goes on from its newest checkpoint, and trains on each prompt once."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from kills import prompts_used

from dovetail_sdk.testing import tiny_model_and_tokenizer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"
    ),
]


@pytest.mark.timeout(900)
def test_a_run_with_vllm_that_is_killed_loses_no_prompt_and_no_checkpoint(config: Path) -> None:
    run = config.parent / "runs" / "tests" / "run"
    # vLLM's attention on the CPU takes no smaller heads.
    model = tiny_model_and_tokenizer(config.parent / "model", vocab_size=300, hidden_size=128)
    command = [
        *(sys.executable, "-m", "dovetail", "train", str(config), "rollout.name=vllm"),
        *("rollout.enforce_eager=true", "rollout.max_model_len=96", f"model.path={model}"),
        *("trainer.total_epochs=2", "data.val_files=[]", "trainer.samples_per_step=-1"),
        "trainer.keep_checkpoints=null",
    ]
    before: dict[Path, str] = {}
    for step in (1, 3):
        output = config.parent / f"killed_{step}.txt"
        with output.open("w") as file:
            driver = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        while not (run / "checkpoints" / f"step_{step}").is_dir():
            assert driver.poll() is None, output.read_text()[-3000:]
            time.sleep(0.01)
        started = psutil.Process(driver.pid).children(recursive=True)
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
        _, left = psutil.wait_procs(started, timeout=60)
        assert left == []
        assert checkpoints(run, upto=step).items() >= before.items()
        before = checkpoints(run, upto=step)
    subprocess.run(command, check=True, cwd=config.parent)
    assert checkpoints(run, upto=3) == before
    assert prompts_used(run) == {(epoch, prompt): 1 for epoch in range(2) for prompt in range(12)}


def checkpoints(run: Path, upto: int) -> dict[Path, str]:
    """The content of every file of the checkpoints up to a step."""
    folders = [run / "checkpoints" / f"step_{step}" for step in range(1, upto + 1)]
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
