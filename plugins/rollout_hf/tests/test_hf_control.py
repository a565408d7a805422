"""HfRollout: requests that are aborted, paused, closed, broken or refused; every waiting call gets an answer."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from concurrent.futures import Future

import attrs
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from dovetail.errors import ModelError, RequestRefusedError, RolloutError
from dovetail.interfaces import FinishReason, PauseMode, PluginContext
from dovetail_rollout_hf.config import HfRolloutConfig
from dovetail_rollout_hf.rollout import HfRollout


def test_abort_ends_running_and_waiting_requests_with_their_tokens(
    start, request_of, slow_down, until_running
) -> None:
    rollout = start(max_batch_size=2)
    slow_down(rollout)
    endless = {"max_new_tokens": 4000, "log_probs": True}

    async def run():
        async def one(request):
            return [c async for c in rollout.submit(request)]

        tasks = [asyncio.create_task(one(request_of(i, n=2, **endless))) for i in range(2)]
        await until_running(rollout, 2)
        await rollout.abort(["p0.e0", "p1.e0", "unknown"])
        return await asyncio.gather(*tasks)

    running, waiting = asyncio.run(run())
    for completion in (*running, *waiting):
        assert completion.finish_reason is FinishReason.ABORT
        assert len(completion.log_probs) == len(completion.response_ids)
    assert all(0 < len(c.response_ids) < 4000 for c in running)
    assert all(len(c.response_ids) == 0 for c in waiting)


def test_of_waiting_requests_those_of_the_lowest_priority_begin_first(
    start, request_of, slow_down, until_running
) -> None:
    rollout = start(max_batch_size=1)
    go_on = slow_down(rollout, hold_after=4)
    ended: list[int] = []

    async def one(prompt: int, priority: int) -> None:
        request = attrs.evolve(request_of(prompt, n=1), priority=priority)
        async for _ in rollout.submit(request):
            ended.append(prompt)

    async def run() -> None:
        running = [asyncio.create_task(one(prompt, 7)) for prompt in range(3)]
        await until_running(rollout)
        late = [asyncio.create_task(one(prompt, 9 - prompt)) for prompt in (3, 4)]
        await asyncio.sleep(0.05)
        go_on.set()
        await asyncio.gather(*running, *late)

    asyncio.run(run())
    assert ended == [0, 4, 3, 1, 2]


def test_leaving_a_request_early_frees_its_rows(start, generate, request_of) -> None:
    rollout = start(max_batch_size=2)

    async def run():
        stream = rollout.submit(request_of(0, n=2, max_new_tokens=4000))
        task = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await stream.aclose()

    asyncio.run(run())
    assert len(generate(rollout, request_of(0, n=2))) == 2


def test_an_error_in_the_decode_thread_reaches_every_request_and_the_engine_lives_on(
    start, generate, request_of, monkeypatch
) -> None:
    rollout = start()

    def fail(*_):
        raise MemoryError("no room")

    async def run():
        async def one(request):
            return [c async for c in rollout.submit(request)]

        tasks = [one(request_of(i)) for i in range(3)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    with monkeypatch.context() as patch:
        patch.setattr(rollout.decoder, "step", fail)
        errors = asyncio.run(run())
    assert all(isinstance(e, RolloutError) and "MemoryError: no room" in str(e) for e in errors)
    assert len(generate(rollout, request_of(0))) == 2


@pytest.mark.parametrize("mode", [PauseMode.WAIT, PauseMode.KEEP])
def test_a_pause_that_is_given_up_leaves_the_engine_alive(
    start, generate, request_of, monkeypatch, mode, slow_down, until_running
) -> None:
    rollout = start()
    go_on = slow_down(rollout, hold_after=100)

    async def run():
        stream = rollout.submit(request_of(0, n=1, max_new_tokens=200))
        task = asyncio.create_task(anext(stream))
        await until_running(rollout)
        pause = asyncio.create_task(rollout.pause(PauseMode.WAIT))
        await asyncio.sleep(0.02)
        pause.cancel()
        await asyncio.gather(pause, return_exceptions=True)
        assert pause.cancelled()
        go_on.set()
        # Another pause completes, and with it the cancelled one.
        await asyncio.wait_for(rollout.pause(mode), 240)
        await asyncio.wait_for(rollout.resume(), 240)
        return await asyncio.wait_for(task, 240)

    assert len(asyncio.run(run()).response_ids) == 200
    assert len(generate(rollout, request_of(1))) == 2


def test_closing_after_a_pause_that_was_given_up_tells_everyone(
    start, request_of, monkeypatch, slow_down, until_running
) -> None:
    rollout = start()
    slow_down(rollout)

    async def run():
        async def one():
            return [c async for c in rollout.submit(request_of(0, max_new_tokens=4000))]

        task = asyncio.create_task(one())
        await until_running(rollout)
        pauses = [asyncio.create_task(rollout.pause()) for _ in range(2)]
        await asyncio.sleep(0.02)
        pauses[0].cancel()
        await asyncio.sleep(0)
        rollout.close()
        waiting = asyncio.gather(task, *pauses, return_exceptions=True)
        return await asyncio.wait_for(waiting, 240)

    request, given_up, paused = asyncio.run(run())
    assert isinstance(request, RolloutError)
    assert isinstance(given_up, asyncio.CancelledError)
    assert isinstance(paused, RolloutError)


@pytest.mark.parametrize("broken", ["clear", "job"])
def test_when_the_decode_thread_breaks_off_everyone_hears_and_the_next_call_works(
    start, generate, request_of, monkeypatch, broken, slow_down
) -> None:
    rollout = start()
    slow_down(rollout)
    scheduler = rollout._scheduler

    def fail(*_):
        raise MemoryError("the device is gone")

    def leave():
        raise SystemExit("the device is gone")

    async def run(patch):
        async def one(request):
            return [c async for c in rollout.submit(request)]

        tasks = [asyncio.create_task(one(request_of(i, max_new_tokens=4000))) for i in range(2)]
        while not scheduler._batch.active:  # an earlier pause would return at once
            await asyncio.sleep(0.01)
        tasks.append(asyncio.create_task(rollout.pause()))
        while not scheduler._drained:
            await asyncio.sleep(0.01)
        if broken == "clear":
            patch.setattr(scheduler._batch, "clear", fail)
            patch.setattr(rollout.decoder, "step", fail)
        else:
            # Both jobs are taken in one turn of the thread: the second must not be lost if the first breaks the thread.
            with scheduler._lock:
                jobs = [(leave, Future()), (lambda: None, Future())]
                scheduler._jobs.extend(jobs)
            tasks += [asyncio.wrap_future(future) for _, future in jobs[1:]]
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 240)

    with monkeypatch.context() as patch:
        errors = asyncio.run(run(patch))
    assert all(isinstance(e, RolloutError) and "the device is gone" in str(e) for e in errors)
    asyncio.run(asyncio.wait_for(rollout.resume(), 240))
    assert len(generate(rollout, request_of(0))) == 2


def test_closing_tells_those_who_wait_and_ends_the_thread(start, request_of) -> None:
    rollout = start()

    async def run():
        async def one():
            return [c async for c in rollout.submit(request_of(0, max_new_tokens=4000))]

        task = asyncio.create_task(one())
        await asyncio.sleep(0.05)
        rollout.close()
        rollout.close()
        return await asyncio.gather(task, return_exceptions=True)

    (error,) = asyncio.run(run())
    assert isinstance(error, RolloutError)
    assert "closed" in str(error)
    assert not [t for t in threading.enumerate() if t.name == "dovetail-rollout-hf"]
    with pytest.raises(RolloutError, match="not running"):
        asyncio.run(anext(rollout.submit(request_of(0))))


def test_closing_between_handing_over_and_starting_leaves_nobody_waiting(start, request_of) -> None:
    rollout = start()

    async def run():
        async def one():
            return [c async for c in rollout.submit(request_of(0))]

        task = asyncio.create_task(one())
        pausing = asyncio.create_task(rollout.pause())
        await asyncio.sleep(0)
        rollout.close()
        return await asyncio.wait_for(asyncio.gather(task, pausing, return_exceptions=True), 240)

    assert isinstance(asyncio.run(run())[0], RolloutError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 0}, "prompt is empty"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"max_new_tokens": 5000}, "exceed the model's 4096 positions"),
    ],
)
def test_impossible_requests_are_refused_in_words(
    start, generate, request_of, change, message
) -> None:
    with pytest.raises(RequestRefusedError, match=message):
        generate(start(), request_of(0, **change))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(start, model_directory, tmp_path, value) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model_directory, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"weight model\.layers\.1\.mlp\.up_proj\.weight has"):
        start(path=broken)


def test_rope_scaling_counts_in_what_a_request_may_ask_for(
    start, generate, request_of, model_directory, tmp_path
) -> None:
    scaled = tmp_path / "scaled"
    shutil.copytree(model_directory, scaled)
    config = json.loads((scaled / "config.json").read_text()) | {"max_position_embeddings": 16}
    config["rope_parameters"] |= {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 16,
    }
    (scaled / "config.json").write_text(json.dumps(config))
    rollout = start(path=scaled)
    found = generate(rollout, request_of(0, n=1, length=6, max_new_tokens=26))
    assert [len(completion.response_ids) for completion in found.values()] == [26]
    with pytest.raises(RolloutError, match="exceed the model's 32 positions"):
        generate(rollout, request_of(1, n=1, length=6, max_new_tokens=27))


def test_unknown_tokens_and_double_ids_are_refused(start, generate, request_of) -> None:
    rollout = start()
    request = request_of(0)
    with pytest.raises(RolloutError, match=r"'p0\.e0' is running already"):
        generate(rollout, request, request)
    object.__setattr__(request, "prompt_ids", np.array([1, 300]))
    with pytest.raises(RolloutError, match="outside 0 … 299"):
        generate(rollout, request)


def test_a_missing_model_is_an_error_that_says_so(start, tmp_path) -> None:
    with pytest.raises(ModelError, match="model directory"):
        start(path=tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        start(path=tmp_path)
    with pytest.raises(ModelError, match="no model"):
        HfRollout(HfRolloutConfig(), PluginContext()).start()
