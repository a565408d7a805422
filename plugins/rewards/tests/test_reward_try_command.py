"""`dovetail reward try`: scores, errors and times of a reward, before a run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dovetail.cli.main import main

REWARD = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if "boom" in solution_str:
        raise ValueError("boom")
    if "slow" in solution_str:
        time.sleep(0.25)
    if "hang" in solution_str:
        time.sleep(120)
    right = solution_str.endswith(ground_truth)
    return {"score": float(right), "length": len(solution_str), "pred": solution_str[-1:]}

def half(solution_str):
    return 0.5
"""


def row(truth: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": "1+1", "reward_model": {"ground_truth": truth}, **more}


def write(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_reward.py").write_text(REWARD)
    write(tmp_path / "data.jsonl", [row("2"), row("3"), row("4")])
    return tmp_path


def reward_try(*args: str) -> Result:
    return CliRunner().invoke(main, ["reward", "try", *args], env={"COLUMNS": "200"})


def as_json(*args: str, exit_code: int = 0) -> dict[str, Any]:
    result = reward_try(*args, "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def test_scores_errors_times_and_the_slowest_row_are_shown(place) -> None:
    responses = [
        {"response": "boom"},
        {"response": "slow 3"},
        {"responses": ["[b]5", *"123456784"]},
    ]
    write(place / "out.jsonl", responses)
    result = reward_try("my_reward.py", "data.jsonl", "--responses", "out.jsonl")
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert "12 responses from out.jsonl (12)" in text
    scorer = "none         my_reward.py:compute_score"
    assert f"{scorer}  score    11       0.273" in text
    assert f"{scorer}  length   11" in text
    assert re.search(rf"{scorer}  seconds  12 .* 2[5-9]\d ms *\n", text)
    assert "data.jsonl, line 1: my_reward.py:compute_score raised ValueError: boom" in text
    assert "[b]5" in text
    assert "message" in text
    assert "pred" in text


def test_few_rows_are_shown_once_with_why_each_failed_and_no_empty_column(place) -> None:
    (place / "tests.py").write_text(
        "def compute_score(solution_str):\n"
        "    if solution_str == '2': raise ValueError('boom')\n"
        "    return {'score': 0.0, 'first_failure': f'test {solution_str} gave up'}\n"
    )
    text = reward_try("tests.py", "data.jsonl").stdout
    rows = text.partition("figures")[0].splitlines()
    assert "tests.py:compute_score raised ValueError: boom" in rows[4]
    assert "test 3 gave up" in rows[5]
    assert "pred" not in text


def test_a_part_of_a_hybrid_reward_tells_its_answer_and_what_failed(place) -> None:
    (place / "part.py").write_text(
        "def compute_score(solution_str):\n"
        "    return {'score': -1.0, 'pred': 'half', 'first_failure': 'the third test'}\n"
    )
    hybrid = "reward.manager={name: hybrid, scorers: {part: {function: {path: part.py}}}}"
    text = reward_try("part.py", "data.jsonl", "--set", hybrid).stdout
    assert text.count("half") == text.count("the third test") == 3
    assert "--responses" in text


def test_errors_are_told_apart_by_what_they_say_and_not_by_their_values(place) -> None:
    (place / "fails.py").write_text(
        "WHAT = ['low', 'high', 'odd', 'even', 'far']\n"
        "def compute_score(solution_str):\n"
        "    n = int(solution_str)\n"
        "    raise ValueError(f\"{n / 8} is too {WHAT[n % 5]} for 'part {n}'\")\n"
    )
    write(place / "many.jsonl", [row(str(i)) for i in range(13)])
    text = reward_try("fails.py", "many.jsonl").stdout
    lines = text.partition("errors")[2].splitlines()[2:]
    assert [line.split()[:2] for line in lines] == [["exception", str(n)] for n in (3, 3, 3, 2, 2)]
    assert "line 1: fails.py:compute_score raised ValueError: 0.0 is too low" in lines[0]
    assert "line 2: " in lines[1]


def test_controls_in_responses_and_messages_are_shown_and_not_carried_out(place) -> None:
    (place / "my_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if ground_truth == '2':\n"
        "        raise ValueError('\\x1b[2J')\n"
        "    return {'score': 1.0, 'pred': '\\x9b31m'}\n"
    )
    write(place / "out.jsonl", [{"response": "\u202eend\x07"}] * 3)
    result = reward_try("my_reward.py", "data.jsonl", "--responses", "out.jsonl")
    for expected in (r"\x1b[2J", r"\x9b31m", r"\u202eend\x07"):
        assert expected in result.stdout
    assert not {"\x1b", "\x9b", "\x07", "\u202e"} & set(result.stdout)


ENDS = [
    "os._exit(0)",
    "os._exit(7)",
    "posix._exit(0)",
    "sys.exit(3)",
    "raise KeyboardInterrupt",
    "raise GeneratorExit",
    "return (x for x in [1])",
]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_function_that_ends_its_process_fails_the_row_alone(place, kind) -> None:
    write(place / "data.jsonl", [row(end) for end in (*ENDS, "return 1.0")])
    cases = "".join(f"    if ground_truth == {end!r}: {end}\n" for end in ENDS)
    (place / "ends.py").write_text(
        f"import os, posix, sys\n{kind} compute_score(ground_truth):\n{cases}    return 1.0\n"
    )
    command = [sys.executable, "-m", "dovetail", "reward", "try", "ends.py", "data.jsonl", "--json"]
    samples = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["samples"]
    assert [sample["score"] for sample in samples] == [None] * len(ENDS) + [1.0]
    for sample in samples[:-1]:
        assert "ends.py" in sample["message"]


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_it_fails_where_every_sample_did(place, options) -> None:
    write(place / "out.jsonl", [{"response": "boom"}] * 3)
    all_failed = reward_try("my_reward.py", "data.jsonl", "--responses", "out.jsonl", *options)
    assert all_failed.exit_code == 1
    assert "boom" in all_failed.stdout
    write(place / "out.jsonl", [{"response": "boom"}, {"response": "0"}, {"response": "boom"}])
    one_scored = reward_try("my_reward.py", "data.jsonl", "--responses", "out.jsonl", *options)
    assert one_scored.exit_code == 0


def test_json_holds_every_sample(place) -> None:
    responses = [{"output": "boom"}, {"output": "slow 3"}, {"output": "5"}]
    write(place / "out.jsonl", responses)
    shown = as_json("my_reward.py", "data.jsonl", "--responses", "out.jsonl")
    boom, slow, wrong = shown["samples"]
    assert (boom["score"], boom["failure"]) == (None, "exception")
    assert (slow["score"], slow["extras"]["pred"], slow["failure"]) == (1.0, "3", None)
    assert slow["seconds"] >= 0.25
    assert wrong["seconds"] > 0
    assert wrong["components"] == {"length": 1.0}
    assert [(error["kind"], error["samples"]) for error in shown["errors"]] == [("exception", 1)]
    by = {"data_source": "none", "function": "my_reward.py:compute_score"}
    scores, length = (f for f in shown["figures"] if f["of"] in ("score", "length"))
    assert scores == {**by, "of": "score", "samples": 2, "mean": 0.5, "std": 0.5, "min": 0.0, "max": 1.0}  # fmt: skip
    assert length["max"] == 6.0


@pytest.mark.parametrize(
    ("line", "taken_from", "score"),
    [
        (row("18", response="#### 18", extra_info={"answer": "#### 19"}), "response", 1.0),
        (row("18", extra_info={"answer": "#### 18"}), "extra_info.answer", 1.0),
        (row("18", extra_info={"answer": ""}), "ground_truth", 0.0),
        ({"prompt": "p", "ground_truth": "18", "response": "#### 18"}, "response", 1.0),
        (row("18", images=[{"bytes": "x"}], response="#### 18"), "response", 1.0),
    ],
)
def test_a_row_brings_its_own_response(place, line, taken_from, score) -> None:
    write(place / "one.jsonl", [line])
    assert as_json("gsm8k", "one.jsonl")["samples"][0]["score"] == score
    told = reward_try("gsm8k", "one.jsonl").stdout
    assert f"from {taken_from} (1)" in told
    assert ("--responses" in told) is (taken_from == "ground_truth")


def test_functions_are_chosen_by_data_source_by_name_by_file_or_by_config(place) -> None:
    write(place / "gsm8k.jsonl", [row("18", data_source="openai/gsm8k", response="it is 18")])
    assert as_json("-", "gsm8k.jsonl")["samples"][0]["score"] == 0.0
    flexible = ("--set", "reward.function.method=flexible")
    assert as_json("gsm8k", "gsm8k.jsonl", *flexible)["samples"][0]["score"] == 1.0
    assert as_json("my_reward.py:half", "data.jsonl")["samples"][0]["score"] == 0.5
    (place / "config.yaml").write_text(
        "model: {path: m}\ndata: {train_files: [d.jsonl]}\n"
        "reward: {functions: {openai/gsm8k: {name: gsm8k, method: flexible, score: 3.0}}}\n"
    )
    sample = as_json("config.yaml", "gsm8k.jsonl")["samples"][0]
    assert (sample["score"], sample["function"]) == (3.0, "gsm8k")
    (place / "bare.yaml").write_text("reward: {function: {name: gsm8k, method: flexible}}\n")
    for more in ((), ("--set", "model.path=m"), ("--set", "data={train_files: [d.jsonl]}")):
        assert as_json("bare.yaml", "gsm8k.jsonl", *more)["samples"][0]["score"] == 1.0


def test_limits_of_the_section_hold(place) -> None:
    write(place / "out.jsonl", [{"response": "hang"}])
    limits = ("--limit", "1", "--set", "reward.timeout=0.3")
    given = ("my_reward.py", "data.jsonl", "--responses", "out.jsonl", *limits)
    shown = as_json(*given, exit_code=1)
    assert [sample["failure"] for sample in shown["samples"]] == ["timeout"]


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["nope.py", "data.jsonl"], "'nope.py' does not exist"),
        (["my_rewards.py", "data.jsonl"], "did you mean 'my_reward.py'?"),
        (["gsm8", "data.jsonl"], "error: FILE gsm8: "),
        (["gsm8", "data.jsonl"], "did you mean 'gsm8k'"),
        (["my_reward.py", "nope.jsonl"], "file 'nope.jsonl' does not exist"),
        (["-", "data.jsonl"], "a row without data_source"),
        (["gsm8k", "words.jsonl"], "ground truth 'two' is"),
        (["my_reward.py", "data.jsonl", "--responses", "short.jsonl"], "has only 1 lines"),
        (["my_reward.py", "data.jsonl", "--responses", "data.jsonl"], "text under"),
        (["my_reward.py", "bare.jsonl"], "bare.jsonl, line 1 has no response"),
        (["my_reward.py", "data.jsonl", "--set", "reward.timeout=-1"], "reward.timeout"),
    ],
)
def test_what_cannot_be_tried_is_said_before_anything_is_scored(place, args, problem) -> None:
    write(place / "words.jsonl", [row("two")])
    write(place / "short.jsonl", [{"response": "2"}])
    write(place / "bare.jsonl", [{"prompt": "p"}])
    result = reward_try(*args)
    assert result.exit_code not in (0, 1) or "error:" in result.output
    assert problem in result.output


def test_it_needs_no_torch(place) -> None:
    script = (
        "import sys; from dovetail.cli.main import main\n"
        "try: main(['reward', 'try', 'my_reward.py', 'data.jsonl', '--json'])\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'ray'} & set(sys.modules)\n"
        "sys.stderr.write(repr(sorted(heavy)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=place, capture_output=True, text=True, check=True
    )
    assert done.stderr == "[]"


@pytest.mark.parametrize("manager", ["naive", "parallel"])
def test_a_reward_file_imports_a_module_beside_it(place, manager) -> None:
    (place / "beside_reward.py").write_text("HALF = 0.5\n")
    (place / "my_reward.py").write_text(
        "from beside_reward import HALF\ndef compute_score(solution_str):\n    return HALF\n"
    )
    told = as_json("my_reward.py", "data.jsonl", "--set", f"reward.manager={manager}")
    assert [sample["score"] for sample in told["samples"]] == [0.5] * 3
