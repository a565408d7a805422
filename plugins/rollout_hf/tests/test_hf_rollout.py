"""HfRollout: samples that depend on nothing but their stream and the weights, streamed, verified, and never lost."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dovetail.errors import ModelError, RolloutError, WeightSyncError
from dovetail.interfaces import (
    FinishReason,
    PauseMode,
    PluginContext,
    TensorSpec,
    WeightManifest,
    WeightReceiver,
)
from dovetail_rollout_hf.config import HfRolloutConfig
from dovetail_rollout_hf.rollout import HfRollout

DECODERS = ("lean", "transformers")


@pytest.fixture(scope="session")
def reference(model_directory):
    return AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32).eval()


def log_probs_of(model, request, completion) -> np.ndarray:
    """Full-softmax log-probabilities [T] of a completion, by one plain forward pass."""
    ids = torch.tensor([*request.prompt_ids.tolist(), *completion.response_ids.tolist()])
    with torch.inference_mode():
        logits = model(ids[None]).logits[0].double() / (request.sampling.temperature or 1.0)
    start = len(request.prompt_ids) - 1
    chosen = logits[start:-1].log_softmax(-1)
    return chosen.gather(1, ids[start + 1 :, None])[:, 0].numpy()


def slow_down(rollout, monkeypatch) -> None:
    """Let a step take 2 ms at least, so that a test can act while a request runs."""
    step = rollout.decoder.step

    def slowly(*arguments):
        time.sleep(0.002)
        return step(*arguments)

    monkeypatch.setattr(rollout.decoder, "step", slowly)


# What is generated


@pytest.mark.parametrize("decoder", DECODERS)
def test_log_probs_equal_a_plain_forward_pass(
    start, generate, request_of, reference, decoder
) -> None:
    rollout = start(decoder=decoder)
    requests = [
        request_of(i, n=3, length=4 + 3 * i, log_probs=True, raw_log_probs=True, temperature=t)
        for i, t in enumerate((1.0, 0.7, 1.3))
    ]
    completions = generate(rollout, *requests)
    for request in requests:
        for sample in range(request.n):
            completion = completions[request.request_id, sample]
            plain = log_probs_of(reference, request, completion)
            np.testing.assert_allclose(completion.raw_log_probs, plain, atol=1e-5)
            np.testing.assert_allclose(completion.log_probs, plain, atol=1e-5)
            assert completion.response_ids.dtype == np.int64
            assert completion.weight_versions.tolist() == [0] * 8


def test_greedy_follows_the_most_likely_token(start, generate, request_of, reference) -> None:
    request = request_of(1, n=1, temperature=0.0, log_probs=True)
    (completion,) = generate(start(), request).values()
    ids = torch.tensor(request.prompt_ids)
    for token in completion.response_ids:
        with torch.inference_mode():
            assert reference(ids[None]).logits[0, -1].argmax() == token
        ids = torch.cat([ids, torch.tensor([token])])
    assert completion.log_probs.tolist() == [0.0] * 8


def test_both_decoders_draw_the_same_samples(start, generate, request_of) -> None:
    requests = [request_of(i, n=4, length=3 + i, max_new_tokens=16) for i in range(4)]
    lean, plain = (generate(start(decoder=d), *requests) for d in DECODERS)
    for key in lean:
        assert lean[key].response_ids.tolist() == plain[key].response_ids.tolist()


@pytest.mark.parametrize("limit", [3, 8, 64])
def test_a_sample_does_not_depend_on_its_batch_mates(start, generate, request_of, limit) -> None:
    """Alone or in a crowd, with other lengths, early stops, compaction and late admission."""
    requests = [
        request_of(
            i, n=3, length=2 + i, max_new_tokens=4 + 5 * (i % 4), ignore_eos=False, temperature=1.0
        )
        for i in range(8)
    ]
    crowd = generate(start(max_batch_size=limit), *requests)
    lonely = start()
    for request in requests:
        for key, completion in generate(lonely, request).items():
            assert crowd[key].response_ids.tolist() == completion.response_ids.tolist()
            assert crowd[key].finish_reason == completion.finish_reason


def test_a_continued_sample_goes_on_with_its_stream(start, generate, request_of) -> None:
    rollout = start()
    whole = generate(rollout, request_of(1, n=1, max_new_tokens=12))["p1.e0", 0].response_ids
    head = request_of(1, n=1, max_new_tokens=5)
    rest = request_of(1, n=1, max_new_tokens=7, offset=5)
    object.__setattr__(rest, "prompt_ids", np.concatenate([head.prompt_ids, whole[:5]]))
    assert generate(rollout, rest)["p1.e0", 0].response_ids.tolist() == whole[5:].tolist()


def test_samples_of_one_prompt_differ_and_epochs_do_too(start, generate, request_of) -> None:
    completions = generate(start(), request_of(0, n=4), request_of(0, n=4, epoch=1))
    assert len({tuple(c.response_ids) for c in completions.values()}) == 8


def test_generating_twice_gives_the_same_bits(start, generate, request_of) -> None:
    rollout = start(max_batch_size=6)
    requests = [
        request_of(i, n=3, length=2 + i, log_probs=True, ignore_eos=False, max_new_tokens=20)
        for i in range(5)
    ]
    first, second = generate(rollout, *requests), generate(rollout, *requests)
    for key in first:
        assert first[key].response_ids.tobytes() == second[key].response_ids.tobytes()
        assert first[key].log_probs.tobytes() == second[key].log_probs.tobytes()


# Ends


def test_responses_end_at_end_of_sequence_or_length(start, generate, request_of) -> None:
    rollout = start()
    eos = rollout._model.config.eos_token_id
    completions = generate(
        rollout, *(request_of(i, n=16, ignore_eos=False, max_new_tokens=200) for i in range(4))
    )
    reasons = {c.finish_reason for c in completions.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    for completion in completions.values():
        ids = completion.response_ids.tolist()
        if completion.finish_reason is FinishReason.STOP:
            assert ids.index(eos) == len(ids) - 1
        else:
            assert len(ids) == 200
            assert eos not in ids


def test_stop_tokens_and_stop_strings(start, generate, request_of) -> None:
    rollout = start()
    tokenizer = rollout._stops._tokenizer
    free = generate(rollout, request_of(2, n=8, max_new_tokens=40))
    token = int(free["p2.e0", 0].response_ids[5])
    text = tokenizer.decode(free["p2.e0", 1].response_ids.tolist())
    string = text[6:9]
    by_token = generate(rollout, request_of(2, n=8, max_new_tokens=40, stop_token_ids=(token,)))
    by_string = generate(rollout, request_of(2, n=8, max_new_tokens=40, stop=(string,)))
    assert by_token["p2.e0", 0].finish_reason is FinishReason.STOP
    assert by_string["p2.e0", 1].finish_reason is FinishReason.STOP
    for key, completion in free.items():
        ids = completion.response_ids.tolist()
        end = ids.index(token) + 1 if token in ids else 40
        assert by_token[key].response_ids.tolist() == ids[:end]
        end = next((i for i in range(1, 41) if string in tokenizer.decode(ids[:i])), 40)
        assert by_string[key].response_ids.tolist() == ids[:end]


# Batching


def test_each_prompt_is_prefilled_once_for_all_its_samples(
    start, generate, request_of, monkeypatch
) -> None:
    rollout = start(decoder="transformers")
    shapes = []
    forward = rollout._model.forward
    monkeypatch.setattr(
        rollout._model,
        "forward",
        lambda **kw: shapes.append(tuple(kw["input_ids"].shape)) or forward(**kw),
    )
    generate(rollout, *(request_of(i, n=5, max_new_tokens=4) for i in range(3)))
    # One pass over three prompts; three steps of fifteen rows, the first token coming from the prefill.
    assert shapes == [(3, 6), (15, 1), (15, 1), (15, 1)]


def test_prefill_keeps_its_token_budget(start, generate, request_of, monkeypatch) -> None:
    rollout = start(max_prefill_tokens=20)
    shapes = []
    prefill = rollout.decoder.prefill
    monkeypatch.setattr(
        rollout.decoder,
        "prefill",
        lambda ids, pad: shapes.append(tuple(ids.shape)) or prefill(ids, pad),
    )
    completions = generate(
        rollout, *(request_of(i, n=2, length=n) for i, n in enumerate((9, 3, 30, 10)))
    )
    assert len(completions) == 8
    assert shapes == [(1, 30), (2, 10), (1, 3)]


def test_finished_rows_leave_the_batch(start, generate, request_of, monkeypatch) -> None:
    rollout = start()
    rows = []
    step = rollout.decoder.step
    monkeypatch.setattr(
        rollout.decoder,
        "step",
        lambda tokens, column: rows.append(len(tokens)) or step(tokens, column),
    )
    generate(rollout, request_of(0, n=6, max_new_tokens=3), request_of(1, n=2, max_new_tokens=9))
    assert rows == [8, 8, 2, 2, 2, 2, 2, 2]


def test_a_group_larger_than_the_batch_is_generated_in_parts(start, generate, request_of) -> None:
    completions = generate(start(max_batch_size=4), request_of(0, n=11), request_of(1, n=3))
    whole = generate(start(), request_of(0, n=11), request_of(1, n=3))
    assert {k: c.response_ids.tolist() for k, c in completions.items()} == {
        k: c.response_ids.tolist() for k, c in whole.items()
    }


def test_short_samples_arrive_before_long_ones_are_finished(start, request_of) -> None:
    rollout = start()

    async def run():
        order = []

        async def one(request):
            async for completion in rollout.submit(request):
                order.append(completion.request_id)

        await asyncio.gather(
            one(request_of(0, n=2, max_new_tokens=400)), one(request_of(1, n=1, max_new_tokens=2))
        )
        return order

    assert asyncio.run(run()) == ["p1.e0", "p0.e0", "p0.e0"]


# Control


def test_abort_ends_running_and_waiting_requests_with_their_tokens(start, request_of) -> None:
    rollout = start(max_batch_size=2)
    endless = {"max_new_tokens": 4000, "log_probs": True}

    async def run():
        async def one(request):
            return [c async for c in rollout.submit(request)]

        tasks = [asyncio.create_task(one(request_of(i, n=2, **endless))) for i in range(2)]
        await asyncio.sleep(0.1)
        await rollout.abort(["p0.e0", "p1.e0", "unknown"])
        return await asyncio.gather(*tasks)

    running, waiting = asyncio.run(run())
    for completion in (*running, *waiting):
        assert completion.finish_reason is FinishReason.ABORT
        assert len(completion.log_probs) == len(completion.response_ids)
    assert all(0 < len(c.response_ids) < 4000 for c in running)
    assert all(len(c.response_ids) == 0 for c in waiting)


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


@pytest.mark.parametrize("mode", list(PauseMode))
def test_pause_and_resume(start, request_of, mode) -> None:
    rollout = start()

    async def run():
        finished = []

        async def one(request):
            async for completion in rollout.submit(request):
                finished.append(completion)

        first = asyncio.create_task(one(request_of(0, n=2, max_new_tokens=300)))
        await asyncio.sleep(0.02)
        await rollout.pause(mode)
        await asyncio.sleep(0.02)
        before = len(finished)
        second = asyncio.create_task(one(request_of(1, n=2)))
        await asyncio.sleep(0.05)
        assert not second.done()
        held = len(finished)
        await rollout.resume()
        await asyncio.gather(first, second)
        return before, held, finished

    before, held, finished = asyncio.run(run())
    assert held == before == (0 if mode is PauseMode.KEEP else 2)
    assert len(finished) == 4
    reasons = [c.finish_reason for c in finished if c.request_id == "p0.e0"]
    expected = FinishReason.ABORT if mode is PauseMode.ABORT else FinishReason.LENGTH
    assert reasons == [expected] * 2


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
    start, generate, request_of, monkeypatch, mode
) -> None:
    rollout = start()
    slow_down(rollout, monkeypatch)

    async def run():
        stream = rollout.submit(request_of(0, n=1, max_new_tokens=200))
        task = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.05)
        pause = asyncio.create_task(rollout.pause(PauseMode.WAIT))
        await asyncio.sleep(0.02)
        pause.cancel()
        await asyncio.gather(pause, return_exceptions=True)
        assert pause.cancelled()
        # Another pause settles the one that was given up along with itself.
        await asyncio.wait_for(rollout.pause(mode), 20)
        await asyncio.wait_for(rollout.resume(), 20)
        return await asyncio.wait_for(task, 20)

    assert len(asyncio.run(run()).response_ids) == 200
    assert len(generate(rollout, request_of(1))) == 2


def test_closing_after_a_pause_that_was_given_up_tells_everyone(
    start, request_of, monkeypatch
) -> None:
    rollout = start()
    slow_down(rollout, monkeypatch)

    async def run():
        async def one():
            return [c async for c in rollout.submit(request_of(0, max_new_tokens=4000))]

        task = asyncio.create_task(one())
        await asyncio.sleep(0.05)
        pauses = [asyncio.create_task(rollout.pause()) for _ in range(2)]
        await asyncio.sleep(0.02)
        pauses[0].cancel()
        await asyncio.sleep(0)
        rollout.close()
        waiting = asyncio.gather(task, *pauses, return_exceptions=True)
        return await asyncio.wait_for(waiting, 20)

    request, given_up, paused = asyncio.run(run())
    assert isinstance(request, RolloutError)
    assert isinstance(given_up, asyncio.CancelledError)
    assert isinstance(paused, RolloutError)


@pytest.mark.parametrize("broken", ["clear", "job"])
def test_when_the_decode_thread_breaks_off_everyone_hears_and_the_next_call_works(
    start, generate, request_of, monkeypatch, broken
) -> None:
    rollout = start()
    slow_down(rollout, monkeypatch)
    scheduler = rollout._scheduler

    def fail(*_):
        raise MemoryError("the device is gone")

    def leave():
        raise SystemExit("the device is gone")

    async def run(patch):
        async def one(request):
            return [c async for c in rollout.submit(request)]

        tasks = [asyncio.create_task(one(request_of(i, max_new_tokens=4000))) for i in range(2)]
        await asyncio.sleep(0.05)
        tasks.append(asyncio.create_task(rollout.pause()))
        await asyncio.sleep(0.02)
        if broken == "clear":
            patch.setattr(scheduler._batch, "clear", fail)
            patch.setattr(rollout.decoder, "step", fail)
        else:
            # Both are taken in one turn: the second must not be lost with the first.
            with scheduler._lock:
                jobs = [(leave, Future()), (lambda: None, Future())]
                scheduler._jobs.extend(jobs)
            tasks += [asyncio.wrap_future(future) for _, future in jobs[1:]]
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)

    with monkeypatch.context() as patch:
        errors = asyncio.run(run(patch))
    assert all(isinstance(e, RolloutError) and "the device is gone" in str(e) for e in errors)
    asyncio.run(asyncio.wait_for(rollout.resume(), 20))
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
        return await asyncio.wait_for(asyncio.gather(task, pausing, return_exceptions=True), 5)

    assert isinstance(asyncio.run(run())[0], RolloutError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 0}, "its prompt is empty"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"max_new_tokens": 5000}, "exceed the model's 4096 positions"),
    ],
)
def test_impossible_requests_are_refused_in_words(
    start, generate, request_of, change, message
) -> None:
    with pytest.raises(RolloutError, match=message):
        generate(start(), request_of(0, **change))


def test_unknown_tokens_and_double_ids_are_refused(start, generate, request_of) -> None:
    rollout = start()
    request = request_of(0)
    with pytest.raises(RolloutError, match=r"'p0\.e0' is running already"):
        generate(rollout, request, request)
    object.__setattr__(request, "prompt_ids", np.array([1, 300]))
    with pytest.raises(RolloutError, match="outside 0 … 299"):
        generate(rollout, request)


def test_a_missing_model_is_an_error_that_says_so(start, tmp_path) -> None:
    with pytest.raises(ModelError, match="there is no directory"):
        start(path=tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        start(path=tmp_path)
    with pytest.raises(ModelError, match="no model"):
        HfRollout(HfRolloutConfig(), PluginContext()).start()


# Weights


class Wire:
    """A transport that hands over given tensors, and breaks off where it is told."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.break_after: int | None = None

    def receiver(self) -> WeightReceiver:
        wire = self

        class Receiver(WeightReceiver):
            def receive(self, manifest):
                for number, item in enumerate(wire.tensors.items()):
                    if number == wire.break_after:
                        raise WeightSyncError(f"update {manifest.version} broke off")
                    yield item

        return Receiver()


def update_of(model, scale: float, *, tied_twice: bool = False):
    """Changed weights of a model, and their manifest."""
    generator = torch.manual_seed(11)
    tensors = {
        name: p.detach() + scale * torch.randn(p.shape, generator=generator)
        for name, p in model.named_parameters(remove_duplicate=not tied_twice)
    }
    if tied_twice:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    specs = tuple(
        TensorSpec(name=n, shape=tuple(t.shape), dtype="float32") for n, t in tensors.items()
    )
    return tensors, specs


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("tied_twice", [False, True])
def test_new_weights_are_used_and_stamped_on_every_token(
    start, generate, request_of, model_directory, decoder, tied_twice
) -> None:
    wire = Wire()
    rollout = start(transport=wire, decoder=decoder)
    changed = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32).eval()
    wire.tensors, specs = update_of(changed, 0.1, tied_twice=tied_twice)
    changed.load_state_dict(wire.tensors, strict=False)
    rollout.receive_weights(7, WeightManifest(version=7, tensors=specs))
    assert rollout.version == 7
    request = request_of(0, raw_log_probs=True)
    for completion in generate(rollout, request).values():
        assert completion.weight_versions.tolist() == [7] * 8
        plain = log_probs_of(changed, request, completion)
        np.testing.assert_allclose(completion.raw_log_probs, plain, atol=1e-5)


def test_a_torn_update_leaves_the_old_version_in_force(start, generate, request_of) -> None:
    wire = Wire()
    rollout = start(transport=wire)
    before = generate(rollout, request_of(0, log_probs=True))
    wire.tensors, specs = update_of(rollout._model, 0.5)
    wire.break_after = len(specs) // 2
    with pytest.raises(WeightSyncError, match="broke off"):
        rollout.receive_weights(1, WeightManifest(version=1, tensors=specs))
    assert rollout.version == 0
    after = generate(rollout, request_of(0, log_probs=True))
    for key in before:
        assert before[key].log_probs.tobytes() == after[key].log_probs.tobytes()
        assert set(after[key].weight_versions) == {0}


def test_an_update_during_generation_marks_the_tokens_that_it_made(start, request_of) -> None:
    wire = Wire()
    rollout = start(transport=wire)
    wire.tensors, specs = update_of(rollout._model, 0.1)

    async def run():
        task = asyncio.create_task(anext(rollout.submit(request_of(0, n=1, max_new_tokens=2000))))
        await asyncio.sleep(0.1)
        await rollout.pause(PauseMode.KEEP)
        rollout.receive_weights(3, WeightManifest(version=3, tensors=specs))
        await rollout.resume()
        return await task

    versions = asyncio.run(run()).weight_versions
    assert set(versions) == {0, 3}
    assert (np.diff(versions) >= 0).all()


@pytest.mark.parametrize("decoder", DECODERS)
def test_the_token_whose_logits_the_old_weights_made_is_stamped_with_the_old_version(
    start, generate, request_of, monkeypatch, decoder
) -> None:
    """A last layer norm of zeros makes every logit 0: greedy then draws token 0, and only then."""
    wire = Wire()
    rollout = start(transport=wire, decoder=decoder)
    request = request_of(0, n=1, max_new_tokens=120, temperature=0.0)
    (old,) = generate(rollout, request).values()
    slow_down(rollout, monkeypatch)
    wire.tensors, specs = update_of(rollout._model, 0.0)
    norm = next(name for name in reversed(wire.tensors) if name.endswith("norm.weight"))
    wire.tensors[norm] = torch.zeros_like(wire.tensors[norm])

    async def run():
        task = asyncio.create_task(anext(rollout.submit(request)))
        await asyncio.sleep(0.05)
        await rollout.pause(PauseMode.KEEP)
        rollout.receive_weights(3, WeightManifest(version=3, tensors=specs))
        await rollout.resume()
        return await task

    new = asyncio.run(run())
    assert set(new.weight_versions) == {0, 3}
    first = int(np.argmax(new.weight_versions == 3))
    assert old.response_ids[first - 1] != 0
    assert new.response_ids[:first].tolist() == old.response_ids[:first].tolist()
    assert set(new.response_ids[first:]) == {0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s[1:],
            r"lacks 1 of the model's parameters, such as 'model\.embed_tokens\.weight'",
        ),
        (
            lambda s: (*s, TensorSpec(name="model.norm.wait", shape=(3,), dtype="float32")),
            r"the nearest is 'model\.norm\.weight'",
        ),
        (
            lambda s: (TensorSpec(name=s[0].name, shape=(1, 2), dtype="float32"), *s[1:]),
            r"with shape \(1, 2\); the model has \(300, 32\)",
        ),
    ],
)
def test_an_update_that_does_not_fit_is_refused_before_it_travels(start, change, message) -> None:
    wire = Wire()
    rollout = start(transport=wire)
    wire.tensors, specs = update_of(rollout._model, 0.1)
    with pytest.raises(WeightSyncError, match=message):
        rollout.receive_weights(1, WeightManifest(version=1, tensors=change(specs)))
    with pytest.raises(WeightSyncError, match=r"full updates only\n.*sync=merged"):
        rollout.receive_weights(1, WeightManifest(version=1, kind="adapter", tensors=specs))
    assert rollout.version == 0


def test_weights_need_a_transport(start) -> None:
    with pytest.raises(WeightSyncError, match=r"rollout\.weight_transport"):
        start().receive_weights(1, WeightManifest(version=1, tensors=()))


def test_on_the_cpu_sleep_frees_spare_caches_and_changes_nothing(
    start, generate, request_of
) -> None:
    rollout = start()
    before = generate(rollout, request_of(0))
    assert rollout.sleep(frozenset({"weights"})) == 0
    # 2 layers, keys and values, 2 rows, 2 heads, 6 + 8 columns, 8 wide, 4 bytes.
    assert rollout.sleep(frozenset({"weights", "kv_cache"})) == 2 * 2 * 2 * 2 * 14 * 8 * 4
    assert rollout.sleep(frozenset({"kv_cache"})) == 0
    rollout.wake(frozenset({"weights", "kv_cache"}))
    after = generate(rollout, request_of(0))
    assert all(before[k].response_ids.tolist() == after[k].response_ids.tolist() for k in before)


def test_sleep_while_requests_run_is_refused(start, request_of) -> None:
    rollout = start()

    async def run():
        stream = rollout.submit(request_of(0, max_new_tokens=4000))
        task = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.05)
        with pytest.raises(RolloutError, match="requests are running"):
            rollout.sleep(frozenset({"weights"}))
        await rollout.abort(["p0.e0"])
        await task
        await stream.aclose()

    asyncio.run(run())
