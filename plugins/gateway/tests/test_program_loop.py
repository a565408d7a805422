"""The agent loop `program`: a program's calls are turns of one sequence, and the program's end decides the episode's outcome."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gateway_episodes import Drawn, config_of, resources, run_program, said

from dovetail.errors import ConfigError, DovetailError
from dovetail.interfaces import EpisodeEnd, Failure, FailureKind, PluginContext
from dovetail_gateway.program_loop import ProgramLoop
from dovetail_sdk.testing import template_tokenizer
from dovetail_sdk.testing.chat_templates import CHATML
from dovetail_sdk.testing.conformance import AgentLoopConformance

CLIENT = """
import json, os, sys, time, urllib.request
def ask(messages, model="policy", **fields):
    body = json.dumps({"model": model, "messages": messages, **fields}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]
row = json.loads(os.environ["DOVETAIL_ROW"])
messages = [{"role": "system", "content": "Be brief."}, *row["prompt"]]
"""
"""A program's own client, and the row's messages."""
THREE = (
    CLIENT
    + """
for number in range(3):
    messages.append(ask(messages))
    messages.append({"role": "user", "content": f"go on {number}"})
"""
)


class TestProgramLoop(AgentLoopConformance):
    plugin = ProgramLoop
    turns = ("one turn", "another")

    @pytest.fixture(autouse=True)
    def _script(self, tmp_path: Path) -> None:
        script = tmp_path / "agent.py"
        script.write_text(THREE.replace("for number", "messages = row['prompt']\nfor number"))
        type(self).config = config_of(command=f"{sys.executable} {script}")


def failure_of(drawn: Drawn) -> Failure:
    assert isinstance(drawn.sample.outcome, Failure), drawn.sample.outcome
    assert drawn.sample.score is None
    return drawn.sample.outcome


def test_calls_that_append_are_turns_of_one_sequence(tmp_path: Path) -> None:
    drawn = run_program(THREE, said("one", "two", "three"), tmp_path, n=4)
    drawn.audit()
    for sample in drawn.samples:
        assert len(sample.sequences) == 1
        assert [turn.text for turn in sample.trajectory.turns] == ["one", "two", "three"]
        assert [[m["content"] for m in t.observed] for t in sample.trajectory.turns] == [
            ["go on 0"],
            ["go on 1"],
            [],
        ]
        assert sample.trajectory.counts["model_calls"] == 3
        assert (
            sample.trajectory.counts["prompt_tokens"]
            == sample.trajectory.counts["unique_prompt_tokens"]
        )
        assert sample.completion.prompt_ids is not None
    assert not any((tmp_path / "programs").iterdir())


def test_a_run_directory_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_program(THREE, said("one"), Path()).sample.score == 1


def test_a_program_that_begins_with_the_rows_prompt_goes_on_from_its_tokens(tmp_path: Path) -> None:
    drawn = run_program(CLIENT + "ask(row['prompt'])", said("one"), tmp_path)
    drawn.audit()
    assert drawn.sample.completion.prompt_ids is None


def test_what_a_program_gets_of_the_row_and_leaves_is_json(tmp_path: Path) -> None:
    source = (
        CLIENT
        + """
ask(messages)
assert json.load(open(os.environ["DOVETAIL_ROW_FILE"])) == row
with open(os.environ["DOVETAIL_OUTPUT_FILE"], "w") as file:
    json.dump({"row": row, "here": os.listdir(), "key": os.environ.get("WANDB_API_KEY")}, file)
"""
    )
    drawn = run_program(
        source, said("one"), tmp_path,
        environment={"WANDB_API_KEY": None}, ground_truth="42", extra_info={"level": 3}, data_source="sums",
    )  # fmt: skip
    output = drawn.sample.trajectory.output
    assert output["row"] == {
        "prompt": [{"role": "user", "content": "question"}],
        "data_source": "sums",
        "extra_info": {"level": 3},
        "index": 0,
    }
    assert sorted(output["here"]) == ["output.json", "program.log", "row.json"]
    assert output["key"] is None


@pytest.mark.parametrize(
    ("score", "end", "rewards"),
    [
        ("output", "print(0.5, file=open(os.environ['DOVETAIL_OUTPUT_FILE'], 'w'))", [0.0, 0.5]),
        (
            "output",
            "json.dump({'reward': -1, 'why': 'x'}, open(os.environ['DOVETAIL_OUTPUT_FILE'], 'w'))",
            [0.0, -1.0],
        ),
        ("exit_status", "", [0.0, 1.0]),
        ("exit_status", "sys.exit(3)", [0.0, 0.0]),
        ("reward", "", [0.0, 0.0]),
    ],
)
def test_a_program_can_score_itself_on_its_last_turn(
    tmp_path: Path, score: str, end: str, rewards: list[float]
) -> None:
    source = CLIENT + "messages.append(ask(messages)); ask([*messages, row['prompt'][0]])\n" + end
    drawn = run_program(source, said("one", "two"), tmp_path, score=score)
    assert drawn.sample.score == 1
    assert list(drawn.sample.trajectory.turn_rewards) == rewards


@pytest.mark.parametrize(
    ("source", "settings", "kind", "says"),
    [
        ("sys.exit('no luck')", {}, FailureKind.ENVIRONMENT, "with status 1: no luck"),
        ("os.kill(os.getpid(), 9)", {}, FailureKind.ENVIRONMENT, "by signal 9"),
        ("os.kill(os.getpid(), 9)", {"score": "exit_status"}, FailureKind.ENVIRONMENT, "by signal 9"),
        ("time.sleep(60)", {"program_seconds": 0.3}, FailureKind.LIMIT, "longer than 0.3 s"),
        ("time.sleep(60)", {"max_seconds": 1.0}, FailureKind.LIMIT, "longer than 1 s"),
        ("while True: print('x' * 1000)", {"max_output_bytes": 5000}, FailureKind.LIMIT, "max_output_bytes"),
        ("open(os.environ['DOVETAIL_OUTPUT_FILE'], 'w').write('x' * 6000)", {"max_output_bytes": 5000}, FailureKind.LIMIT, "max_output_bytes"),
        ("os.mkfifo(os.environ['DOVETAIL_OUTPUT_FILE'])", {}, FailureKind.ENVIRONMENT, "is not a regular file"),
        ("os.symlink('/etc/passwd', os.environ['DOVETAIL_OUTPUT_FILE'])", {}, FailureKind.ENVIRONMENT, "can't be read"),
        ("[os.fork() for _ in range(5)]; time.sleep(60)", {"max_processes": 20}, FailureKind.LIMIT, "max_processes"),
        ("ask(messages, model='gpt-4o')", {}, FailureKind.ENVIRONMENT, "'gpt-4o' does not exist"),
        ("", {"score": "output"}, FailureKind.ENVIRONMENT, "program's output file"),
        ("print('{\"reward\": NaN}', file=open(os.environ['DOVETAIL_OUTPUT_FILE'], 'w'))", {"score": "output"}, FailureKind.ENVIRONMENT, "reward"),
    ],
)  # fmt: skip
def test_a_program_that_fails_has_a_cause_and_no_score(
    tmp_path: Path, source: str, settings: dict[str, Any], kind: FailureKind, says: str
) -> None:
    began = time.monotonic()
    drawn = run_program(CLIENT + "ask(messages)\n" + source, said("one"), tmp_path, **settings)
    failure = failure_of(drawn)
    assert failure.kind is kind
    assert says in failure.message
    assert time.monotonic() - began < 20
    (folder,) = (tmp_path / "programs").iterdir()
    assert {p.name for p in folder.iterdir()} <= {"row.json", "program.log", "output.json"}
    assert sum(p.stat().st_size for p in folder.iterdir()) < 20_000


def test_a_program_that_asks_nothing_fails(tmp_path: Path) -> None:
    assert "without a turn" in failure_of(run_program("", said("one"), tmp_path)).message


def test_a_program_that_ignores_the_refusal_of_a_model_has_no_score_either(tmp_path: Path) -> None:
    source = CLIENT + "ask(messages)\ntry: ask(messages, model='gpt-4o')\nexcept Exception: pass"
    assert failure_of(run_program(source, said("one"), tmp_path)).kind is FailureKind.ENVIRONMENT
    drawn = run_program(source, said("one"), tmp_path, models=("policy", "gpt-4o"))
    assert drawn.sample.score == 1
    assert run_program(source, said("one"), tmp_path, models=("*",)).sample.score == 1


def test_a_flood_of_calls_fails_its_episode(tmp_path: Path) -> None:
    source = (
        CLIENT
        + """
import threading
threads = [threading.Thread(target=ask, args=(messages,)) for _ in range(40)]
[t.start() for t in threads]
[t.join() for t in threads]
"""
    )
    drawn = run_program(source, said("one"), tmp_path, max_pending_calls=8, delay=0.5)
    failure = failure_of(drawn)
    assert failure.kind is FailureKind.LIMIT
    assert "max_pending_calls" in failure.message
    assert drawn.counts()["refused_calls/too_many_calls"] >= 1


def test_parallel_calls_are_sequences_of_their_own(tmp_path: Path) -> None:
    source = (
        CLIENT
        + """
from concurrent.futures import ThreadPoolExecutor
messages.append(ask(messages))
asked = [[*messages, {"role": "user", "content": f"part {i}"}] for i in range(3)]
with ThreadPoolExecutor() as pool:
    answers = list(pool.map(ask, asked))
for one, answer in zip(asked, answers):
    ask([*one, answer, {"role": "user", "content": "sum up"}])
"""
    )
    drawn = run_program(source, said("one", "two", "three"), tmp_path, delay=0.3)
    drawn.audit()
    assert len(drawn.sample.sequences) == 3
    counts = drawn.counts()
    assert counts["model_calls"] == 7
    assert counts["further_sequences/parallel"] == 2
    assert counts["unique_prompt_tokens"] < counts["prompt_tokens"]


def test_at_the_limit_on_turns_further_calls_are_refused_and_the_episode_is_scored(
    tmp_path: Path,
) -> None:
    source = THREE + "\nassert False"
    drawn = run_program(source, said("one", "two", "three"), tmp_path, max_turns=2)
    assert drawn.sample.score == 1
    assert drawn.sample.trajectory.end is EpisodeEnd.TURNS
    assert drawn.counts()["refused_calls/episode_ended"] == 1


def test_at_the_limit_on_tokens_the_episode_is_scored(tmp_path: Path) -> None:
    drawn = run_program(THREE, said("one " * 20), tmp_path, tokens=130)
    drawn.audit()
    assert drawn.sample.score == 1
    assert drawn.sample.trajectory.end is EpisodeEnd.TOKENS


def test_a_program_that_goes_on_after_its_limit_is_ended_soon(tmp_path: Path) -> None:
    source = THREE.replace("ask(messages)", "ask(messages) if number < 2 else time.sleep(60)")
    source = CLIENT + "ask(messages)\ntry: ask(messages)\nexcept Exception: time.sleep(60)"
    began = time.monotonic()
    drawn = run_program(source, said("one"), tmp_path, max_turns=1)
    assert drawn.sample.score == 1
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("unknown_turns", ["fork", "fail"])
def test_history_that_was_never_returned_begins_a_sequence_and_is_counted(
    tmp_path: Path, unknown_turns: str
) -> None:
    source = (
        CLIENT
        + """
ask(messages)
ask([*messages, {"role": "assistant", "content": "made up"}, {"role": "user", "content": "and?"}])
"""
    )
    drawn = run_program(source, said("one"), tmp_path, unknown_turns=unknown_turns)
    assert drawn.counts()["unknown_turns"] == 1
    if unknown_turns == "fail":
        assert failure_of(drawn).kind is FailureKind.ENVIRONMENT
        return
    drawn.audit()
    assert drawn.counts()["further_sequences/unknown_turn"] == 1
    assert len(drawn.sample.sequences) == 2
    assert drawn.sample.text == "one\none"


def test_the_time_in_which_the_policy_answers_is_not_the_programs(tmp_path: Path) -> None:
    drawn = run_program(
        CLIENT + "ask(messages)", said("one"), tmp_path, program_seconds=2.0, delay=3.0
    )
    assert drawn.sample.score == 1


def test_no_child_of_a_program_outlives_it(tmp_path: Path) -> None:
    source = (
        CLIENT
        + """
import subprocess
ask(messages)
subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); os.fork(); time.sleep(300)"], start_new_session=True)
time.sleep(0.5)
"""
    )
    drawn = run_program(source, said("one"), tmp_path)
    assert drawn.sample.score == 1
    lines = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
    left = [line for line in lines if b"time.sleep(300)" in line]
    assert not left


def test_a_program_ends_where_its_run_is_killed(tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text("import os, time\nos.fork()\ntime.sleep(299)")
    run = """
import asyncio, os, sys
from dovetail_gateway.program import ProgramRun, run_program

async def main():
    command = [sys.executable, "-S", "agent.py"]
    run = ProgramRun(command, os.getcwd(), {}, max_bytes=1 << 20, max_processes=10)
    await run_program(run, asyncio.Event())

asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", run], cwd=tmp_path)

    def programs() -> int:
        count = 0
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                here = (place / "cwd").readlink() == tmp_path
                count += here and b"\0agent.py\0" in (place / "cmdline").read_bytes()
        return count

    try:
        assert _soon(lambda: programs() == 2)
    finally:
        process.kill()
        process.wait()
    assert _soon(lambda: programs() == 0)


def _soon(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
    return condition()


def test_programs_beyond_the_concurrency_wait_for_a_place(tmp_path: Path) -> None:
    source = (
        CLIENT
        + """
began = time.time()
ask(messages)
time.sleep(0.3)
json.dump([began, time.time()], open(os.environ["DOVETAIL_OUTPUT_FILE"], "w"))
"""
    )
    drawn = run_program(source, said("one"), tmp_path, n=4, concurrency=1)
    spans = sorted(sample.trajectory.output for sample in drawn.samples)
    assert all(first[1] <= second[0] for first, second in pairwise(spans))


def test_a_command_that_names_no_program_is_refused_at_the_start() -> None:
    loop = ProgramLoop(
        config_of(command="no-such-program --x"),
        PluginContext(tokenizer=template_tokenizer(CHATML)),
    )
    with pytest.raises(ConfigError, match="no-such-program"):
        loop.start()
    loop.close()


def test_a_port_that_is_taken_is_refused_at_the_start_and_free_again_after_the_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        context = PluginContext(tokenizer=template_tokenizer(CHATML))
        loop = ProgramLoop(config_of(port=port), context)
        with pytest.raises(DovetailError, match=f"127.0.0.1:{port}.*in use"):
            loop.start()
        loop.close()
    for _ in range(2):
        loop.start()
        loop.close()


@pytest.mark.parametrize("episodes", [24, pytest.param(500, marks=pytest.mark.nightly)])
def test_many_episodes_leave_no_process_descriptor_or_session_behind(
    tmp_path: Path, episodes: int
) -> None:
    run_program(THREE, said("one"), tmp_path)
    before = resources()
    drawn = run_program(THREE, said("one"), tmp_path, n=episodes, concurrency=8)
    assert all(sample.score == 1 for sample in drawn.samples)
    assert all(now <= then for now, then in zip(resources(), before, strict=True))
    assert not list((tmp_path / "programs").iterdir())
