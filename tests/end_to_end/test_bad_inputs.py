"""What `dovetail` answers to bad inputs: exit code and message, as bad_inputs/messages.txt records them.

A case is a line `$ dovetail …` of that file; `make messages` writes what is printed today below each.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load, save

from dovetail.cli.main import main

HERE = Path(__file__).parent / "bad_inputs"
MESSAGES = HERE / "messages.txt"
COMMAND, ANSWER = "$ dovetail ", "    "
DAMAGED = ("tr", "em", "mg", "nl", "ce", "mb")
ROW = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "3"}}


def recorded() -> dict[str, str]:
    """Answers by command, in the file's order."""
    cases: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in MESSAGES.read_text(encoding="utf-8").splitlines():
        if line.startswith(COMMAND):
            lines = cases[line.removeprefix(COMMAND)] = []
        elif line.startswith(ANSWER):
            lines.append(line.removeprefix(ANSWER))
    return {command: "\n".join(answer) for command, answer in cases.items()}


def record(answers: dict[str, str]) -> None:
    """Put answers below their commands; the file's other lines, and answers that are not given, stay."""
    written: list[str] = []
    given = False
    for line in MESSAGES.read_text(encoding="utf-8").splitlines():
        if line.startswith(COMMAND):
            command = line.removeprefix(COMMAND)
            given = command in answers
            written += [line, *(ANSWER + shown for shown in answers.get(command, "").splitlines())]
        elif not (given and line.startswith(ANSWER)):
            written.append(line)
    MESSAGES.write_text("\n".join(written) + "\n", encoding="utf-8")


CASES = recorded()


@pytest.fixture(scope="module")
def folder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the commands name."""
    folder = tmp_path_factory.mktemp("bad_inputs")
    (folder / "dir.yaml").mkdir()
    (folder / "emptydir").mkdir()
    files: dict[str, Any] = yaml.safe_load((HERE / "inputs.yaml").read_text(encoding="utf-8"))
    for name, content in files.items():
        text = content if isinstance(content, str) else jsonl(content * 5)
        (folder / name).write_text(text, encoding="utf-8")
    for name, count in (("train", 12), ("val", 4)):
        rows = pa.Table.from_pylist([{"prompt": f"{n}+1=", **ROW} for n in range(count)])
        pq.write_table(rows, folder / f"{name}.parquet")
    whole = (folder / "train.parquet").read_bytes()
    for name, data in {
        "bin.yaml": bytes(range(128, 256)),
        "utf16.yaml": "project: d".encode("utf-16"),
        "latin.yaml": "project: café\n".encode("latin-1"),
        "bom.yaml": (folder / "base.yaml").read_text().encode("utf-8-sig"),
        "deep.yaml": b"{a: " * 2000 + b"1" + b"}" * 2000,
        "long.jsonl": jsonl([{"prompt": "1+" * 400, **ROW}]).encode(),
        "empty.parquet": b"",
        "bin.parquet": bytes(range(256)),
        "trunc.parquet": whole[: len(whole) // 2],
        "flip.parquet": whole[:20] + bytes(255 - byte for byte in whole[20:60]) + whole[60:],
    }.items():
        (folder / name).write_bytes(data)
    write_models(folder, tiny)
    write_runs(folder)
    return folder


def jsonl(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_models(folder: Path, tiny: Path) -> None:
    """Copies of the tiny model, short of context; the others lack a file or hold a bad one."""
    config = json.loads((tiny / "config.json").read_text()) | {"max_position_embeddings": 1024}
    weights = (tiny / "model.safetensors").read_bytes()
    nan = {name: torch.full_like(tensor, torch.nan) for name, tensor in load(weights).items()}
    for name, changes in {
        "model": {},
        "m_trunc": {"model.safetensors": weights[: len(weights) // 2]},
        "m_noweights": {"model.safetensors": None},
        "m_noconf": {"config.json": None},
        "m_badconf": {"config.json": b"{"},
        "m_shape": {"config.json": json.dumps({**config, "intermediate_size": 48}).encode()},
        "m_type": {"config.json": json.dumps({**config, "model_type": "nosuch"}).encode()},
        "m_notok": {"tokenizer.json": None, "tokenizer_config.json": None},
        "m_badtok": {"tokenizer.json": b"{"},
        "m_notempl": {"chat_template.jinja": None},
        "m_badtempl": {"chat_template.jinja": b"{% for x"},
        "m_nan": {"model.safetensors": save(nan)},
    }.items():
        shutil.copytree(tiny, folder / name)
        for file, data in {"config.json": json.dumps(config).encode(), **changes}.items():
            if data is None:
                (folder / name / file).unlink()
            else:
                (folder / name / file).write_bytes(data)


def write_runs(folder: Path) -> None:
    """A run of two steps, and copies of it that were damaged."""
    with contextlib.chdir(folder):
        done = CliRunner().invoke(main, ["train", "base.yaml", "experiment=one"])
    assert done.exit_code == 0, done.output
    one = folder / "runs" / "d" / "one"
    runs = {name: Path(shutil.copytree(one, one.with_name(name))) for name in DAMAGED}
    for weights in runs["tr"].glob("checkpoints/step_*/actor/weights/*.safetensors"):
        os.truncate(weights, 1000)
    for manifest in runs["em"].glob("checkpoints/step_*/manifest.json"):
        manifest.write_text(manifest.read_text().replace('"sha256": "', '"sha256": "0'))
    for manifest in runs["mg"].glob("checkpoints/step_*/manifest.json"):
        manifest.write_text("{\n")
    (runs["nl"] / "checkpoints" / "latest").unlink()
    config = runs["ce"] / "config.yaml"
    config.write_text("oops: 1\n" + config.read_text())
    with (runs["mb"] / "metrics.jsonl").open("ab") as metrics:
        metrics.write(bytes(range(128, 256)))


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """What was printed, by command; recorded with `--update-messages`."""
    answers: dict[str, str] = {}
    yield answers
    if request.config.getoption("--update-messages"):
        record(answers)


def answer_to(command: str, folder: Path) -> str:
    """Exit code and stderr, or where a command fails without a word there, stdout; without what differs between machines."""
    # No table is as wide as this, so that the width of a time moves no line break.
    settings = {"COLUMNS": "1000", "NO_COLOR": "1"}
    done = CliRunner().invoke(main, shlex.split(command), env=settings, prog_name="dovetail")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return f"traceback of {done.exception!r}"
    shown = done.stderr or (done.stdout if done.exit_code else "")
    shown = re.sub(r"[\d.]+ (µs|ms|s)\b( \(row \d+\))?", "TIME", shown.replace(str(folder), "DIR"))
    shown = re.sub(r"(?<=\S) {2,}", "  ", shown)
    lines = [line.rstrip() for line in shown.splitlines() if line.strip()]
    return "\n".join([f"exit {done.exit_code}", *lines])


@pytest.mark.parametrize("command", CASES)
def test_the_answer_to_a_bad_input_is_the_recorded_one(
    command: str,
    folder: Path,
    answers: dict[str, str],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    handlers = logging.getLogger().handlers.copy()
    answers[command] = answer_to(command, folder)
    assert logging.getLogger().handlers == handlers
    if not request.config.getoption("--update-messages"):
        assert answers[command] == CASES[command], "where the new answer is right: make messages"


def test_nothing_that_is_printed_is_a_traceback() -> None:
    assert not [command for command, answer in CASES.items() if "traceback" in answer.lower()]
