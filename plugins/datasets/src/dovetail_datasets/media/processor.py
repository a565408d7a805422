"""Loads the processors of a vision-language model: the image processor, and the processor that expands placeholders in prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dovetail.errors import DataError, ModelError
from dovetail.sections import ModelSection
from dovetail_datasets.models.classes import image_token_of, takes_images
from dovetail_datasets.models.config import read_config

_UNLOADABLE = (
    OSError,
    ValueError,
    ImportError,
    RuntimeError,
    LookupError,
    TypeError,
    AttributeError,
)
"""Errors that transformers raises for processors that can't be loaded."""


def load_image_processor(section: ModelSection) -> Any:
    """Return a model's image processor: based on torchvision if installed, as in vLLM, else on Pillow. The pixels of the two differ in
    their last bits.

    Raises:
        ModelError: the model has no image processor, or it can't be loaded.
    """
    # transformers 5.17 exports this class at the top level only if torchvision is installed, which the class does not need.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    path = str(Path(section.path).expanduser())
    options = {"revision": section.revision, "trust_remote_code": section.trust_remote_code}
    try:
        return AutoImageProcessor.from_pretrained(path, **options)
    except _UNLOADABLE as error:
        raise ModelError(
            f"the image processor of {section.path!r} can't be loaded: {type(error).__name__}: {_first_line(error)}",
            hint="if preprocessor_config.json is not beside config.json, save it there with "
            "image_processor.save_pretrained(directory)",
        ) from error


class ImagePrompts:
    """Tokenises a prompt's text and images: each image's placeholder is repeated to the image's number of tokens.

    Args:
        section: the model.
        tokenizer: the tokenizer of the run.

    Raises:
        ModelError: the model takes no images, or its processors can't be loaded.
    """

    def __init__(self, section: ModelSection, tokenizer: Any) -> None:
        config = _config_of(section)
        if not takes_images(config):
            raise ModelError(
                f"the data has images, but the model {section.path!r} ({type(config).__name__}) takes none: "
                "its config has no vision tower",
                hint="set model.path to a vision-language model, or leave the rows with images out",
            )
        self.image_token = image_token_of(config)
        """Id of the placeholder token, int; an image has one placeholder for each of its embeddings."""
        self._processor = _processor_of(section, config, tokenizer)
        self._apart = False
        """Whether the model separates images by the tokens between them; set when the first prompt is made."""

    @property
    def placeholder(self) -> str:
        """The text of the image placeholder in a prompt without a chat template."""
        return str(self._processor.image_token)

    @property
    def chat_template(self) -> str | None:
        """The processor's own chat template."""
        template = getattr(self._processor, "chat_template", None)
        return template if isinstance(template, str) else None

    def ids(self, text: str, pictures: Sequence[Any]) -> list[int]:
        """Tokenise one prompt.

        Args:
            text: the text with one placeholder for each image, special tokens included.
            pictures: PIL images in order; empty for text alone.

        Returns:
            Token ids, with every placeholder repeated to its image's number of tokens.

        Raises:
            DataError: the processor can't take an image.
        """
        try:
            made = self._processor(
                text=[text], images=list(pictures) or None, add_special_tokens=False
            )
        except (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError) as error:
            sizes = ", ".join(f"{p.width} × {p.height}" for p in pictures)
            raise DataError(
                f"the model's processor {type(self._processor).__name__} refused the row's images ({sizes} pixels): {error}",
                hint="scale the images, or remove the row",
            ) from error
        ids = [int(token) for token in made["input_ids"][0]]
        self._apart = "mm_token_type_ids" in made
        self._check_runs(ids, len(pictures))
        return ids

    def expanded(
        self, answers: Sequence[Sequence[Sequence[int]]], pictures: Sequence[Any]
    ) -> list[list[list[int]]]:
        """Expand the placeholders of tokenised texts.

        Args:
            answers: for each text, the token ids of its parts (such as prompt and response), in which one token stands for each image.
            pictures: PIL images; every text shows all of them, in this order.

        Returns:
            The token ids, with every placeholder repeated to its image's number of tokens.

        Raises:
            DataError: see `ids`.
        """
        made = [self.ids(self.placeholder, [picture]) for picture in pictures]
        expanded = []
        for parts in answers:
            images = iter(made)
            expanded.append(
                [
                    [
                        i
                        for id_ in part
                        for i in (next(images) if id_ == self.image_token else [id_])
                    ]
                    for part in parts
                ]
            )
            self._check_runs([i for part in expanded[-1] for i in part], len(pictures))
        return expanded

    def _check_runs(self, ids: Sequence[int], images: int) -> None:
        runs = placeholder_runs(ids, self.image_token)
        if self._apart and runs != images:
            raise DataError(
                f"the row has {images} image(s), but {runs} run(s) of consecutive image placeholders (token {self.image_token}): "
                "this model needs text between two images",
                hint="write text between two images, or the model's own tokens for the beginning and the end of an image",
            )


def placeholder_runs(ids: Sequence[int], token: int | None) -> int:
    """Count the runs of consecutive copies of a token; the placeholders of two images with no text between them form one run."""
    return sum(
        here == token and (place == 0 or ids[place - 1] != token) for place, here in enumerate(ids)
    )


def _config_of(section: ModelSection) -> Any:
    try:
        return read_config(section)
    except _UNLOADABLE as error:
        raise ModelError(
            f"the config of {section.path!r} can't be loaded: {_first_line(error)}",
            hint="set model.path to a directory in Hugging Face format, or to a hub id",
        ) from error


def _processor_of(section: ModelSection, config: object, tokenizer: object) -> Any:
    """Make the model's processor with the run's tokenizer and image processor.

    `from_pretrained` would also make the video processor, which needs torchvision. The processor is therefore constructed without
    it, by a subclass that does not check that all parts are given.
    """
    from transformers import AutoProcessor, ProcessorMixin
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    images = load_image_processor(section)
    path = str(Path(section.path).expanduser())
    options = {"revision": section.revision, "trust_remote_code": section.trust_remote_code}
    try:
        known = PROCESSOR_MAPPING.get(type(config), None)
        if known is None:
            made = AutoProcessor.from_pretrained(path, **options)
        else:
            settings, _ = ProcessorMixin.get_processor_dict(path, revision=section.revision)
            unchecked = type(
                known.__name__, (known,), {"check_argument_for_proper_class": lambda *_: None}
            )
            parts = {"image_processor": images, "tokenizer": tokenizer}
            for name in (*parts, "video_processor", "processor_class", "auto_map"):
                settings.pop(name, None)
            made = unchecked(**parts, **settings)
    except _UNLOADABLE as error:
        raise ModelError(
            f"the processor of {section.path!r} can't be loaded: {type(error).__name__}: {_first_line(error)}",
            hint="save the processor beside the model with processor.save_pretrained(directory)",
        ) from error
    made.tokenizer, made.image_processor = tokenizer, images
    return made


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
