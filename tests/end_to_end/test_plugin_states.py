"""What plugins of the user's own keep in a checkpoint, arrays among it, is there again in the resumed run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from dovetail.errors import CheckpointError
from dovetail.run.run import resume, train

PLUGINS = """
import numpy as np
from dovetail.interfaces import AdvantageEstimator, Advantages, Trainer


class RunningBaseline(AdvantageEstimator):
    scope, level = "batch", "sample"

    def __init__(self, config, context):
        super().__init__(config, context)
        self.means, self.scale, self.seen = np.zeros((2, 3), ">f4").T, np.float32(1), []

    def estimate(self, columns, groups):
        scores_N = columns["scores"]
        self.means[:, 0] = 0.7 * self.means[:, 0] + 0.3 * scores_N.mean()
        self.scale = self.scale * np.float32(0.9)
        self.seen.append((len(self.seen), scores_N.copy()))
        advantages_N = (scores_N - self.means[0, 0]) * self.scale
        return Advantages(advantages=advantages_N.astype(np.float32))

    def state(self):
        return {"means": self.means, "scale": self.scale, "seen": self.seen}

    def load_state(self, state):
        self.means, self.scale, self.seen = state["means"], state["scale"], state["seen"]


class Forgets(RunningBaseline):
    def state(self):
        return {"seen": {"lengths": [len(self.seen), {1, 2}] if len(self.seen) == 2 else None}}

    def load_state(self, state):
        pass


class CountsPrompts(Trainer):
    def __init__(self, config, context):
        super().__init__(config, context)
        self.counts = np.zeros(12, np.uint8)

    def run(self, run):
        run.publish_weights()
        while not run.position.finished:
            with run.step() as step:
                run.collect(step)
                self.counts[np.unique(step.experience.batch()["prompt_id"])] += 1
                run.learn(step)
                run.publish_weights()
            run.save()

    def state(self):
        return {"counts": self.counts}

    def load_state(self, state):
        self.counts = state["counts"]
"""


@pytest.fixture
def selected(tmp_path: Path) -> list[str]:
    """Overrides that select the estimator and the trainer above."""
    (tmp_path / "mine.py").write_text(PLUGINS)
    return [
        f"algorithm.advantage={{path: {tmp_path}/mine.py, attribute: RunningBaseline}}",
        f"trainer={{path: {tmp_path}/mine.py, attribute: CountsPrompts}}",
    ]


def stored(checkpoint: Path, file: str) -> dict[str, np.ndarray]:
    """The arrays in the only file of this name."""
    [path] = checkpoint.glob(file)
    return load_file(path)


def test_arrays_in_states_come_back_bit_for_bit(config: Path, tmp_path: Path, selected: list[str]):
    train(config, [*selected, "experiment=whole", "trainer.total_steps=3"])
    train(config, [*selected, "experiment=parts", "trainer.total_steps=2"])
    whole, parts = (tmp_path / "runs" / "tests" / name for name in ("whole", "parts"))
    resume(parts, ["trainer.total_steps=3"])
    for file in ("state.safetensors", "actor/weights/*.safetensors"):
        [expected, arrays] = [
            stored(run / "checkpoints" / "step_3", file) for run in (whole, parts)
        ]
        assert arrays.keys() == expected.keys()
        assert all(arrays[name].tobytes() == expected[name].tobytes() for name in expected)
    arrays = stored(parts / "checkpoints" / "step_3", "state.safetensors")
    assert arrays['["trainer", "counts"]'].tolist() == [1] * 12
    assert arrays['["algorithm.advantage", "means"]'].shape == (3, 2)
    assert sum(name.startswith('["algorithm.advantage", "seen"') for name in arrays) == 3


def test_a_damaged_file_of_arrays_stops_the_resume(
    config: Path, tmp_path: Path, selected: list[str]
):
    train(config, [*selected, "trainer.total_steps=1"])
    run = tmp_path / "runs" / "tests" / "run"
    (run / "checkpoints" / "step_1" / "state.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"state\.safetensors is missing"):
        resume(run, ["trainer.total_steps=2"])


def test_a_state_that_cannot_be_kept_leaves_the_checkpoint_before_it(config: Path, tmp_path: Path):
    (tmp_path / "mine.py").write_text(PLUGINS)
    estimator = f"algorithm.advantage={{path: {tmp_path}/mine.py, attribute: Forgets}}"
    with pytest.raises(CheckpointError) as caught:
        train(config, [estimator])
    for fact in (
        "algorithm.advantage",
        "Forgets",
        "['seen']['lengths'][1]",
        "set",
        "numpy.ndarray",
    ):
        assert fact in str(caught.value)
    checkpoints = tmp_path / "runs" / "tests" / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_1"]
    assert not (checkpoints / "step_1" / "state.safetensors").exists()
