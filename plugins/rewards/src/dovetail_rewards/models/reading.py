"""The input of a reward model: a sample's prompt and response as token ids of the model's tokenizer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from dovetail.errors import ConfigError, RewardError
from dovetail.interfaces import Sample, Tokenizer
from dovetail_datasets import TextEncoder
from dovetail_rollouts import conversation_ids


@attrs.frozen(kw_only=True, eq=False)
class Reading:
    """One text for a reward model, with T tokens."""

    ids: tuple[int, ...]
    """Token ids, [T]."""
    segments: tuple[int, ...] | None = None
    """Segment ids, [T]: 0 for the prompt and 1 for the response; None if the tokenizer has no segments."""
    truncated: bool = False
    """Whether the text was truncated."""
    steps: tuple[int, ...] = ()
    """Positions in `ids` of the tokens at which steps are judged."""


class Reader:
    """Turns prompts and responses into a reward model's tokens; thread-safe.

    Args:
        config: the model's config, of which `format`, `chat_template`, `max_length` and, in a `RewardModelConfig`, `overlong` are used.
        tokenizer: the model's own tokenizer.
        limit: the model's token limit; None for no limit.

    Raises:
        ConfigError: `format` is `chat`, and neither the config nor the tokenizer has a chat template.
    """

    without_chat = "format=pair for a model that reads two segments"
    """The setting that an error suggests if there is no chat template."""

    def __init__(self, config: Any, tokenizer: Tokenizer, limit: int | None) -> None:
        self._config = config
        self._limit = config.max_length or limit
        self._lock = threading.Lock()  # fast tokenizers are not thread-safe
        if config.chat_template is not None:
            tokenizer.chat_template = template_text(config.chat_template)
        if config.format == "chat" and not tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer of reward model {config.model!r} has no chat template",
                hint=f"set chat_template, or {self.without_chat}",
            )
        self._encoder = TextEncoder(tokenizer)

    def read(self, sample: Sample) -> Reading:
        """Return the tokens of a sample's prompt and response.

        Raises:
            RewardError: the text has no tokens, or too many while `overlong` is `fail`.
        """
        with self._lock:
            ids, segments = (
                self._pair(sample) if self._config.format == "pair" else self._chat(sample)
            )
        if not ids:
            raise RewardError(
                f"sample {sample.sample_id} can't be scored: its prompt and response have no tokens for the reward model"
            )
        limit = self._limit
        if limit is None or len(ids) <= limit:
            return Reading(ids=tuple(ids), segments=segments)
        if self._config.overlong == "fail":
            raise self._too_long(sample, len(ids), ", or set overlong=keep_end")
        kept = slice(-limit, None) if self._config.overlong == "keep_end" else slice(limit)
        return Reading(
            ids=tuple(ids[kept]),
            segments=None if segments is None else segments[kept],
            truncated=True,
        )

    def _too_long(self, sample: Sample, length: int, more: str = "") -> RewardError:
        return RewardError(
            f"prompt and response of sample {sample.sample_id} have {length} tokens; the reward model takes at most {self._limit}",
            hint=f"shorten responses, or raise `max_length` if the model allows it{more}",
        )

    def _chat(self, sample: Sample) -> tuple[list[int], None]:
        return conversation_ids(self._encoder, sample.prompt.raw, sample.text), None

    def _pair(self, sample: Sample) -> tuple[list[int], tuple[int, ...] | None]:
        pair = (self._encoder.given(t) for t in (plain_text(sample.prompt.raw), sample.text))
        [found] = self._encoder.encodings(
            *([text] for text in pair), add_special_tokens=True, truncation=False, verbose=False
        )
        segments = found.get("token_type_ids")
        return found["input_ids"], None if segments is None else tuple(segments)


def plain_text(prompt: Any) -> str:
    """Return a prompt as one text: a string unchanged, a single message's content, or several messages, each after its role."""
    if isinstance(prompt, str):
        return prompt
    turns: Sequence[Any] = list(prompt)
    if len(turns) == 1:
        return str(turns[0]["content"])
    return "\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)


def template_text(text: str) -> str:
    """Return a chat template's text: `text` itself if it has a brace or several lines, else the content of the file at this path.

    Raises:
        ConfigError: the file can't be read.
    """
    if "{" in text or "\n" in text:
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"chat_template={text!r} is neither a Jinja template nor a readable file: {error}",
            hint="set chat_template to the template's text, or to the path of its file",
        ) from error
