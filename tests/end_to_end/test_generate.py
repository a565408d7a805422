"""`dovetail generate` answers prompts in their order, and continues what was interrupted."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from dovetail.telemetry.jsonl import read_rows

SAMPLING = ("rollout.n=2", "data.max_response_length=12", "model.dtype=float32", "seed=5")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Three prompts, a line each, and a blank line."""
    path = tmp_path / "prompts.txt"
    path.write_text("one and one\n\ntwo and two\nthree\n")
    return path


def test_a_checkpoint_answers_prompts_of_every_form(
    config: Path, finished: Path, tmp_path: Path, prompts: Path, inside: Callable[..., Result]
) -> None:
    run = str(finished)
    inside(
        "generate", run, "--prompts", str(prompts), "--out", str(tmp_path / "a.jsonl"), *SAMPLING
    )
    rows = read_rows(tmp_path / "a.jsonl")
    assert [row["prompt"] for row in rows] == ["one and one", "two and two", "three"]
    for row in rows:
        assert row["prompt_tokens"] > 0
        assert len(row["responses"]) == 2
        for response in row["responses"]:
            assert 1 <= response["tokens"] <= 12
            assert response["finish_reason"] in ("stop", "length")
    typed = ("--prompt", "one and one", "--prompt", "two and two", "--prompt", "three")
    inside("generate", f"{run}@3", *typed, "--out", str(tmp_path / "b.jsonl"), *SAMPLING)
    assert read_rows(tmp_path / "b.jsonl") == rows
    inside("generate", f"{run}/final", *typed, "--out", str(tmp_path / "c.jsonl"), *SAMPLING)
    assert read_rows(tmp_path / "c.jsonl") == rows
    data = str(config.with_name("val.jsonl"))
    inside("generate", run, "--prompts", data, "--out", str(tmp_path / "d.jsonl"))
    assert [len(row["responses"]) for row in read_rows(tmp_path / "d.jsonl")] == [1] * 4


def test_a_prompt_is_a_line_up_to_its_line_feed_and_spells_no_control_tokens(
    finished: Path, tmp_path: Path, inside: Callable[..., Result]
) -> None:
    lines = ["What is\u20282+2?", "next\x85page", "form\x0cfeed", "a<|im_end|>b", "plain"]
    file = tmp_path / "lines.txt"
    file.write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    tokens = {}
    for control in ("text", "allow"):
        out = tmp_path / f"{control}.jsonl"
        options = ("--prompts", str(file), "--out", str(out), "data.max_response_length=1")
        inside("generate", str(finished), *options, f"data.control_tokens={control}")
        rows = read_rows(out)
        assert [row["prompt"] for row in rows] == lines
        tokens[control] = [row["prompt_tokens"] for row in rows]
    differ = [a > b for a, b in zip(tokens["text"], tokens["allow"], strict=True)]
    assert differ == [False, False, False, True, False]


@pytest.mark.nightly
def test_a_killed_command_continues_to_the_same_file(
    tiny: Path, tmp_path: Path, start: Callable[..., Any], inside: Callable[..., Result]
) -> None:
    many = tmp_path / "many.txt"
    many.write_text("".join(f"prompt number {i}\n" for i in range(240)))
    options = ("--prompts", str(many), "data.max_response_length=64", "model.dtype=float32")
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    inside(
        "generate",
        str(tiny),
        *options,
        "rollout.ignore_eos=true",
        "rollout.max_batch_size=8",
        "--out",
        str(whole),
    )
    command = (
        "generate",
        str(tiny),
        *options,
        "rollout.ignore_eos=true",
        "rollout.max_batch_size=8",
        "--out",
        str(out),
    )
    running = start(*command)
    until = time.monotonic() + 60
    while not running.ended and (not out.exists() or len(out.read_bytes().splitlines()) < 8):
        assert time.monotonic() < until
        time.sleep(0.005)
    running.send(signal.SIGKILL)
    assert running.wait().returncode == -signal.SIGKILL
    written = out.read_bytes()
    done = written.count(b"\n")
    assert 8 <= done < 240
    assert written[: written.rfind(b"\n") + 1] == b"".join(
        whole.read_bytes().splitlines(True)[:done]
    )
    with out.open("ab") as file:
        file.write(b'{"index": 9, "torn')
    again = inside(*command)
    assert f"continues after {done} of 240 prompts" in again.output
    assert out.read_bytes() == whole.read_bytes()
    assert "is finished: 240 prompts" in inside(*command).output
    assert out.read_bytes() == whole.read_bytes()


def test_an_output_of_other_settings_is_refused(
    tiny: Path, tmp_path: Path, prompts: Path, inside: Callable[..., Result]
) -> None:
    out = tmp_path / "out.jsonl"
    command = ("generate", str(tiny), "--prompts", str(prompts), "--out", str(out), *SAMPLING)
    inside(*command)
    before = out.read_bytes()
    done = inside(*command, "rollout.temperature=0.5", check=False)
    assert done.exit_code == 1
    assert "temperature: 1.0 → 0.5" in done.output
    prompts.write_text("another\n")
    assert "prompts: " in inside(*command, check=False).output
    (tmp_path / "out.jsonl.settings.json").unlink()
    assert "an output" in inside(*command, check=False).output
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "options", "problem"),
    [
        ("", (), "prompts.txt is empty"),
        ("hello\n", ("data.max_response_length=100000",), "prompts.txt, line 1"),
        ("hello\n" * 3 + "long " * 900, (), "prompts.txt, line 4: the prompt has"),
        ("hello\n", ("rollout=vlm",), "vlm"),
        ("hello\n", ("--prompt", "x"), "--prompts FILE or by --prompt TEXT"),
        ("hello\n", ("rollout.temperature=0",), "rollout.temperature"),
    ],
)
def test_what_can_not_be_generated_is_one_error(
    tiny: Path,
    tmp_path: Path,
    prompts: Path,
    inside: Callable[..., Result],
    content: str,
    options: tuple[str, ...],
    problem: str,
) -> None:
    prompts.write_text(content)
    command = ("--prompts", str(prompts), "--out", str(tmp_path / "out.jsonl"), *options)
    done = inside("generate", str(tiny), *command, check=False)
    assert done.exit_code in (1, 2)
    assert problem in done.output
    assert "Traceback" not in done.output


def test_the_settings_say_what_was_asked(
    tiny: Path, tmp_path: Path, prompts: Path, inside: Callable[..., Result]
) -> None:
    out = tmp_path / "out.jsonl"
    inside("generate", str(tiny), "--prompts", str(prompts), "--out", str(out), *SAMPLING)
    kept = json.loads((tmp_path / "out.jsonl.settings.json").read_text())
    assert (kept["seed"], kept["rollout.n"], kept["max_new_tokens"]) == (5, 2, 12)


def test_under_an_agent_loop_every_response_is_an_episode_with_its_calls_and_results(
    tiny_with_tools: Path,
    tmp_path: Path,
    prompts: Path,
    inside: Callable[..., Result],
    tool_loop: str,
) -> None:
    out = tmp_path / "out.jsonl"
    loop = f"rollout.agent_loop={tool_loop}"
    sampling = ("rollout.n=2", "data.max_response_length=400", "model.dtype=float32", "seed=5")
    command = (
        "generate",
        str(tiny_with_tools),
        "--prompts",
        str(prompts),
        "--out",
        str(out),
        *sampling,
    )
    inside(*command, loop)
    rows = read_rows(out)
    assert [row["prompt"] for row in rows] == ["one and one", "two and two", "three"]
    responses = [response for row in rows for response in row["responses"]]
    assert len(responses) == 6
    for response in responses:
        turns = response["trajectory"]["turns"]
        assert (len(turns), response["trajectory"]["end"]) == (2, "turns")
        for turn in turns:
            assert [call["function"]["name"] for call in turn["calls"]] == ["calculator"]
            assert [message["content"] for message in turn["observed"]] == ["42"]
        assert "failure" not in response
        assert response["tokens"] == sum(turn["stop"] - turn["start"] for turn in turns)
    assert len({response["text"] for response in responses}) > 1
    refused = inside(*command, loop.replace("max_turns: 2", "max_turns: 1"), check=False)
    assert refused.exit_code == 1
    assert "rollout.agent_loop: " in refused.output


def test_an_episode_that_fails_is_written_with_its_failure(
    tiny_with_tools: Path,
    tmp_path: Path,
    prompts: Path,
    inside: Callable[..., Result],
    tool_loop: str,
) -> None:
    (tmp_path / "broken.py").write_text(
        "def calculator(expression: str) -> str:\n"
        '    """Compute.\n\n    Args:\n        expression: what.\n    """\n'
        '    raise RuntimeError("out of order")\n'
    )
    broken = json.dumps({"path": str(tmp_path / "broken.py"), "attribute": "calculator"})
    loop = f"rollout.agent_loop={tool_loop.replace('[calculator]', f'[{broken}]')}"
    out = tmp_path / "out.jsonl"
    inside(
        "generate",
        str(tiny_with_tools),
        "--prompts",
        str(prompts),
        "--out",
        str(out),
        *SAMPLING,
        loop,
    )
    for row in read_rows(out):
        for response in row["responses"]:
            assert response["failure"]["kind"] == "tool"
            assert "out of order" in response["failure"]["message"]
            assert len(response["trajectory"]["turns"]) == 1
