"""Recordings of two states are compared bit for bit: what is found, what is followed, what does not count."""

from __future__ import annotations

import importlib.util
import json
import math
import struct
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

RECORDS = Path(__file__).resolve().parent.parent / "records"
SERIES = {
    "actor/loss": [(1, 0.1), (2, 0.2)],
    "checkpoint/actor/weights/norm": [(2, "ab" * 32)],
}


def _module(name: str) -> ModuleType:
    """A module of `records/`, as when its scripts run."""
    sys.path.insert(0, str(RECORDS))
    try:
        spec = importlib.util.spec_from_file_location(f"records_{name}", RECORDS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(RECORDS))


compare = _module("compare")
scenarios = sys.modules["scenarios"]
record = _module("record")


def recorded(**series: Any) -> dict[str, Any]:
    changed = {name.replace("__", "/"): points for name, points in series.items()}
    return {
        "status": "recorded",
        "versions": {"torch": "2"},
        "series": {**SERIES, **changed},
    }


def result(base: list[Any], present: list[Any], renames: str = "", scenario: Any = None) -> Any:
    return compare.compare_scenario(base, present, compare.read_renames(renames), scenario)


def test_the_same_recordings_agree():
    found = result([recorded()] * 2, [recorded()] * 2)
    assert not found.failed
    assert found.compared == 2
    assert found.not_repeatable == []


def test_a_changed_last_bit_is_found_with_its_first_step():
    after = math.nextafter(0.2, 1)
    found = result([recorded()] * 2, [recorded(actor__loss=[(1, 0.1), (2, after)])] * 2)
    assert found.failed
    [difference] = found.differences
    assert (difference.name, difference.step) == ("actor/loss", 2)
    assert (difference.base, difference.present) == (repr(0.2), repr(after))
    assert repr(after) in compare.report({"ppo": found})


@pytest.mark.parametrize("value", [-0.0, None])
def test_a_negative_zero_and_a_number_that_is_not_finite_differ_from_zero(value):
    base = [recorded(actor__kl=[(1, 0.0)])]
    assert result(base, [recorded(actor__kl=[(1, value)])]).failed


def test_a_count_agrees_with_its_float():
    base = [recorded(actor__updates=[(1, 2)])]
    assert not result(base, [recorded(actor__updates=[(1, 2.0)])]).failed


def test_a_difference_in_one_recording_of_the_present_is_found():
    odd = recorded(actor__loss=[(1, 0.1), (2, 0.3)])
    assert result([recorded()] * 2, [recorded(), odd]).failed


def test_a_missing_and_a_new_metric_are_found():
    lacks = {**recorded(), "series": {"actor/loss": SERIES["actor/loss"]}}
    [missing] = result([recorded()], [lacks]).differences
    assert (missing.name, missing.present) == ("checkpoint/actor/weights/norm", "absent")
    [new] = result([lacks], [recorded()]).differences
    assert (new.name, new.base) == ("checkpoint/actor/weights/norm", "absent")


def test_a_missing_step_is_found():
    [difference] = result([recorded()], [recorded(actor__loss=[(1, 0.1)])]).differences
    assert (difference.step, difference.base, difference.present) == (2, "0.2", "absent")


def test_renamed_names_are_followed_alone_and_by_their_beginning():
    base = recorded(gate__correlation=[(1, 1.0)], gate__old=[(1, 2.0)], old=[(1, 3.0)])
    present = recorded(check__correlation=[(1, 1.0)], check__newer=[(1, 2.0)], came=[(1, 4.0)])
    renames = "# comment\ngate/* check/*\ngate/old check/newer\nold -\n- came\n"
    assert result([base], [present], renames).differences == []
    changed = recorded(check__correlation=[(1, 0.5)], check__newer=[(1, 2.0)], came=[(1, 4.0)])
    [difference] = result([base], [changed], renames).differences
    assert difference.name == "check/correlation"


def test_a_line_of_three_names_is_no_rename():
    with pytest.raises(ValueError, match=r"'a b c' is.*two names"):
        compare.read_renames("a b c")


def test_what_does_not_repeat_in_the_base_is_listed_and_does_not_fail():
    base = [recorded(random=[(2, "a")]), recorded(random=[(2, "b")])]
    found = result(base, [recorded(random=[(2, "c")])] * 2)
    assert not found.failed
    assert found.not_repeatable == ["random"]
    assert "random" in compare.report({"ppo": found})


def test_another_version_of_a_package_is_found():
    [difference] = result([recorded()], [recorded() | {"versions": {"torch": "3"}}]).differences
    assert difference.name == "version/torch"


def test_means_are_compared_by_the_spread_of_recordings_and_the_rest_by_its_patterns():
    scenario = scenarios.Scenario(
        "gpu",
        lambda _: [],
        tolerances={"reward/mean": scenarios.Tolerance(0.01)},
        exact=("samples/*",),
    )

    def state(*rewards: float, prompt: str = "a") -> list[Any]:
        points = [[(1, reward), (2, reward)] for reward in rewards]
        return [recorded(reward__mean=p, samples__prompt=[(1, prompt)]) for p in points]

    base = state(0.50, 0.52)
    assert not result(base, state(0.55, 0.57), scenario=scenario).failed
    [difference] = result(base, state(0.65, 0.67), scenario=scenario).differences
    assert difference.name == "reward/mean"
    [difference] = result(base, state(0.50, 0.52, prompt="b"), scenario=scenario).differences
    assert difference.name == "samples/prompt"

    base = state(0.50, 0.50)
    assert result(
        base, state(0.40, 0.60, 0.90), scenario=scenario
    ).failed  # its own spread does not excuse it
    assert result(base, state(math.nan, 0.50), scenario=scenario).failed
    assert result(state(math.nan), base, scenario=scenario).failed
    gone = recorded(reward__mean=[(1, None), (2, 0.5)], samples__prompt=[(1, "a")])
    assert result(base, [gone, *base], scenario=scenario).failed
    assert result(base, [recorded(samples__prompt=[(1, "a")]), *base], scenario=scenario).failed
    null = [recorded(reward__mean=[(1, None)], samples__prompt=[(1, "a")])]
    assert not result(null, null, scenario=scenario).failed


def test_a_scenario_of_which_nothing_repeats_fails():
    base = [recorded(random=[(2, "a")]), recorded(random=[(2, "b")])]
    for record_of_base in base:
        record_of_base["series"] = {"random": record_of_base["series"]["random"]}
    assert result(base, base).failed
    without = [{**one, "series": {}} for one in base]
    assert result([recorded(random=[(1, "a")]), recorded(random=[(1, "b")])], without).failed


def test_names_that_came_match_by_their_beginning_and_do_not_hide_what_the_base_has():
    base, present = recorded(n__1=[(1, 1.0)]), recorded(n__1=[(1, 2.0)], n__2=[(1, 1.0)])
    [difference] = result([base], [present], "- n/*").differences
    assert difference.name == "n/1"


def test_a_scenario_that_failed_or_ran_in_one_state_alone_fails_and_one_skipped_in_both_does_not():
    failed = {"status": "failed", "reason": "exit 1", "versions": {}, "series": {}}
    skipped = {**failed, "status": "skipped", "reason": "there is no CUDA GPU"}
    assert result([recorded()], [failed]).failed
    assert result([recorded()], [skipped]).failed
    assert result([skipped], [failed, skipped]).failed
    assert result([recorded()], []).failed
    assert not result([], [recorded()]).failed
    found = result([skipped], [skipped])
    assert not found.failed
    assert "there is no CUDA GPU" in found.note


def tensor_file(path: Path, **tensors: bytes) -> None:
    """A safetensors file of float32 vectors."""
    header, position = {}, 0
    for name, data in tensors.items():
        offsets = [position, position + len(data)]
        header[name] = {"dtype": "F32", "shape": [len(data) // 4], "data_offsets": offsets}
        position += len(data)
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


def test_a_run_is_recorded_without_times_and_memory_and_each_tensor_by_its_own_digest(tmp_path):
    memory = dict.fromkeys(("actor/rss_bytes", "judge/max_memory_allocated_bytes"), 7.0)
    times = {"time": 5.0, "time/step": 1.0, "perf/tokens": 2.0}
    rows = [{"step": 1, **times, **memory, "actor/loss": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    weights = tmp_path / "checkpoints" / "step_2" / "actor" / "weights" / "all.safetensors"
    tensor_file(weights, a=b"\0" * 8, b=b"\0" * 4)
    found = record.read_run(tmp_path)
    assert found["actor/loss"] == [(1, 0.5)]
    names = {"actor/loss", "checkpoint/actor/weights/a", "checkpoint/actor/weights/b"}
    assert found.keys() == names
    tensor_file(weights, a=b"\0" * 7 + b"\1", b=b"\0" * 4)
    changed = record.read_run(tmp_path)
    assert {name for name in names if found[name] != changed[name]} == {
        "checkpoint/actor/weights/a"
    }
