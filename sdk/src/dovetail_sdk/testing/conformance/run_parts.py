"""The suites of KL controllers, samplers, datasets, trackers and trainers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, get_args

import attrs
import numpy as np
import pytest

from dovetail.batch import Batch
from dovetail.errors import DataError, NumericsError, StopRequested
from dovetail.interfaces import (
    DatasetSource,
    Examples,
    KlController,
    PluginContext,
    Run,
    Sampler,
    Tracker,
    Trainer,
)
from dovetail_sdk.testing.conformance.plugin import PluginConformance
from dovetail_sdk.testing.resumed import resumed_state
from dovetail_sdk.testing.scripted_run import ScriptedRun


class KlControllerConformance(PluginConformance):
    """Conformance suite for KL controllers: subclass it and set `plugin`."""

    kind = "kl_controller"
    plugin: ClassVar[type[KlController]]

    def after(self, *kls: float) -> KlController:
        """Return a controller updated with these KL values, each measured on 64 samples."""
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
    """Conformance suite for samplers: subclass it and set `plugin`."""

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
    """Conformance suite for dataset sources: subclass it, set `plugin` and override `write`."""

    kind = "dataset"
    plugin: ClassVar[type[DatasetSource]]
    rows: ClassVar[tuple[Mapping[str, Any], ...]] = tuple(
        {"prompt": [{"role": "user", "content": f"{n} + 1 ="}], "data_source": "sums", "reward_model": {"ground_truth": str(n + 1)}}
        for n in range(5)
    )  # fmt: skip
    """Rows that a file of the format can hold."""

    suffix: ClassVar[str] = ".jsonl"
    """File name suffix of the format."""

    def write(self, path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows to a file of this format."""
        pytest.skip("the suite can't write files of this format: override `write` in a suite")

    def read(self, *paths: Path) -> list[Mapping[str, Any]]:
        """Return the rows that the plugin reads from these files."""
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

    def test_rows_of_a_program_are_read_again_or_refused(self, tmp_path: Path) -> None:
        config = self.make().config
        try:
            path = self.plugin.write(config, self.rows, tmp_path / "new")
        except DataError:
            return
        assert path == self.plugin.write(config, list(self.rows), tmp_path / "new")
        assert path != self.plugin.write(config, self.rows[:2], tmp_path / "new")
        assert [dict(row) for row in self.read(path)] == [dict(row) for row in self.rows]


class TrackerConformance(PluginConformance):
    """Conformance suite for trackers: subclass it and set `plugin`."""

    kind = "tracker"
    plugin: ClassVar[type[Tracker]]

    @contextmanager
    def around(self) -> Iterator[None]:
        """Run what the tracker needs, such as a server, for the duration of the context."""
        yield

    def test_a_whole_run_is_followed(self, tmp_path: Path) -> None:
        with self.around():
            tracker: Tracker = self.make(run_directory=tmp_path)
            tracker.start()
            tracker.run_started(None, None, tmp_path, start_step=0, total_steps=2)
            for step in (1, 2):
                metrics = {"reward/mean": 0.5 * step, "actor/pg_loss": -0.25}
                tracker.step_started(step)
                tracker.phase_started(step - 1, "rollout")
                tracker.samples_logged(step, [{"prompt": "1 + 1 =", "response": "2", "score": 1.0}])
                tracker.rollout_finished(step, [])
                tracker.reward_finished(step, metrics)
                tracker.stage_finished(step, "advantage", Batch({}), Batch({}))
                tracker.update_finished(step, metrics)
                tracker.metrics_logged(step, metrics)
                tracker.step_finished(step, metrics)
                tracker.checkpoint_saved(step, tmp_path / "checkpoints" / f"step_{step}")
            tracker.model_exported(2, tmp_path / "final")
            tracker.failure(2, RuntimeError("a failed run"))
            tracker.run_finished({"status": "finished", "steps": 2})
            tracker.close()

    def test_odd_figures_and_texts_stop_nothing(self, tmp_path: Path) -> None:
        with self.around():
            tracker: Tracker = self.make(run_directory=tmp_path)
            tracker.start()
            tracker.run_started(None, None, tmp_path, start_step=0, total_steps=2)
            tracker.metrics_logged(1, {})
            tracker.metrics_logged(
                2, {"a/nan": math.nan, "a/inf": math.inf, "perf/tokens": 10.0**18}
            )
            tracker.samples_logged(2, [])
            tracker.samples_logged(2, [{"prompt": "\x00 ∑ 🦊", "response": "", "score": None}])
            tracker.run_finished({"status": "failed"})
            tracker.close()

    def test_without_a_run_directory_it_works_too(self) -> None:
        with self.around():
            tracker: Tracker = self.make()
            tracker.start()
            tracker.metrics_logged(1, {"reward/mean": 0.5})
            tracker.close()


class TrainerConformance(PluginConformance):
    """Conformance suite for trainers: subclass it and set `plugin`. The trainer drives a run without a model."""

    kind = "trainer"
    plugin: ClassVar[type[Trainer]]
    steps: ClassVar[int] = 3
    """Number of the run's steps."""

    def trained(self, **settings: Any) -> ScriptedRun:
        """Run the trainer on a scripted run until the run ends, and return the run; for `settings` see `ScriptedRun`."""
        run = self.scripted(**settings)
        self.make().run(run)
        return run

    def scripted(self, **settings: Any) -> ScriptedRun:
        """Return a scripted run that the trainer has not started; for `settings` see `ScriptedRun`."""
        config = self.make_config()
        of_trainer = {
            "max_staleness": self.plugin.max_staleness(config),
            "examples": self.plugin.examples(config),
        }
        return ScriptedRun(**{"total_steps": self.steps, **of_trainer, **settings})

    def skip_without_rollout(self) -> None:
        """Skip the test if the trainer's runs generate nothing."""
        if self.plugin.examples(self.make_config()) != "prompts":
            pytest.skip("the trainer's runs have no rollout")

    def test_it_takes_every_step_in_order(self) -> None:
        run = self.trained()
        assert run.learned == list(range(1, self.steps + 1))
        assert run.position.finished

    def test_a_resumed_run_takes_the_steps_that_are_left(self) -> None:
        run = self.trained(total_steps=5, step=2)
        assert run.learned == [3, 4, 5]

    def test_a_finished_run_takes_no_further_step(self) -> None:
        assert self.trained(step=self.steps).learned == []

    def test_it_names_the_kind_of_its_examples(self) -> None:
        assert self.plugin.examples(self.make_config()) in get_args(Examples)

    def test_weights_are_published_before_the_first_samples(self) -> None:
        self.skip_without_rollout()
        calls = self.trained().calls
        assert "publish_weights" in calls[: calls.index("collect")]

    def test_weights_are_published_after_each_learn(self) -> None:
        self.skip_without_rollout()
        if self.plugin.max_staleness(self.make_config()):
            pytest.skip("the rollout may have older weights (max_staleness > 0)")
        order = ("collect", "learn", "publish_weights")
        calls = [call for call in self.trained().calls if call in order]
        following = [calls[at + 1 : at + 2] for at, call in enumerate(calls) if call == "learn"]
        assert following == [["publish_weights"]] * self.steps

    def test_the_run_is_saved_at_its_end(self) -> None:
        if not self.make_config().save_last:
            pytest.skip("the config has save_last: false")
        assert self.steps in self.trained().saved

    def test_it_validates_when_its_config_says(self) -> None:
        never = {"validate_before": False, "validate_every": 0, "validate_after": False}
        assert self.steps_at("validate", **never) == []
        assert 0 in self.steps_at("validate", **{**never, "validate_before": True})
        assert {2, 4} <= {*self.steps_at("validate", **{**never, "validate_every": 2})}
        assert 5 in self.steps_at("validate", **{**never, "validate_after": True})

    def test_it_saves_as_often_as_its_config_says(self) -> None:
        assert {2, 4} <= {*self.steps_at("save", save_every=2)}

    def steps_at(self, method: str, **settings: Any) -> list[int]:
        """Run five steps with a changed trainer config; return how many steps had finished at each call of `Run`'s `method`."""
        run = self.scripted(total_steps=5)
        trainer: Any = self.plugin(attrs.evolve(self.make_config(), **settings), PluginContext())
        trainer.run(run)
        return [
            run.calls[:at].count("learn") for at, call in enumerate(run.calls) if call == method
        ]

    def test_a_stop_passes_wherever_it_is_asked_for(self) -> None:
        for call in range(1, len(self.trained().calls) + 1):
            run = self.scripted(stop_at=call)
            with pytest.raises(StopRequested):
                self.make().run(run)

    def test_an_error_of_learn_passes(self) -> None:
        error = NumericsError("a scripted error")
        run = self.scripted(learn_error=error, fails_in=self.steps)
        with pytest.raises(NumericsError) as caught:
            self.make().run(run)
        assert caught.value is error
        assert run.learned == list(range(1, self.steps))

    def test_it_uses_what_is_public_of_a_run(self) -> None:
        run = self.scripted()
        self.make().run(_Public(run))
        assert run.position.finished

    def test_its_state_goes_through_a_checkpoint_and_brings_it_back(self, tmp_path: Path) -> None:
        first, second = self.make(), self.make()
        interrupted = self.scripted(
            learn_error=NumericsError("a scripted error"), fails_in=self.steps
        )
        with suppress(NumericsError):
            first.run(interrupted)
        state = resumed_state(first, tmp_path / "first")
        second.load_state(state)
        np.testing.assert_equal(resumed_state(second, tmp_path / "second"), state)
        resumed = self.scripted(step=self.steps - 1)
        second.run(resumed)
        assert resumed.learned == [self.steps]


class _Public:
    """A run that gives access only to what `Run` declares."""

    def __init__(self, run: ScriptedRun) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in vars(Run):
            raise AssertionError(f"the trainer reads run.{name}, which Run does not declare")
        return getattr(self._run, name)
