"""Commands with programs that talk to an API: `generate` and `eval` run them, `serve` answers them, and a policy learns in them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result

import dovetail
from dovetail.telemetry import read_rows

AGENT = """
import json, os, urllib.request
row = json.loads(os.environ["DOVETAIL_ROW"])
body = json.dumps({"model": "policy", "messages": row["prompt"]}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
answer = json.load(urllib.request.urlopen(request))
with open(os.environ["DOVETAIL_OUTPUT_FILE"], "w") as file:
    json.dump({"reward": 0.5, "said": answer["choices"][0]["message"]["content"]}, file)
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    """The agent loop of a program that asks once and gives itself half a point."""
    script = tmp_path / "agent.py"
    script.write_text(AGENT)
    command = f"{sys.executable} -S {script}"
    return (
        f"rollout.agent_loop={{name: program, command: '{command}', score: output, concurrency: 2}}"
    )


def test_generate_and_eval_run_programs_with_any_checkpoint(
    config: Path, finished: Path, tmp_path: Path, program: str, inside: Callable[..., Result]
) -> None:
    out = tmp_path / "out.jsonl"
    inside(
        "generate", str(finished), "--prompt", "one", "--prompt", "two", "--out", str(out), program
    )
    for row in read_rows(out):
        (response,) = row["responses"]
        assert response["trajectory"]["output"]["reward"] == 0.5
        assert response["tokens"] > 0
    samples = tmp_path / "samples.jsonl"
    inside("eval", str(finished), program, "reward.function=episode", "--samples", str(samples))
    assert {row["score"] for row in read_rows(samples)} == {0.5}


@pytest.fixture
def served(finished: Path) -> Iterator[dict[str, str]]:
    """What `dovetail serve` tells to export; Ctrl-C ends it, without an error."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dovetail", "serve", str(finished), "data.max_response_length=100", "--key", "sk-mine"],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
        # A shell has background commands ignore it, and so what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no other thread is in the way
    )  # fmt: skip
    assert process.stdout is not None
    found: dict[str, str] = {}
    for line in process.stdout:
        if line.startswith("export "):
            name, _, value = line.removeprefix("export ").strip().partition("=")
            found[name] = value
        if len(found) == 4:
            break
    yield found
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 0


def test_serve_answers_conversations_until_it_is_interrupted(served: dict[str, str]) -> None:
    assert served["OPENAI_API_KEY"] == served["ANTHROPIC_API_KEY"] == "sk-mine"

    def ask(messages: list[dict[str, str]]) -> Any:
        body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 8}).encode()
        request = urllib.request.Request(
            f"{served['OPENAI_BASE_URL']}/chat/completions",
            body,
            {"authorization": "Bearer sk-mine"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    first, other = ([{"role": "user", "content": text}] for text in ("one", "two"))
    answer, _ = ask(first), ask(other)
    longer = [*first, answer["choices"][0]["message"], {"role": "user", "content": "more"}]
    assert ask(longer)["usage"]["prompt_tokens"] > answer["usage"]["total_tokens"]


@pytest.mark.proofs
@pytest.mark.timeout(3600)
def test_the_program_of_the_page_raises_its_reward_on_the_demos_model(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: Callable[..., Result]
) -> None:
    pytest.importorskip("openai", reason="not installed here; `make proofs` has it")
    monkeypatch.chdir(tmp_path)
    inside("demo", "trainer.total_steps=1", "trainer.validate_every=0")
    page = (root / "docs" / "programs.md").read_text()
    program = re.search(r"```python\n(# agent.py\n.*?)```", page, re.DOTALL)
    settings = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert program is not None
    assert settings is not None
    Path("agent.py").write_text(program[1])
    shown = yaml.safe_load(settings[1].replace(".venv-agent/bin/python", sys.executable))
    config = yaml.safe_load(Path("demo/seed_1/config.yaml").read_text())
    for section, values in shown.items():
        config[section] = {**config[section], **values}
    config["trainer"] |= {"validate_before": False, "validate_after": False}
    config["experiment"] = "agent"
    run = Path(dovetail.train(config)["directory"])
    rows = [row for row in read_rows(run / "metrics.jsonl") if "reward/mean" in row]
    rewards = [row["reward/mean"] for row in rows]
    sys.stdout.write(f"rewards: {' '.join(f'{reward:.3f}' for reward in rewards)}\n")
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.15
    assert all(row["episode/sequences/mean"] == 1 for row in rows)
    assert not any(row["reward/failures"] for row in rows)
    assert not any((run / "programs").iterdir())
