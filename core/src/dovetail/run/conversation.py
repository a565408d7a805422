"""A conversation with a model, of which every turn is generated from the whole of it so far."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from dovetail.data.prompts import check_template
from dovetail.errors import RequestRefusedError
from dovetail.interfaces.plugin import Tokenizer
from dovetail.interfaces.rollout import RolloutRequest
from dovetail.random_streams import SampleStream
from dovetail.run.generation import answer
from dovetail.stages.sampling import training_sampling

if TYPE_CHECKING:
    from dovetail.experience.rollout_pool import RolloutPool
    from dovetail.sections import RunConfig


class Conversation:
    """Messages of user and assistant in turn.

    Args:
        config: says how to sample.
        tokenizer: with a chat template.

    Raises:
        ModelError: it has none.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        check_template(tokenizer, config.model)
        self._config, self._tokenizer = config, tokenizer
        self._messages: list[dict[str, str]] = []

    def reply(self, pool: RolloutPool, text: str) -> str:
        """Return the model's answer to a text, which both become part of the conversation.

        Raises:
            RequestRefusedError: the conversation and an answer are longer than the model's context.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        rendered = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        ids = self._tokenizer(rendered, add_special_tokens=False)["input_ids"]
        stream = SampleStream(
            seed=self._config.seed,
            purpose="chat",
            epoch=0,
            prompt=0,
            sample=0,
            attempt=0,
            turn=len(messages) // 2,
        )
        request = RolloutRequest(
            request_id=f"chat.{stream.turn}",
            prompt_ids=np.asarray(ids, dtype=np.int64),
            sampling=training_sampling(self._config),
            streams=(stream,),
        )
        try:
            [completion] = asyncio.run(answer(pool, request))
        except RequestRefusedError as error:
            error.hint = error.hint or "begin a new conversation, or lower data.max_response_length"
            raise
        found = str(
            self._tokenizer.decode(completion.response_ids.tolist(), skip_special_tokens=True)
        )
        self._messages = [*messages, {"role": "assistant", "content": found}]
        return found
