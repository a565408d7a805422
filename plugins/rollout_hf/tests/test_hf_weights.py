"""HfRollout's weights: verification, versions, and use by running samples; and the release of memory in sleep."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dovetail.errors import RolloutError, WeightSyncError
from dovetail.interfaces import TensorSpec, WeightManifest, WeightReceiver

DECODERS = ("fused", "transformers")


class Wire:
    """A transport that hands over given tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def receiver(self) -> WeightReceiver:
        wire = self

        class Receiver(WeightReceiver):
            def receive(self, manifest):
                yield from wire.tensors.items()

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
    start, generate, request_of, model_directory, decoder, tied_twice, log_probs_of
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


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("budget", [1, 16384])
def test_what_runs_during_an_update_goes_on_from_logits_of_the_new_weights(
    start, generate, request_of, slow_down, until_running, decoder, budget
) -> None:
    """A last layer norm of zeros makes every logit 0: greedy then draws token 0, and only then."""
    wire = Wire()
    rollout = start(transport=wire, decoder=decoder, max_prefill_tokens=budget)
    requests = [
        request_of(i, n=2, length=3 + i, max_new_tokens=100 + 20 * i, temperature=0.0)
        for i in range(2)
    ]
    old = generate(rollout, *requests)
    slow_down(rollout)
    wire.tensors, specs = update_of(rollout._model, 0.0)
    norm = next(name for name in reversed(wire.tensors) if name.endswith("norm.weight"))
    wire.tensors[norm] = torch.zeros_like(wire.tensors[norm])

    async def run():
        async def one(request):
            return [c async for c in rollout.submit(request)]

        tasks = [asyncio.create_task(one(request)) for request in requests]
        await until_running(rollout, 4)
        # No pause is needed: an update is applied between two steps.
        await asyncio.to_thread(
            rollout.receive_weights, 3, WeightManifest(version=3, tensors=specs)
        )
        return [c for found in await asyncio.gather(*tasks) for c in found]

    for new in asyncio.run(run()):
        before = old[new.request_id, new.sample].response_ids
        assert set(new.weight_versions) == {0, 3}
        first = int(np.argmax(new.weight_versions == 3))
        assert before[first - 1] != 0
        assert new.response_ids[:first].tolist() == before[:first].tolist()
        assert set(new.response_ids[first:]) == {0}
        assert set(new.weight_versions[first:]) == {3}


def test_what_can_not_go_on_under_new_weights_fails_and_the_weights_are_in_force(
    start, generate, request_of, slow_down, until_running, monkeypatch
) -> None:
    wire = Wire()
    rollout = start(transport=wire)
    slow_down(rollout)
    wire.tensors, specs = update_of(rollout._model, 0.1)

    def fail(*_):
        raise MemoryError("no room")

    async def run(patch):
        task = asyncio.create_task(anext(rollout.submit(request_of(0, max_new_tokens=2000))))
        await until_running(rollout)
        patch.setattr(rollout.decoder, "prefill", fail)
        await asyncio.to_thread(
            rollout.receive_weights, 3, WeightManifest(version=3, tensors=specs)
        )
        with pytest.raises(RolloutError, match="with weights of version 3: MemoryError: no room"):
            await task

    with monkeypatch.context() as patch:
        asyncio.run(run(patch))
    for completion in generate(rollout, request_of(0)).values():
        assert completion.weight_versions.tolist() == [3] * 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s[1:],
            r"lacks 1 of.*such as 'model\.embed_tokens\.weight'",
        ),
        (
            lambda s: (*s, TensorSpec(name="model.norm.wait", shape=(3,), dtype="float32")),
            r"the nearest name is 'model\.norm\.weight'",
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
    with pytest.raises(WeightSyncError, match=r"kind 'full'\n.*sync=merged"):
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
    # 2 layers, keys and values, 2 rows, 2 heads, 6 + 8 columns, head width 8, 4 bytes.
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
