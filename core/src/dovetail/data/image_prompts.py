"""Rows with images to prompts: the chat template, and the model's processor, which expands what stands for each image."""

from __future__ import annotations

from typing import Any, NamedTuple

from dovetail.data.chat_template import with_arguments
from dovetail.data.images import PLACEHOLDER, FoundImage
from dovetail.data.schema import RawRow
from dovetail.errors import ModelError
from dovetail.interfaces.plugin import Tokenizer
from dovetail.media.images import open_image
from dovetail.media.processor import ImagePrompts
from dovetail.sections import DataSection, ModelSection


class Rendered(NamedTuple):
    """A prompt as the model sees it."""

    ids: list[int]
    images: tuple[FoundImage, ...]
    image_tokens: int = 0
    """Tokens that stand for images."""


class ImageRenderer:
    """Turns rows with images into token ids.

    Args:
        tokenizer: of the run.
        section: how plain prompts reach the model.
        model: whose processor counts an image's tokens.

    Raises:
        ModelError: the model takes no images, or messages are to be templated and there is no template.
        ConfigError: the processor's template does not read an argument that `section` gives.
    """

    def __init__(self, tokenizer: Tokenizer, section: DataSection, model: ModelSection) -> None:
        self._tokenizer = tokenizer
        self._raw = section.plain_prompts == "raw"
        self._prompts = ImagePrompts(model, tokenizer)
        own = getattr(tokenizer, "chat_template", None)
        # What the config gives is the tokenizer's by now; else the processor's own knows best about images.
        self._template = own
        if not model.chat_template and self._prompts.chat_template:
            self._template = with_arguments(
                self._prompts.chat_template,
                section.chat_template_args,
                of=f"the processor of {model.path!r}",
                special=tuple(tokenizer.special_tokens_map),
            )
        if self._template is None and not self._raw:
            raise ModelError(
                f"neither the processor nor the tokenizer of {model.path!r} has a chat template, so that messages "
                "can't become a prompt",
                hint="set model.chat_template to a template or its file",
            )

    def __call__(self, row: RawRow) -> Rendered:
        """Read the row's images and make its prompt.

        Raises:
            DataError: an image is missing, broken or not one that the model takes; or the template does not write one
                placeholder for each.
        """
        found = tuple(image.read(row.folder) for image in row.images)
        pictures = [
            open_image(image.data, _name(image, number)) for number, image in enumerate(found)
        ]
        ids = self._prompts.ids(self._text(row), pictures)
        return Rendered(ids, found, ids.count(self._prompts.image_token or -1))

    def _text(self, row: RawRow) -> str:
        if isinstance(row.prompt, str) and self._raw:
            text = row.prompt.replace(PLACEHOLDER, self._prompts.placeholder)
        else:
            text = str(
                self._tokenizer.apply_chat_template(
                    _messages(row),
                    chat_template=self._template,
                    add_generation_prompt=True,
                    tokenize=False,
                )
            )
        written = text.count(self._prompts.placeholder)
        if written != len(row.images):
            raise ModelError(
                f"the chat template writes {written} times {self._prompts.placeholder!r} for {len(row.images)} images",
                hint="set model.chat_template to one that knows parts of type 'image'",
            )
        return text


def _messages(row: RawRow) -> list[dict[str, Any]]:
    if not isinstance(row.prompt, str):
        return row.prompt
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(row.prompt.split(PLACEHOLDER)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return [{"role": "user", "content": parts}]


def _name(image: FoundImage, number: int) -> str:
    return f"image {number}" + (f" ({str(image.path)!r})" if image.path is not None else "")
