"""Prompts with images in vLLM's form: one placeholder token for each image, which vLLM expands, and the decoded images."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from dovetail.errors import RequestRefusedError
from dovetail.interfaces import MediaRef
from dovetail_datasets import image_token_of, open_image
from dovetail_serving import SampleCall

KEPT = 64
"""Number of decoded images to cache, since the samples of a group need the same images."""


class VllmImagePrompts:
    """Creates vLLM's prompts with images, and checks that vLLM expands the images as the trainer does.

    Args:
        config: the model's transformers config.
    """

    def __init__(self, config: Any) -> None:
        self._token = image_token_of(config)
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def prompt(self, call: SampleCall) -> dict[str, Any]:
        """Return a vLLM token prompt with `multi_modal_data`; digests identify the images in vLLM's cache.

        Raises:
            RequestRefusedError: the prompt's placeholder tokens do not match its images.
            DataError: an image can't be read or decoded.
        """
        return {
            "prompt_token_ids": unexpanded(call.prompt_ids, self._token, len(call.media)),
            "multi_modal_data": {"image": [self._picture(reference) for reference in call.media]},
            "multi_modal_uuids": {"image": [reference.digest for reference in call.media]},
        }

    def check(self, call: SampleCall, seen: Sequence[int] | None) -> None:
        """Raise an error if vLLM's expanded prompt differs from the requested prompt.

        Args:
            call: the call that was sent to vLLM.
            seen: the prompt that vLLM reports, with every image expanded.

        Raises:
            RequestRefusedError: the prompts differ.
        """
        if seen is not None and list(seen) != list(call.prompt_ids):
            raise RequestRefusedError(
                f"vLLM expanded a prompt with {len(call.media)} images to {len(seen)} tokens; expected "
                f"{len(call.prompt_ids)}, the length that the model's own processor gives",
                hint="leave rollout.engine_args.mm_processor_kwargs out: vLLM must use the processor's own settings",
            )

    def _picture(self, reference: MediaRef) -> Any:
        with self._lock:  # calls decode images in several threads
            if (known := self._kept.get(reference.digest)) is not None:
                self._kept.move_to_end(reference.digest)
                return known
        picture = open_image(reference.read(), f"the image {reference.path!r}")
        with self._lock:
            self._kept[reference.digest] = picture
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return picture


def unexpanded(ids: Sequence[int], token: int | None, images: int) -> list[int]:
    """Return the prompt with each image's run of placeholder tokens collapsed to one token.

    Args:
        ids: the P token ids of the prompt.
        token: the placeholder token; None if the model has none.
        images: the number of images. Later runs, which the policy generated, stay unchanged.

    Raises:
        RequestRefusedError: there are fewer runs of placeholder tokens than images.
    """
    found: list[int] = []
    runs, before = 0, None
    for here in ids:
        starts = here == token and before != token
        runs += starts
        if starts or here != token or runs > images:
            found.append(here)
        before = here
    if runs < images:
        raise RequestRefusedError(
            f"a prompt of {len(ids)} tokens with {images} image(s) has the image token {token} in {runs} separate place(s); expected {images}",
            hint="put text between two images, and check that the prompts were made for this model",
        )
    return found
