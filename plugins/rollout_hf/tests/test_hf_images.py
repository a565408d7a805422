"""Prompts with images: samples have the log-probabilities of transformers' own forward pass."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from dovetail.errors import ModelError, RolloutError
from dovetail.interfaces import (
    Completion,
    PauseMode,
    PluginContext,
    Prompt,
    RolloutRequest,
    SamplingParams,
)
from dovetail.random_streams import SampleStream
from dovetail.sections import DataSection, ModelSection
from dovetail_datasets import open_image
from dovetail_datasets.config import FilesConfig
from dovetail_datasets.files import FilesSource
from dovetail_datasets.prompts import load_prompts
from dovetail_datasets.tokenizer import load_tokenizer
from dovetail_rollout_hf.rollout import HfRollout
from dovetail_sdk.testing import square, tiny_vision_model

SIZES = ((56, 56), (84, 140))


@pytest.fixture(scope="module", params=["qwen2_5_vl", "llava"])
def directory(tmp_path_factory: pytest.TempPathFactory, request: Any) -> Path:
    return tiny_vision_model(tmp_path_factory.mktemp(request.param), family=request.param)


@pytest.fixture(scope="module")
def prompts(directory: Path) -> tuple[Prompt, ...]:
    """One image, two images of unequal size, and none."""
    for number, (width, height) in enumerate(SIZES):
        (directory / f"{number}.png").write_bytes(square((200, 90 * number, 30), width, height))
    rows: list[dict[str, Any]] = [
        {"prompt": "<image>Which colour?", "images": ["0.png"]},
        {"prompt": "First <image> and then <image>, more or less?", "images": ["1.png", "0.png"]},
        {"prompt": "No picture."},
    ]
    file = directory / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    section = ModelSection(path=str(directory))
    source = FilesSource(FilesConfig(), PluginContext())
    return load_prompts(
        source, [str(file)], load_tokenizer(section), DataSection(), section
    ).prompts


def request_of(prompt: Prompt, n: int = 2, **sampling: Any) -> RolloutRequest:
    return RolloutRequest(
        request_id=f"r{prompt.index}",
        prompt_ids=prompt.prompt_ids,
        sampling=SamplingParams(
            max_new_tokens=6, ignore_eos=True, raw_log_probs=True, log_probs=True, **sampling
        ),
        streams=tuple(
            SampleStream(
                seed=1, purpose="test", epoch=0, prompt=prompt.index, sample=sample, attempt=0
            )
            for sample in range(n)
        ),
        media=prompt.media,
    )


async def drain(rollout: HfRollout, request: RolloutRequest) -> list[Completion]:
    return sorted([c async for c in rollout.submit(request)], key=lambda c: c.sample)


def plain_log_probs(directory: Path, prompt: Prompt, response_ids: np.ndarray) -> np.ndarray:
    """float32 [T]: transformers alone, on the whole sequence, with all of its images in one call."""
    model: Any = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    ids_1L = torch.from_numpy(np.concatenate([prompt.prompt_ids, response_ids]))[None]
    inputs: dict[str, Any] = {}
    if prompt.media:
        pictures = [open_image(m.read(), "it") for m in prompt.media]
        inputs = dict(
            AutoImageProcessor.from_pretrained(directory)(images=pictures, return_tensors="pt")
        )
        if hasattr(model.base_model, "get_rope_index"):
            stands = ids_1L == model.config.image_token_id
            inputs["mm_token_type_ids"] = stands.long()
    with torch.no_grad():
        logits_LV = model(input_ids=ids_1L, **inputs).logits[0].float()
    log_probs_LV = logits_LV[len(prompt.prompt_ids) - 1 : -1].log_softmax(-1)
    return np.asarray(log_probs_LV.gather(1, torch.from_numpy(response_ids)[:, None])[:, 0])


def test_samples_have_the_log_probabilities_of_a_plain_forward_pass(
    start: Callable[..., HfRollout], directory: Path, prompts: tuple[Prompt, ...]
) -> None:
    rollout = start(path=directory)

    async def all_of_them() -> list[list[Completion]]:
        return list(
            await asyncio.gather(*(drain(rollout, request_of(prompt)) for prompt in prompts))
        )

    for prompt, completions in zip(prompts, asyncio.run(all_of_them()), strict=True):
        assert len(completions) == 2
        for completion in completions:
            plain_T = plain_log_probs(directory, prompt, completion.response_ids)
            np.testing.assert_allclose(completion.raw_log_probs, plain_T, atol=1e-5)


def test_another_picture_makes_another_answer_likely(
    start: Callable[..., HfRollout], directory: Path, prompts: tuple[Prompt, ...]
) -> None:
    rollout, first = start(path=directory), prompts[0]
    other = directory / "other.png"
    other.write_bytes(square((0, 0, 255), *SIZES[0]))
    swapped = attrs.evolve(
        first, media=(attrs.evolve(first.media[0], path=str(other), digest=_digest(other)),)
    )
    seen = [asyncio.run(drain(rollout, request_of(p, n=1)))[0] for p in (first, swapped)]
    assert not np.allclose(seen[0].raw_log_probs[0], seen[1].raw_log_probs[0], atol=1e-4)


def test_paused_samples_go_on_with_their_images_after_new_weights(
    start: Callable[..., HfRollout], directory: Path, prompts: tuple[Prompt, ...]
) -> None:
    """Keys and values are made anew with the images in them: under the same weights nothing changes."""
    rollout = start(path=directory)
    undisturbed = asyncio.run(drain(rollout, request_of(prompts[1])))

    async def interrupted() -> list[Completion]:
        running = asyncio.create_task(drain(rollout, request_of(prompts[1])))
        while not rollout._scheduler._batch.active:
            if running.done():  # before it was seen: once more
                running = asyncio.create_task(drain(rollout, request_of(prompts[1])))
            await asyncio.sleep(0.001)
        await rollout.pause(PauseMode.KEEP)
        scheduler = rollout._scheduler
        await asyncio.wrap_future(scheduler.call(lambda: scheduler.set_version(1)))
        await rollout.resume()
        return await running

    for before, after in zip(undisturbed, asyncio.run(interrupted()), strict=True):
        np.testing.assert_array_equal(before.response_ids, after.response_ids)
        np.testing.assert_allclose(before.raw_log_probs, after.raw_log_probs, atol=1e-5)


def test_a_model_without_a_vision_tower_and_a_prompt_without_placeholders_are_refused(
    start: Callable[..., HfRollout], directory: Path, prompts: tuple[Prompt, ...]
) -> None:
    with pytest.raises(ModelError, match="takes no images"):
        asyncio.run(drain(start(), attrs.evolve(request_of(prompts[0]), prompt_ids=np.arange(5))))
    text = attrs.evolve(request_of(prompts[2]), media=prompts[0].media)
    with pytest.raises(RolloutError, match=r"has 1 images,.*lacks"):
        asyncio.run(drain(start(path=directory), text))


def _digest(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()
