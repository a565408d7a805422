"""Conversion of a sample's call to a `/v1/completions` request, and of the streamed response to arrays.

Requests have the fields of `CompletionRequest`, and responses those of `CompletionStreamResponse`, both in TensorRT-LLM's
`tensorrt_llm/serve/openai_protocol.py` (at 0076e939). TensorRT-LLM's server refuses unknown fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from dovetail.errors import RequestRefusedError, RolloutError
from dovetail.interfaces import FinishReason
from dovetail_serving import SampleCall, SampleResult

_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "cancelled": FinishReason.ABORT,
}


def request_of(call: SampleCall, model: str) -> dict[str, Any]:
    """Return the body of a request for one sample.

    Args:
        call: the sample's call; its stop tokens include the end-of-sequence tokens.
        model: the server's name for its model.
    """
    sampling = call.sampling
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(call.prompt_ids),
        "max_tokens": sampling.max_new_tokens,
        "temperature": float(sampling.temperature),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        # Also for stop tokens: the token that ends a response is part of it.
        "include_stop_str_in_output": True,
        "add_special_tokens": False,
        # Token ids are returned only in place of text.
        "detokenize": False,
        # Streamed, so that an aborted sample keeps the tokens so far.
        "stream": True,
    }
    if sampling.temperature > 0:
        body |= {"top_p": float(sampling.top_p), "top_k": max(sampling.top_k, 0)}
    return body


class TokenStream:
    """Collects the tokens of one sample from the server's streamed response.

    Args:
        call: the sample.
        decode: a function from token ids to text, with which this class finds stop strings, since the server returns no text; None
            if the run has no tokenizer.

    Attributes:
        aborted: whether the sample was ended early; set by the caller.
    """

    def __init__(self, call: SampleCall, decode: Callable[[list[int]], str] | None) -> None:
        self.aborted = False
        self._sampling, self._decode = call.sampling, decode
        self._ids: list[int] = []
        self._reason: FinishReason | None = None
        # A character consists of at most four tokens, one for each byte.
        self._window = 4 * (max(map(len, self._sampling.stop), default=0) + 1)
        if self._sampling.stop and decode is None:
            raise RequestRefusedError("stop strings need the run's tokenizer, but the run has none")

    def take(self, line: str) -> bool:
        """Process one line of the server's stream, and return whether to read further lines.

        Raises:
            RolloutError: the server ended the sample for an unknown reason.
        """
        if not line.startswith("data: ") or line.startswith("data: [DONE]"):
            return True
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            for token in choice["token_ids"] or []:
                self._ids.append(token)
                if self._at_stop_string():
                    self._reason = FinishReason.STOP
                    return False
            finish_reason = choice["finish_reason"]
            if finish_reason is not None and finish_reason not in _REASONS:
                raise RolloutError(
                    f"TensorRT-LLM returned finish_reason {finish_reason!r}; expected {' or '.join(_REASONS)}"
                )
            self._reason = _REASONS.get(finish_reason, self._reason)
        return True

    def result(self) -> SampleResult:
        """Return the sample; after an abort, with the tokens so far.

        Raises:
            RolloutError: the server's stream ended before the sample was complete.
        """
        reason = self._reason or (FinishReason.ABORT if self.aborted else None)
        if reason is None:
            raise RolloutError("TensorRT-LLM's answer ended without a finish_reason")
        return SampleResult(response_ids=np.array(self._ids, dtype=np.int64), finish_reason=reason)

    def _at_stop_string(self) -> bool:
        if not self._sampling.stop or self._decode is None:
            return False
        text = self._decode(self._ids[-self._window :])
        return any(stop in text for stop in self._sampling.stop)
