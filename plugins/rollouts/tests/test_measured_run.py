"""`dovetail plan --from-run`: its reading of a run, its output, and its errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import attrs
import pytest
from click.testing import CliRunner, Result

from dovetail.cli.main import main
from dovetail.config import config_from_mapping
from dovetail.config.serialise import dump_yaml
from dovetail.telemetry import RunDirectory
from dovetail.telemetry.jsonl import append_rows
from dovetail_rollouts.measured_run import Measured
from dovetail_rollouts.schedule_simulation import Costs, Decoding, RunSchedule, simulate
from dovetail_sdk.testing import tiny_model_and_tokenizer

LENGTHS = [(2, 4), (8, 8), (1, 6), (5, 7), (3, 3), (8, 2)]
"""Lengths of a prompt's two responses in each step; the first two steps are left out of the measurement."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_and_tokenizer(tmp_path_factory.mktemp("model"), vocab_size=300)


@pytest.fixture
def sections(tiny: Path, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1 + 1 =", "response": "2"}\n' * 8)
    return {
        "model": {"path": str(tiny), "dtype": "float32"},
        "data": {
            "train_files": [str(tmp_path / "train.jsonl")],
            "train_batch_size": 1,
            "max_prompt_length": 32,
            "max_response_length": 8,
        },
        "rollout": {"n": 2},
        "reward": {"function": {"name": "repetition_penalty"}},
    }


@pytest.fixture
def predict(sections: dict[str, Any], tmp_path: Path) -> Callable[..., Result]:
    """A function that runs the command on a run with these times: a decode step 2 s, and 0.5 s more for each sample; training
    1 s for each token of the responses and of the prompts (4 in a step); a publication 3 s.
    """

    def predict(
        *overrides: str,
        of: tuple[str, ...] = (),
        steps: int = len(LENGTHS),
        without: str = "",
        **measured: float,
    ) -> Result:
        config = config_from_mapping(sections, of).config
        run = RunDirectory.create(tmp_path / "run")
        run.write_text("config.yaml", dump_yaml(config))
        for step, lengths in enumerate(LENGTHS[:steps], start=1):
            generation = 2 * max(lengths) + 0.5 * sum(lengths)
            both = 3 * min(lengths)
            metrics = {
                "prompt_length/mean": 2.0,
                "response_length/mean": sum(lengths) / 2,
                "response_length/max": float(max(lengths)),
                "time/rollout": generation,
                "time/rollout/generation": generation,
                "time/rollout/scoring_left": 0.0,
                "time/weight_sync": 3.0,
                "time/step": generation + sum(lengths) + 4 + 3,
                "rollout/idle_seconds": sum(lengths) + 7.0,
                "perf/rollout_concurrency": (generation + both) / generation,
            }
            metrics |= {name.replace("_", "/", 1): value for name, value in measured.items()}
            metrics.pop(without, None)
            append_rows(run.metrics, [{"step": step, **metrics}])
            rows = [{"response_length": length} for length in lengths]
            run.write_samples(step, rows[: config.trainer.samples_per_step])
        path = tmp_path / "config.yaml"
        path.write_text(dump_yaml(config_from_mapping(sections, overrides).config))
        return CliRunner().invoke(main, ["plan", str(path), "--from-run", str(run.path), "--json"])

    return predict


ONE_BY_ONE = RunSchedule(
    groups=4,
    samples=2,
    steps_behind=1,
    over_sampling=None,
    sync_every=1,
    cut_short=True,
    take_turns=False,
    replicas=1,
    most_running=1,
    ranks=1,
)


def test_the_prompts_that_may_be_outstanding_are_rounded_where_they_are_no_whole_number() -> None:
    # 1.15 · 100 is slightly less than 115 in floating point.
    steps = {1.15: 115, 1.254: 125, 1.257: 126, None: 200}
    for over_sampling, prompts in steps.items():
        schedule = attrs.evolve(ONE_BY_ONE, groups=100, over_sampling=over_sampling)
        assert schedule.most_outstanding == prompts


@pytest.mark.parametrize(
    "schedule",
    [
        ONE_BY_ONE,
        attrs.evolve(ONE_BY_ONE, groups=1, samples=1, most_running=None),
        attrs.evolve(ONE_BY_ONE, most_running=None, steps_behind=3, over_sampling=1.5),
    ],
)
@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_the_decode_times_that_made_a_run_are_in_the_range_also_where_it_does_not_tell_them_apart(
    monkeypatch: pytest.MonkeyPatch, schedule: RunSchedule, share: float
) -> None:
    count = schedule.groups * schedule.samples
    lengths = [1 + 7 * i % 40 for i in range(6 * count)]
    costs = Costs(scoring=0.0, collection=0.0, learning=1e-3, publication=0.0, prompt_tokens=8.0)
    true = Decoding(fixed=0.02 * share, each=0.02 * (1 - share))
    measured = Measured(
        name="run",
        plan=cast("Any", SimpleNamespace(counts=SimpleNamespace(samples_per_step=count))),
        steps=[{}] * 6,
        lengths=lengths,
    )
    made = simulate(schedule, true, costs, lengths, 6)
    monkeypatch.setattr(f"{Measured.__module__}.schedule_of", lambda _: schedule)
    monkeypatch.setattr(Measured, "costs", lambda _: costs)
    monkeypatch.setattr(Measured, "mean", lambda _: made)
    many = attrs.evolve(schedule, samples=40, most_running=None)
    seconds = [
        simulate(many, decoding, costs, lengths, 6).step_seconds
        for decoding in measured.decodings()
    ]
    wanted = simulate(many, true, costs, lengths, 6).step_seconds
    assert min(seconds) * 0.99 <= wanted <= max(seconds) * 1.01


def forecast_of(done: Result) -> Any:
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["forecast"]


def test_the_run_itself_is_predicted_as_it_was_measured(predict: Callable[..., Result]) -> None:
    found = forecast_of(predict())
    assert found["steps"] == 4
    assert found["own"] == pytest.approx(found["measured"])
    assert found["predicted"] == pytest.approx(found["measured"])
    assert found["low"] == pytest.approx(found["high"], rel=0.02)
    assert found["differing"] == []


def test_more_samples_take_what_the_fit_says(predict: Callable[..., Result]) -> None:
    # The samples of two steps at once, (1, 6, 5, 7) and (3, 3, 8, 2). Training takes 1 s for each of their tokens and 8 of prompts.
    found = forecast_of(predict("rollout.n=4"))
    generation = (2 * 7 + 0.5 * 19 + 2 * 8 + 0.5 * 16) / 2
    assert found["predicted"]["generation_seconds"] == pytest.approx(generation)
    assert found["predicted"]["step_seconds"] == pytest.approx(generation + 35 / 2 + 8 + 3)


def test_what_a_replica_can_not_run_at_once_waits(predict: Callable[..., Result]) -> None:
    found = forecast_of(predict("rollout.max_batch_size=1"))
    assert found["predicted"]["generation_seconds"] == pytest.approx(2.5 * 35 / 4)


def test_where_both_share_accelerators_nothing_is_generated_while_a_step_learns(
    predict: Callable[..., Result],
) -> None:
    found = forecast_of(predict("trainer=streaming"))
    assert found["predicted"]["step_seconds"] == pytest.approx(
        found["measured"]["step_seconds"], 0.2
    )
    assert any("share accelerators" in sentence for sentence in found["assumed"])


def test_what_differs_in_the_config_is_said(predict: Callable[..., Result]) -> None:
    # That `rollout.n` is not told hides no other key that begins alike.
    changed = ("data.max_response_length=6", "actor.epochs=2", "rollout.name=vllm", "rollout.n=4")
    found = forecast_of(predict(*changed))
    told = {line.split()[0] for line in found["differing"]}
    assert told >= {"data.max_response_length", "actor.epochs", "rollout.name"}
    assert "rollout.n" not in told


def test_lengths_are_drawn_where_not_all_samples_are_written(
    predict: Callable[..., Result],
) -> None:
    found = forecast_of(predict(of=("trainer.samples_per_step=1",)))
    # The maximum and the mean of two lengths determine both lengths.
    assert found["own"]["step_seconds"] == pytest.approx(found["measured"]["step_seconds"], 0.01)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"steps": 0}, "finished step"),
        ({"without": "rollout/idle_seconds"}, "lacks the metric rollout/idle_seconds of step 3"),
        ({"of": ("trainer.samples_per_step=0",)}, "written no samples"),
        ({"time_rollout/generation": 0.0}, "nothing from step 3 to step 6"),
        ({"of": ("trainer=supervised",)}, "generates nothing"),
    ],
)
def test_a_run_that_does_not_tell_enough_is_refused(
    predict: Callable[..., Result], given: Any, words: str
) -> None:
    done = predict(**given)
    assert done.exit_code == 2
    assert words in done.stderr


def test_the_last_steps_of_a_streaming_run_which_admitted_nothing_more_are_left_out(
    predict: Callable[..., Result],
) -> None:
    of = ("trainer={name: streaming, max_staleness: 2}",)
    assert forecast_of(predict(of=of))["steps"] == 2


def test_steps_that_generated_more_than_they_trained_on_are_named(
    predict: Callable[..., Result],
) -> None:
    found = forecast_of(predict(filter_generated_prompts=3.0))
    assert any("filters emptied groups" in sentence for sentence in found["assumed"])


def test_there_is_nothing_to_predict_without_a_rollout(predict: Callable[..., Result]) -> None:
    done = predict("trainer=supervised")
    assert done.exit_code == 2
    assert "without a rollout" in done.stderr
