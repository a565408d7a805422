"""Sampling parameters of the stand-in: those that are used, with the real defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class LogprobMode(StrEnum):
    """Of which distribution log-probabilities are."""

    RAW = "raw"
    PROCESSED = "processed"


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """What is asked for; an unknown name is an error."""

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    _stop_word_ids: list[list[int]] | None = field(default=None, init=False, repr=False)
    logprobs_mode: LogprobMode = LogprobMode.RAW
    top_k: int | None = None
    top_p: float | None = None
    temperature: float | None = None
    logprobs: int | None = None
    return_context_logits: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    skip_special_tokens: bool = True

    def _setup(
        self,
        tokenizer: Any,
        hf_model_config: Any,
        generation_config: Any,
        add_special_tokens: bool = False,
    ) -> SamplingParams:
        """Take the end from the tokenizer where none is said, and make tokens of stop strings."""
        if self.end_id is None:
            self.end_id = tokenizer.eos_token_id
        if self.stop is not None:
            words = [self.stop] if isinstance(self.stop, str) else self.stop
            self._stop_word_ids = [
                tokenizer.encode(word, add_special_tokens=add_special_tokens) for word in words
            ]
        return self

    def stop_words(self) -> list[list[int]]:
        """Of the stand-in: what ends a sample, by its tokens."""
        if self.stop is not None and self._stop_word_ids is None:
            raise RuntimeError(
                f"SamplingParams.stop ({self.stop}) is not processed by tokenizer, please call the setup method."
            )
        return [[token] for token in self.stop_token_ids or ()] + (self._stop_word_ids or [])
