"""Converts rows with images to prompts, by the chat template and the model's processor, which expands each image's placeholder."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

from dovetail.errors import ModelError
from dovetail.interfaces import Tokenizer
from dovetail.sections import DataSection, ModelSection
from dovetail_datasets.chat_template import with_arguments
from dovetail_datasets.encoding import TextEncoder, unmarked, with_beginning
from dovetail_datasets.images import PLACEHOLDER, FoundImage, RawImage
from dovetail_datasets.media.images import open_image
from dovetail_datasets.media.processor import ImagePrompts
from dovetail_datasets.schema import RawRow


class Rendered(NamedTuple):
    """A prompt's token ids, with image placeholders expanded, and its images."""

    ids: list[int]
    images: tuple[FoundImage, ...]
    image_tokens: int = 0
    """The number of image placeholder tokens."""


class ImageRenderer:
    """Turns rows with images into token ids.

    Args:
        tokenizer: the tokenizer of the run.
        section: the data section, with the handling of prompts that are plain text (`data.plain_prompts`).
        model: the model whose processor counts an image's tokens.

    Raises:
        ModelError: the model takes no images, or messages have to be rendered and there is no template.
        ConfigError: the processor's template does not read an argument that `section` gives.
    """

    def __init__(self, tokenizer: Tokenizer, section: DataSection, model: ModelSection) -> None:
        self._raw = section.plain_prompts == "raw"
        self._prompts = ImagePrompts(model, tokenizer)
        self._checked = False
        """Whether the tokens of one example were already compared with the processor's tokens for the same prompt."""
        # A template from the config is already set in the tokenizer. Otherwise the processor's template is the one made for images.
        template = getattr(tokenizer, "chat_template", None)
        if not model.chat_template and self._prompts.chat_template:
            template = with_arguments(
                self._prompts.chat_template,
                section.chat_template_args,
                of=f"the processor of {model.path!r}",
                special=tuple(tokenizer.special_tokens_map),
            )
        if template is None and not self._raw:
            raise ModelError(
                f"neither the processor nor the tokenizer of {model.path!r} has a chat template, so messages "
                "can't be rendered as a prompt",
                hint="set model.chat_template to a template or the path of a template file",
            )
        templated = copy(tokenizer)
        templated.chat_template = template
        self.encoder = TextEncoder(templated, section.control_tokens)
        """Encoder with the run's tokenizer and the chat template for rows with images."""

    def __call__(self, row: RawRow) -> Rendered:
        """Read the row's images and make the row's prompt.

        Raises:
            DataError: an image is missing, broken or refused by the model's processor.
            ModelError: the template does not write one placeholder for each image.
        """
        found, pictures = self._read(row.images, row.folder)
        text = self._text(row)
        if text == unmarked(text):
            self._check_written(text.count(self._prompts.placeholder), len(row.images))
            ids = self._prompts.ids(text, pictures)
        else:  # the processor would expand placeholders that the row's text spells
            parts = self.encoder.ids([text])
            self._check_written(parts[0].count(self.image_token), len(row.images))
            [[ids]] = self._prompts.expanded([parts], pictures)
        return Rendered(ids, found, ids.count(self.image_token))

    @property
    def image_token(self) -> int:
        """The id of the image placeholder token; −1 if the model has none."""
        return self._prompts.image_token or -1

    def raw(self, text: str) -> str:
        """Return a text for use without a chat template: each `<image>` becomes the model's image placeholder."""
        return text.replace(PLACEHOLDER, self._prompts.placeholder)

    def expanded(
        self,
        answers: Sequence[list[list[int]]],
        prompt: str,
        images: Sequence[RawImage],
        folder: str | None,
    ) -> tuple[list[list[list[int]]], tuple[FoundImage, ...]]:
        """Read an example's images and expand their placeholders.

        Args:
            answers: the token ids of each answer with its prompt, in parts; the first part is the prompt.
            prompt: the prompt's text.
            images: the images of the row.
            folder: see `RawImage.read`.

        Returns:
            The answers with each placeholder repeated to its image's number of tokens, and the images.

        Raises:
            DataError: see `__call__`.
            ModelError: the template does not write one placeholder for each image, or the processor's tokens
                for a prompt with images differ from those for its text and its images, processed separately.
        """
        found, pictures = self._read(images, folder)
        for parts in answers:
            self._check_written(sum(part.count(self.image_token) for part in parts), len(images))
        made = self._prompts.expanded(answers, pictures)
        shown = answers[0][0].count(self.image_token)
        if shown and not self._checked and prompt == unmarked(prompt):
            (first, *_) = made
            if self._prompts.ids(prompt, pictures[:shown]) != first[0]:
                raise ModelError(
                    "for a prompt with images, the model's processor returns other token ids than the tokenizer returns for its text "
                    "with expanded image placeholders, so the tokens of prompt and answer can't be separated",
                    hint="remove the rows with images, or use another model",
                )
            self._checked = True
        return made, found

    def _read(
        self, images: Sequence[RawImage], folder: str | None
    ) -> tuple[tuple[FoundImage, ...], list[Any]]:
        found = tuple(image.read(folder) for image in images)
        return found, [open_image(image.data, _name(image, i)) for i, image in enumerate(found)]

    def _check_written(self, written: int, images: int) -> None:
        if written != images:
            raise ModelError(
                f"the chat template wrote the image placeholder {self._prompts.placeholder!r} {written} time(s); expected {images}, one for each image",
                hint="set model.chat_template to a template that renders parts of type 'image'",
            )

    def _text(self, row: RawRow) -> str:
        if isinstance(row.prompt, str) and self._raw:
            return with_beginning(self.encoder.tokenizer, self.raw(row.prompt))
        (text,) = self.encoder.prompts([(row.messages, row.tools)])
        return text


def _name(image: FoundImage, number: int) -> str:
    return f"image {number}" + (f" ({str(image.path)!r})" if image.path is not None else "")
