"""Sampling parameters of the stand-in: those that are used, with the real defaults."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
    logprobs_mode: LogprobMode = LogprobMode.RAW
    top_k: int | None = None
    top_p: float | None = None
    temperature: float | None = None
    logprobs: int | None = None
    return_context_logits: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
