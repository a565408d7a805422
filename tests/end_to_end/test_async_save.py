"""A run that is killed while a checkpoint is being written continues from the one before, bit for bit."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

from dovetail.run.run import train

KILLED_WHILE_WRITING = """
import os, signal, sys
from dovetail.run.run import train
from dovetail_train_fsdp2 import checkpoint

write, count = checkpoint._write, 0

def killed(folder, shards, ranks):
    global count
    count += 1
    write(folder, shards, ranks)
    if count == 4:  # weights and moments of the second checkpoint
        os.kill(os.getpid(), signal.SIGKILL)

checkpoint._write = killed
train(sys.argv[1], ["trainer.validate_before=false"])
"""


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(config: Path) -> None:
    run = config.parent / "runs" / "tests" / "run"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_WRITING, str(config)], check=False, cwd=config.parent
    )
    assert killed.returncode == -signal.SIGKILL
    checkpoints = run / "checkpoints"
    assert (checkpoints / "latest").read_text() == "step_1\n"
    assert list(checkpoints.glob(".saving-step_2-*/actor/moments/*"))
    said: list[str] = []
    train(config, ["trainer.validate_before=false"], say=said.append)
    assert f"{run}: continues from step_1" in said
    train(config, ["trainer.validate_before=false", "trainer.async_save=false", "experiment=other"])
    for name in ("final/model.safetensors", "checkpoints/step_3/actor/moments"):
        [one, other] = [path / name for path in (run, run.with_name("other"))]
        if one.is_dir():
            [one], [other] = one.iterdir(), other.iterdir()
        tensors, others = load_file(one), load_file(other)
        assert tensors.keys() == others.keys()
        assert all(tensors[key].equal(others[key]) for key in tensors)
    assert not list(checkpoints.glob(".saving-*"))
