"""The suites of what surrounds training: KL controllers, samplers, datasets, trackers and trainers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from dovetail.errors import DataError
from dovetail.interfaces import DatasetSource, KlController, Sampler, Tracker, Trainer
from dovetail_sdk.testing.conformance.plugin import PluginConformance
from dovetail_sdk.testing.resumed import resumed_state


class KlControllerConformance(PluginConformance):
    """Subclass it, set `plugin`, and pytest runs the suite."""

    kind = "kl_controller"
    plugin: ClassVar[type[KlController]]

    def after(self, *kls: float) -> KlController:
        """A controller that has seen these KLs of 64 samples each."""
        controller: KlController = self.make()
        for kl in kls:
            controller.update(kl, 64)
        return controller

    def test_the_factor_is_1_at_the_start(self) -> None:
        assert self.after().value == 1.0

    @pytest.mark.parametrize("kl", [0.0, 1e-6, 0.1, 50.0, -1e-3])
    def test_the_factor_stays_finite_and_above_0(self, kl: float) -> None:
        value = self.after(*[kl] * 50).value
        assert math.isfinite(value)
        assert value > 0

    def test_a_larger_kl_never_gives_a_smaller_factor(self) -> None:
        factors = [self.after(kl).value for kl in (0.001, 0.05, 0.5, 5.0)]
        assert factors == sorted(factors)

    def test_its_state_goes_through_a_checkpoint_and_brings_it_back(self, tmp_path: Path) -> None:
        first, second = self.after(0.5, 0.01, 2.0), self.make()
        second.load_state(resumed_state(first, tmp_path))
        for controller in (first, second):
            controller.update(0.7, 64)
        assert second.value == first.value


class SamplerConformance(PluginConformance):
    """Subclass it, set `plugin`, and pytest runs the suite."""

    kind = "sampler"
    plugin: ClassVar[type[Sampler]]

    @pytest.mark.parametrize("size", [0, 1, 2, 17, 1000])
    @pytest.mark.parametrize("epoch", [0, 1, 7])
    def test_every_row_comes_once_an_epoch(self, size: int, epoch: int) -> None:
        order = self.make(seed=3).order(size, epoch)
        assert order.dtype == np.int64
        np.testing.assert_array_equal(np.sort(order), np.arange(size))

    def test_the_order_follows_from_seed_and_epoch_alone(self) -> None:
        sampler = self.make(seed=3)
        later = [sampler.order(50, epoch) for epoch in (2, 0, 1)]
        for epoch, order in zip((2, 0, 1), later, strict=True):
            np.testing.assert_array_equal(self.make(seed=3).order(50, epoch), order)


class DatasetConformance(PluginConformance):
    """Subclass it, set `plugin`, override `write`, and pytest runs the suite."""

    kind = "dataset"
    plugin: ClassVar[type[DatasetSource]]
    rows: ClassVar[tuple[Mapping[str, Any], ...]] = tuple(
        {"prompt": [{"role": "user", "content": f"{n} + 1 ="}], "data_source": "sums", "reward_model": {"ground_truth": str(n + 1)}}
        for n in range(5)
    )  # fmt: skip
    """Rows that a file of the format can hold."""

    suffix: ClassVar[str] = ".jsonl"
    """What the names of its files end in."""

    def write(self, path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows as a file of this format holds them."""
        pytest.skip("it says no way to write its files: override `write` in a suite")

    def read(self, *paths: Path) -> list[Mapping[str, Any]]:
        """Rows of these files."""
        return list(self.make().read([str(path) for path in paths]))

    def test_all_rows_come_in_order_over_several_files(self, tmp_path: Path) -> None:
        first, second = tmp_path / f"a{self.suffix}", tmp_path / f"b{self.suffix}"
        self.write(first, self.rows[:2])
        self.write(second, self.rows[2:])
        assert [dict(row) for row in self.read(first, second)] == [dict(r) for r in self.rows]
        assert [dict(row) for row in self.read(second)] == [dict(r) for r in self.rows[2:]]

    def test_reading_again_gives_the_same(self, tmp_path: Path) -> None:
        self.write(tmp_path / f"a{self.suffix}", self.rows)
        assert self.read(tmp_path / f"a{self.suffix}") == self.read(tmp_path / f"a{self.suffix}")

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="nowhere"):
            self.read(tmp_path / f"nowhere{self.suffix}")

    def test_an_empty_file_is_an_error_that_names_it(self, tmp_path: Path) -> None:
        self.write(tmp_path / f"nothing{self.suffix}", ())
        with pytest.raises(DataError, match="nothing"):
            self.read(tmp_path / f"nothing{self.suffix}")


class TrackerConformance(PluginConformance):
    """Subclass it, set `plugin`, and pytest runs the suite."""

    kind = "tracker"
    plugin: ClassVar[type[Tracker]]

    @contextmanager
    def around(self) -> Iterator[None]:
        """What must be there while the tracker lives, such as a server."""
        yield

    def test_a_whole_run_is_followed(self, tmp_path: Path) -> None:
        with self.around():
            tracker: Tracker = self.make(run_directory=tmp_path)
            tracker.start()
            tracker.begin(_run(tmp_path))
            for step in (1, 2):
                tracker.phase(step, "rollout")
                tracker.samples(step, [{"prompt": "1 + 1 =", "response": "2", "score": 1.0}])
                tracker.log(step, {"reward/mean": 0.5 * step, "actor/pg_loss": -0.25})
            tracker.finish({"status": "finished", "steps": 2})
            tracker.close()

    def test_odd_figures_and_texts_stop_nothing(self, tmp_path: Path) -> None:
        with self.around():
            tracker: Tracker = self.make(run_directory=tmp_path)
            tracker.start()
            tracker.begin(_run(tmp_path))
            tracker.log(1, {})
            tracker.log(2, {"a/nan": math.nan, "a/inf": math.inf, "perf/tokens": 10.0**18})
            tracker.samples(2, [])
            tracker.samples(2, [{"prompt": "\x00 ∑ 🦊", "response": "", "score": None}])
            tracker.finish({"status": "failed"})
            tracker.close()

    def test_without_a_run_directory_it_works_too(self) -> None:
        with self.around():
            tracker: Tracker = self.make()
            tracker.start()
            tracker.log(1, {"reward/mean": 0.5})
            tracker.close()


def _run(directory: Path) -> dict[str, Any]:
    return {"config": None, "plan": None, "directory": directory, "start_step": 0, "total_steps": 2}


class TrainerConformance(PluginConformance):
    """Subclass it, set `plugin`, and pytest runs the suite: what the loop does is followed on a flow of words."""

    kind = "trainer"
    plugin: ClassVar[type[Trainer]]
    steps: ClassVar[int] = 3
    """Steps of the run."""

    def run(self) -> tuple[Any, list[str]]:
        """What `run` returned, and the stages that it asked for, in order."""
        flow = ToldFlow(self.steps)
        found = self.make().run(flow)
        return found, flow.told

    def test_it_takes_every_step_and_returns_the_summary(self) -> None:
        found, told = self.run()
        assert found == {"status": "finished", "steps": self.steps}
        assert told.count("begin_step") == told.count("update") == self.steps

    def test_rollouts_have_the_weights_before_the_first_step(self) -> None:
        _, told = self.run()
        assert "sync_weights" in told[: told.index("begin_step")]

    def test_each_step_rolls_out_estimates_and_updates_in_this_order(self) -> None:
        _, told = self.run()
        stages = [s for s in told if s in ("rollout_and_score", "estimate_advantages", "update")]
        assert stages[:3] == ["rollout_and_score", "estimate_advantages", "update"]
        assert sorted(stages) == sorted(stages[:3] * self.steps)

    def test_the_run_is_saved_at_its_end(self) -> None:
        _, told = self.run()
        assert "save" in told[len(told) - told[::-1].index("update") :]


class ToldFlow:
    """A flow that does nothing and remembers what it was asked.

    Attributes:
        told: the stages, in order.
    """

    def __init__(self, total_steps: int) -> None:
        self.step = 0
        self.total_steps = total_steps
        self.told: list[str] = []
        self.validated = False
        self.loader = SimpleNamespace(next_batch=lambda: self._tell("next_batch"))

    @contextmanager
    def running(self) -> Iterator[None]:
        """The run."""
        yield

    @contextmanager
    def begin_step(self) -> Iterator[None]:
        """A step."""
        self.told.append("begin_step")
        yield
        self.step += 1

    def summary(self) -> dict[str, Any]:
        """What the run came to."""
        return {"status": "finished", "steps": self.step}

    def _tell(self, stage: str, *_: Any, **__: Any) -> str:
        self.told.append(stage)
        return stage

    def __getattr__(self, stage: str) -> Any:
        if stage.startswith("_"):
            raise AttributeError(stage)
        return lambda *given, **named: self._tell(stage, *given, **named)
