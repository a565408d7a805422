"""Checkpoints are whole or not there, whatever happens to the process or the disk."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dovetail.checkpoint.store import CheckpointStore
from dovetail.errors import CheckpointError, StopRequested, WorkerError, causes


def writer(text: str = "weights"):
    def write(directory: Path) -> None:
        (directory / "actor").mkdir()
        (directory / "actor" / "model.bin").write_text(text)
        (directory / "state.json").write_text('{"step": 1}')

    return write


def hidden(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob(".*"))


def test_a_saved_checkpoint_is_the_latest_and_verifies(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.latest() is None
    assert not store.has(20)
    path = store.save(20, writer())
    assert path == tmp_path / "checkpoints" / "step_20"
    assert (path / "actor" / "model.bin").read_text() == "weights"
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_20\n"
    assert store.has(20)
    assert CheckpointStore(tmp_path / "checkpoints").latest() == path
    manifest = store.verify(path)
    assert manifest.step == 20
    assert manifest.files["actor/model.bin"].size == 7
    assert manifest.total_bytes == 7 + 11
    assert json.loads((path / "manifest.json").read_text())["schema"] == 1


def test_the_latest_is_the_one_saved_last_not_the_highest_step(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    store.save(40, writer())
    store.save(20, writer())
    assert store.latest() == tmp_path / "step_20"
    store.save(30, writer())
    assert [path.name for path in store.saved()] == ["step_20", "step_30"]


def test_only_the_newest_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (2, 10, 9, 11):
        store.save(step, writer())
    assert [path.name for path in store.saved()] == ["step_9", "step_11"]
    assert hidden(tmp_path) == []
    with pytest.raises(CheckpointError, match=r"keep=0 would.*no checkpoint"):
        CheckpointStore(tmp_path, keep=0)


def test_steps_that_are_kept_for_good_and_the_best_one_outlive_newer_ones(tmp_path):
    store = CheckpointStore(tmp_path, keep=2, every=4)
    for step in range(1, 11):
        store.save(step, lambda directory: (directory / "x").write_text("x"))
        if step == 3:
            store.mark_best(3, 1.0)
    assert [path.name for path in store.saved()] == [f"step_{step}" for step in (3, 4, 8, 9, 10)]
    assert store.retire(1) == ["step_9"]


def test_saving_a_step_again_replaces_it(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(5, writer("old"))
    path = store.save(5, writer("new"))
    assert (path / "actor" / "model.bin").read_text() == "new"
    assert len(store.saved()) == 1
    store.verify(path)
    assert hidden(tmp_path) == []


def damage_bytes(path: Path) -> None:
    (path / "actor" / "model.bin").write_text("Weights")


def damage_size(path: Path) -> None:
    (path / "actor" / "model.bin").write_text("weight")


def damage_missing(path: Path) -> None:
    (path / "actor" / "model.bin").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_bytes, "actor/model.bin does not have the contents"),
        (damage_size, "actor/model.bin has 6 bytes instead of 7"),
        (damage_missing, "actor/model.bin is missing"),
    ],
)
def test_verify_names_the_damaged_file_and_the_other_checkpoints(tmp_path, damage, message):
    store = CheckpointStore(tmp_path)
    store.save(1, writer())
    path = store.save(2, writer())
    damage(path)
    with pytest.raises(CheckpointError) as caught:
        store.verify(path)
    assert message in str(caught.value)
    assert "state.json" not in str(caught.value)
    assert f"to go back to step_1, remove the damaged checkpoint (rm -r {path})" in str(
        caught.value
    )


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1, "files": {"a": 3}}'])
def test_a_damaged_manifest_is_reported_and_never_passed_over_silently(tmp_path, text):
    store = CheckpointStore(tmp_path)
    store.save(1, writer())
    path = store.save(2, writer())
    (path / "manifest.json").write_text(text)
    again = CheckpointStore(tmp_path)
    assert again.latest() == path
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged") as caught:
        again.verify(path)
    assert f"to go back to step_1, remove the damaged checkpoint (rm -r {path})" in str(
        caught.value
    )
    shutil.rmtree(path)
    assert CheckpointStore(tmp_path).latest() == tmp_path / "step_1"


def test_a_damaged_checkpoint_alone_names_none_to_go_back_to(tmp_path):
    store = CheckpointStore(tmp_path)
    for path in (store.save(1, writer()), store.save(2, writer())):
        (path / "manifest.json").write_text("")
    with pytest.raises(CheckpointError, match="other checkpoint"):
        store.verify(path)


def test_a_checkpoint_without_manifest_or_of_another_schema_is_refused(tmp_path):
    store = CheckpointStore(tmp_path)
    path = store.save(2, writer())
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"schema": 7}))
    with pytest.raises(CheckpointError, match=r"schema 7, but.*reads 1"):
        store.verify(path)
    (path / "manifest.json").unlink()
    assert CheckpointStore(tmp_path).latest() == path
    with pytest.raises(CheckpointError, match=r"it has no manifest\.json"):
        store.verify(path)


@pytest.mark.parametrize("error", [ValueError("boom"), StopRequested("stop"), KeyboardInterrupt()])
def test_what_the_writer_raises_passes_through_and_leaves_nothing(tmp_path, error):
    store = CheckpointStore(tmp_path)
    before = store.save(1, writer())

    def write(directory: Path) -> None:
        writer()(directory)
        raise error

    with pytest.raises(type(error)):
        store.save(2, write)
    assert hidden(tmp_path) == []
    assert store.latest() == before
    store.verify(before)


def test_a_failing_save_of_the_same_step_leaves_the_earlier_one(tmp_path):
    store = CheckpointStore(tmp_path)
    path = store.save(1, writer("old"))

    def write(directory: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(directory))

    with pytest.raises(CheckpointError, match=r"checkpoint of step 1: .*Permission"):
        store.save(1, write)
    assert (path / "actor" / "model.bin").read_text() == "old"
    store.verify(path)


def test_links_and_empty_checkpoints_are_refused(tmp_path):
    store = CheckpointStore(tmp_path / "store")
    with pytest.raises(CheckpointError, match="step 1 has no files"):
        store.save(1, lambda directory: None)
    with pytest.raises(CheckpointError, match="plain file"):
        store.save(1, lambda directory: (directory / "model").symlink_to(tmp_path))
    with pytest.raises(CheckpointError, match=r"manifest\.json at the top"):
        store.save(1, lambda directory: (directory / "manifest.json").write_text(""))
    assert store.latest() is None


def torch_style_error(directory: Path) -> None:
    try:
        raise OSError(errno.ENOSPC, "No space left on device")
    except OSError as error:
        raise RuntimeError("PytorchStreamWriter failed writing file data/0") from error


def plain_error(directory: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def text_only_error(directory: Path) -> None:
    raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")


def error_of_an_engine(directory: Path) -> None:
    try:
        plain_error(directory)
    except OSError as error:
        raise CheckpointError("the training state can't be written") from error


@pytest.mark.parametrize(
    "fail", [torch_style_error, plain_error, text_only_error, error_of_an_engine]
)
@pytest.mark.parametrize("step", [1, 2])
def test_a_full_disk_says_how_much_was_needed_and_keeps_the_previous_one(tmp_path, fail, step):
    store = CheckpointStore(tmp_path)
    before = store.save(1, writer("x" * 3000))

    def write(directory: Path) -> None:
        (directory / "model.bin").write_bytes(b"0" * 2000)
        fail(directory)

    with pytest.raises(CheckpointError) as caught:
        store.save(step, write)
    message = str(caught.value)
    assert f"the disk is full: the checkpoint of step {step} needs about 3." in message
    assert "are free in" in message
    assert "step_1 is intact" in message
    assert "keep fewer checkpoints" in message
    assert hidden(tmp_path) == []
    assert store.latest() == before
    store.verify(before)


def raised_again(*errors: Exception) -> Exception:
    """The first of errors of which each is the cause of the one before it, and the first that of the last."""
    for error, cause in zip(errors, [*errors[1:], errors[0]], strict=True):
        error.__cause__ = cause
    return errors[0]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("errors", [1, 2, 3])
def test_errors_that_are_each_others_cause_pass_through(tmp_path, errors):
    # A rank's loss, which the watch over the ranks keeps and the step raises from it, is such a pair.
    lost = raised_again(*(WorkerError(f"rank {rank} is lost") for rank in range(errors)))

    def write(directory: Path) -> None:
        raise lost

    with pytest.raises(WorkerError) as caught:
        CheckpointStore(tmp_path).save(1, write)
    assert caught.value is lost
    assert len(list(causes(lost))) == errors


def test_a_full_disk_is_found_behind_errors_that_are_each_others_cause(tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device")

    def write(directory: Path) -> None:
        raise raised_again(RuntimeError("a"), full, RuntimeError("b"))

    with pytest.raises(CheckpointError, match="disk is full"):
        CheckpointStore(tmp_path).save(1, write)


def test_a_full_disk_at_the_first_save_tells_what_was_written(tmp_path):
    def write(directory: Path) -> None:
        (directory / "model.bin").write_bytes(b"0" * 2048)
        plain_error(directory)

    with pytest.raises(CheckpointError, match=r"more than the 2\.0 KiB written before"):
        CheckpointStore(tmp_path).save(1, write)
    assert list(tmp_path.iterdir()) == []


def test_of_a_directory_that_went_while_it_was_written_the_error_says_that(tmp_path):
    def write(directory: Path) -> None:
        shutil.rmtree(tmp_path / "run")
        (directory / "model.bin").write_bytes(b"0")

    with pytest.raises(CheckpointError, match=r"checkpoint of step 1.*No such file"):
        CheckpointStore(tmp_path / "run" / "checkpoints").save(1, write)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 512 KiB."""
    if shutil.which("mount") is None:
        pytest.skip("mount is not installed")
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"can't mount a small file system: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("quiet", [False, True], ids=["OSError", "error of a library"])
def test_a_disk_that_is_really_full(small_disk, quiet):
    store = CheckpointStore(small_disk / "checkpoints")
    before = store.save(1, lambda path: (path / "model.bin").write_bytes(b"1" * 200_000))

    def fill(path: Path) -> None:
        with path.open("wb", buffering=0) as file:
            for _ in range(1000):
                file.write(b"2" * 4096)

    def write(directory: Path) -> None:
        if not quiet:
            fill(directory / "model.bin")
        with suppress(OSError):
            fill(directory / "model.bin")
        raise RuntimeError(
            "the file could not be written"
        )  # as a library does that hides the cause

    with pytest.raises(CheckpointError, match=r"disk is full.*about 3.*step_1 is intact"):
        store.save(2, write)
    assert hidden(store.directory) == []
    assert store.latest() == before
    store.verify(before)
    assert store.save(3, lambda path: (path / "model.bin").write_bytes(b"3" * 100_000)).exists()


def test_leftovers_of_killed_processes_are_cleared_at_the_next_start(tmp_path):
    store = CheckpointStore(tmp_path)
    path = store.save(1, writer())
    for name in (".saving-step_2-abcd", ".removing-step_0-abcd"):
        (tmp_path / name / "actor").mkdir(parents=True)
        (tmp_path / name / "actor" / "model.bin").write_text("half")
    (tmp_path / ".latest-step_2-abcd").write_text("step_2")
    again = CheckpointStore(tmp_path)
    assert again.latest() == path
    assert len(hidden(tmp_path)) == 3
    again.recover()
    assert again.latest() == path
    assert hidden(tmp_path) == []


def test_a_kill_between_the_renames_loses_nothing(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, writer("one"))
    store.save(2, writer("two"))
    # Killed after the old checkpoint of the step made room, before the new one took its place …
    (tmp_path / "step_2").rename(tmp_path / ".replaced-step_2-abcd")
    again = CheckpointStore(tmp_path)
    again.recover()
    assert again.latest() == tmp_path / "step_2"
    again.verify(tmp_path / "step_2")
    # … and after the new checkpoint took its place, before the pointer followed.
    for pointer in ("step_1\n", None):
        (tmp_path / "latest").unlink() if pointer is None else (tmp_path / "latest").write_text(
            pointer
        )
        assert again.latest() == tmp_path / "step_2"
        again.recover()
        assert (tmp_path / "latest").read_text() == "step_2\n"


def test_reading_changes_nothing_while_another_process_saves(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, writer())
    (tmp_path / "latest").write_text("step_0\n")
    for name in (".replaced-step_2-abcd", ".removing-step_0-abcd"):
        (tmp_path / name).mkdir()
    for name in (".latest-step_2-abcd", ".best-step_2-abcd"):
        (tmp_path / name).write_text("step_2")
    before = sorted(tmp_path.rglob("*"))
    reader = CheckpointStore(tmp_path)
    assert (reader.latest(), reader.saved(), reader.best()) == (
        tmp_path / "step_1",
        [tmp_path / "step_1"],
        None,
    )
    reader.verify(reader.find(1))
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "latest").read_text() == "step_0\n"


def test_a_save_in_progress_is_not_cleared_by_another_process(tmp_path):
    store = CheckpointStore(tmp_path)

    def write(directory: Path) -> None:
        subprocess.run(
            [
                sys.executable,
                "-c",
                "import sys; from dovetail.checkpoint.store import CheckpointStore; CheckpointStore(sys.argv[1]).recover()",
                str(tmp_path),
            ],
            check=True,
        )
        writer()(directory)

    store.verify(store.save(1, write))


SAVES_FOR_EVER = """
import os, sys
from pathlib import Path
from dovetail.checkpoint.store import CheckpointStore

store = CheckpointStore(Path(sys.argv[1]), keep=2)
latest = store.latest()
step = int(latest.name.removeprefix("step_")) if latest else 0

def write(directory):
    (directory / "actor").mkdir()
    for part in range(6):
        (directory / "actor" / f"{part}.bin").write_bytes(os.urandom(200_000))

print("ready", flush=True)
while True:
    step += 1
    store.save(step, write)
    store.save(step, write)  # the same step once more: the path that replaces
    print("saved", flush=True)
"""


def test_whenever_it_is_killed_the_latest_checkpoint_is_whole(tmp_path):
    chance = random.Random(7)
    last = 0
    for _ in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVES_FOR_EVER, str(tmp_path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        if not last:  # from now on there is a checkpoint to fall back on
            assert process.stdout.readline() == b"saved\n"
        time.sleep(0.02 + chance.random() * 0.25)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        store = CheckpointStore(tmp_path, keep=2)
        before = store.latest()
        store.recover()
        assert hidden(tmp_path) == []
        assert before in (store.latest(), None)
        latest = store.latest()
        if latest is not None:
            for path in store.saved():
                store.verify(path)
            assert store.verify(latest).step >= last
            last = store.verify(latest).step
    assert last > 0
