"""Prompts with images in vLLM's form; and vLLM itself with images, if its vision models can be loaded."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dovetail.errors import RolloutError
from dovetail.interfaces import Completion, PluginContext, RolloutRequest, SamplingParams
from dovetail.random_streams import SampleStream
from dovetail.sections import ModelSection
from dovetail_datasets import ImageInputs, model_class, open_image
from dovetail_datasets.images import keep
from dovetail_datasets.media.processor import ImagePrompts
from dovetail_datasets.tokenizer import load_tokenizer
from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_rollout_vllm.pictures import VllmImagePrompts, unexpanded
from dovetail_rollout_vllm.rollout import VllmRollout
from dovetail_rollout_vllm.versions import VLLM
from dovetail_sdk.testing import square, tiny_vision_model
from dovetail_serving import SampleCall

IMAGE = 9
CONFIG = SimpleNamespace(image_token_id=IMAGE)
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.1}
"""Mean difference of log-probabilities in nats."""


def call(ids: list[int], media: tuple = ()) -> SampleCall:
    return SampleCall(
        call_id="c", prompt_ids=ids, sampling=SamplingParams(max_new_tokens=2), media=media
    )


@pytest.mark.parametrize(
    ("ids", "images", "expected"),
    [
        ([1, 9, 9, 9, 2], 1, [1, 9, 2]),
        ([9, 9, 1, 9, 2, 3], 2, [9, 1, 9, 2, 3]),
        ([1, 9, 9, 2, 9, 9, 3], 1, [1, 9, 2, 9, 9, 3]),  # tokens of the policy stay
    ],
)
def test_each_image_leaves_one_token(ids: list[int], images: int, expected: list[int]) -> None:
    assert unexpanded(ids, IMAGE, images) == expected


def test_prompts_that_do_not_stand_for_their_images_are_refused() -> None:
    with pytest.raises(RolloutError, match=r"with 2 image.*token 9 in 1 separate"):
        unexpanded([1, 9, 9, 2], IMAGE, 2)
    pictures = VllmImagePrompts(CONFIG)
    pictures.check(call([1, 9, 9, 2]), [1, 9, 9, 2])
    with pytest.raises(RolloutError, match=r"a prompt .*to 3 tokens.*expected 4"):
        pictures.check(call([1, 9, 9, 2]), [1, 9, 2])


def test_a_prompt_is_one_of_vllms_and_names_its_images_by_content(tmp_path: Path) -> None:
    reference = keep(tmp_path, square((255, 0, 0), 40, 60))
    made = VllmImagePrompts(CONFIG).prompt(call([1, 9, 9, 2], (reference,)))
    assert made["prompt_token_ids"] == [1, 9, 2]
    (picture,) = made["multi_modal_data"]["image"]
    assert (picture.size, picture.mode) == ((40, 60), "RGB")
    assert made["multi_modal_uuids"] == {"image": [reference.digest]}
    if VLLM.installed() is not None:
        from vllm.inputs import TokensPrompt

        assert set(made) <= set(TokensPrompt.__annotations__)


@pytest.mark.vllm
@pytest.mark.gpu
@pytest.mark.skipif(VLLM.installed() is None, reason="vLLM is not installed here")
@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None,
    reason="vLLM's vision models import torchvision, which its build for CPUs comes without",
)
@pytest.mark.timeout(600)
def test_vllm_finds_its_samples_as_likely_as_transformers(tmp_path: Path) -> None:
    """One prompt with two images of unequal size, one with none; one engine for both."""
    section = ModelSection(
        path=str(tiny_vision_model(tmp_path / "model")),
        dtype="bfloat16" if torch.accelerator.is_available() else "float32",
    )
    prompts = ImagePrompts(section, load_tokenizer(section))
    media = tuple(
        keep(tmp_path, square(colour, *size))
        for colour, size in (((200, 0, 30), (56, 56)), ((0, 90, 30), (84, 140)))
    )
    mark = f"<|vision_start|>{prompts.placeholder}<|vision_end|>"
    pictures = [open_image(reference.read(), "it") for reference in media]
    asked = [
        _request("images", prompts.ids(f"a{mark} and {mark}, or?", pictures), media),
        _request("text", prompts.ids("no picture", []), ()),
    ]
    rollout = VllmRollout(
        VllmRolloutConfig(
            name="vllm", max_model_len=512, max_num_seqs=8, enforce_eager=True, gpu_memory_utilization=0.3
        ),
        PluginContext(model=section, run_directory=tmp_path),
    )  # fmt: skip
    rollout.start()
    try:
        found = asyncio.run(_all(rollout, asked))
    finally:
        rollout.close()
    for request, completions in zip(asked, found, strict=True):
        for completion in completions:
            plain_T = _plain(section, request, completion.response_ids)
            assert np.abs(completion.log_probs - plain_T).mean() < TOLERANCE[section.dtype]


def _request(name: str, ids: list[int], media: tuple) -> RolloutRequest:
    return RolloutRequest(
        request_id=name,
        prompt_ids=np.array(ids),
        sampling=SamplingParams(max_new_tokens=6, ignore_eos=True, log_probs=True),
        streams=tuple(SampleStream(seed=1, sample=s) for s in range(2)),
        media=media,
    )


async def _all(rollout: VllmRollout, asked: list[RolloutRequest]) -> list[list[Completion]]:
    async def one(request: RolloutRequest) -> list[Completion]:
        return [completion async for completion in rollout.submit(request)]

    return list(await asyncio.gather(*map(one, asked)))


def _plain(section: ModelSection, request: RolloutRequest, response_ids: np.ndarray) -> np.ndarray:
    """Return the response's log-probabilities, float32 [T], computed by transformers in float32."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(section.path)
    model = model_class(config).from_pretrained(section.path, dtype=torch.float32).eval()
    ids_1L = torch.from_numpy(np.concatenate([request.prompt_ids, response_ids]))[None]
    prompt_1L = torch.arange(ids_1L.shape[1])[None] < len(request.prompt_ids)
    inputs = ImageInputs(model, section).of(ids_1L, prompt_1L, [request.media])
    with torch.no_grad():
        logits_LV = model(input_ids=ids_1L, **inputs).logits[0]
    log_probs_LV = logits_LV[len(request.prompt_ids) - 1 : -1].log_softmax(-1)
    return np.asarray(log_probs_LV.gather(1, torch.from_numpy(response_ids)[:, None])[:, 0])
