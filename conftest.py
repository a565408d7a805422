"""Settings of every test run: hypothesis draws the same examples each time, and new ones in `make nightly`."""

from __future__ import annotations

import atexit
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from dovetail.interfaces import Finding, Sample

# Tests run beside each other, and threads that share a core wait for one another at every operation of a tiny model. Read
# when torch is imported, which is later; processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# vLLM would bind the threads of every engine to the same cores.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# Models are written by the tests that need them. Where there is no network, asking the hub for one that is not there takes a minute.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Half of the time of a run on a tiny model; tests of the report take this away again.
os.environ.setdefault("DOVETAIL_SKIP_OBSERVERS", "report")

# Tests read no tokens that another run made.
os.environ["DOVETAIL_CACHE"] = tempfile.mkdtemp(prefix="dovetail-tests-")
atexit.register(shutil.rmtree, os.environ["DOVETAIL_CACHE"], ignore_errors=True)

# Python writes the stacks of all threads when a process is aborted, as `abort_commands` does.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")

# No test asks a clock: on a busy machine a deadline would.
# A quarter of hypothesis' examples where a test does not say how many; the nightly run draws all.
settings.register_profile("steady", derandomize=True, deadline=None, max_examples=25)
settings.register_profile("random", derandomize=False, print_blob=True, deadline=None)
settings.load_profile(os.environ.get("DOVETAIL_HYPOTHESIS", "steady"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option of `make messages`."""
    parser.addoption(
        "--update-messages", action="store_true", help="record what commands answer to bad inputs"
    )


APART = ("ray", "vllm", "sglang", "trackers", "proofs", "trl", "verl")
"""Marks of tests that a target of the Makefile runs apart from the others."""


def starts_ray(path: Path) -> bool:
    """Whether the tests in it start Ray clusters, by its name."""
    return "ray" in path.stem.split("_") or "runtime_ray" in path.parts


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m ray`, `-m vllm` and such, and `-m "not ray …"`, import no file without such a test: importing all takes longer than most of them run."""
    if not collection_path.name.startswith("test_"):
        return None
    wanted = re.sub(r"\(.*?\)", "", config.getoption("markexpr"))
    if " or " in wanted:
        return None  # for the marks themselves to say
    parts = [part.strip() for part in wanted.split(" and ")]
    by_name = starts_ray(collection_path)
    if by_name and "not ray" in parts:
        return True
    marks = [mark for mark in APART if mark in parts and not (by_name and mark == "ray")]
    text = collection_path.read_text() if marks else ""
    return True if any(f"mark.{mark}" not in text for mark in marks) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what is imported and collected out of garbage collections: it lives to the end, and each pass over it takes half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts a Ray cluster: one at a time, since each starts a dozen processes, and Ray gives up on those that take long."""
    for item in items:
        if starts_ray(Path(item.path)):
            item.add_marker(pytest.mark.ray)


def abort_commands(test: str) -> None:
    """Name the commands that a test has started and that still run, and abort them, so that Python ones write their stacks."""
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline())
            os.write(2, f"{test}: aborted after the time limit: {process.pid} {command}\n".encode())
            process.send_signal(signal.SIGABRT)
        except psutil.NoSuchProcess:
            continue


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Abort a test's commands shortly before the test itself is ended, which kills them without a word."""
    mark = item.get_closest_marker("timeout")
    limit = float(
        (mark.args and mark.args[0] if mark else None)
        or item.config.getoption("timeout")
        or item.config.getini("timeout")
        or 0
    )
    timer = threading.Timer(0.8 * limit, abort_commands, [item.nodeid])
    timer.daemon = True
    if limit:
        timer.start()
    try:
        return (yield)
    finally:
        timer.cancel()


@pytest.fixture
def judge() -> Callable[..., list[Finding]]:
    """What a preflight rule says of a config made of sections (a model is added) and overrides, for so many prompts."""
    from dovetail.plugins.rules import installed_rules
    from dovetail_sdk.testing import findings_of

    rules = {rule.name: rule.check for rule in installed_rules()}

    def judge(
        rule: str, sections: Mapping[str, Any], *overrides: str, prompts: int | None = 1280
    ) -> list[Finding]:
        return findings_of(rules[rule], *overrides, sections=sections, prompts=prompts)

    return judge


@pytest.fixture(scope="session")
def make_sample() -> Callable[..., Sample]:
    """A function that makes a sample of a group; a score of None is a failure to score it."""
    import numpy as np

    from dovetail.interfaces import (
        Completion,
        Failure,
        FailureKind,
        FinishReason,
        Prompt,
        Sample,
        Score,
    )

    def make(
        group: int, number: int = 0, score: float | None = 0.0, *, length: int = 3, epoch: int = 0
    ) -> Sample:
        name = f"train.e{epoch}.p{group}.a0"
        failure = Failure(kind=FailureKind.TIMEOUT, message="too slow")
        return Sample(
            sample_id=f"{name}.s{number}",
            prompt=Prompt(index=group, prompt_ids=np.arange(2), raw=f"prompt {group}", epoch=epoch),
            group=group,
            completion=Completion(
                request_id=name,
                sample=number,
                response_ids=np.arange(length),
                finish_reason=FinishReason.STOP,
                weight_versions=np.zeros(length, dtype=np.int64),
            ),
            text=f"response {number}",
            outcome=failure if score is None else Score(value=score),
        )

    return make


@pytest.fixture(scope="session")
def trl_templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The chat templates in TRL's wheel, by name: 41 of models, and 31 for training."""
    folder = tmp_path_factory.mktemp("trl")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command = [*pip, "--dest", str(folder), "trl==1.16.0"]
    if subprocess.run(command, capture_output=True, check=False).returncode:  # noqa: S603 - its own arguments
        pytest.skip("no package index: pip download trl==1.16.0 failed")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".jinja")]
        found = {Path(name).stem: archive.read(name).decode() for name in names}
    assert len(found) == 41 + 31
    return found
