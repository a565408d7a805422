"""Conversion of a sample's call to a request, and of the server's answer to a sample."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from dovetail.errors import RequestRefusedError, RolloutError
from dovetail.interfaces import FinishReason, RolloutRequest, SamplingParams
from dovetail.random_streams import SampleStream
from dovetail_rollout_trtllm.calls import TokenStream, request_of
from dovetail_rollout_trtllm.rollout import TrtllmRollout
from dovetail_serving import SampleCall

PROMPT = (7, 8, 9)


def call(**sampling: Any) -> SampleCall:
    params = SamplingParams(**{"max_new_tokens": 8, **sampling})
    return SampleCall(call_id="c", prompt_ids=list(PROMPT), sampling=params)


def chunk(ids: list[int], reason: str | None = None) -> str:
    choice = {"index": 0, "text": "", "token_ids": ids, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}"


def sample(rollout: TrtllmRollout, **sampling: Any) -> Any:
    request = RolloutRequest(
        request_id="r",
        prompt_ids=np.array(PROMPT, np.int64),
        sampling=SamplingParams(**{"max_new_tokens": 8, "ignore_eos": True, **sampling}),
        streams=(SampleStream(seed=1),),
    )

    async def only() -> Any:
        return await anext(aiter(rollout.submit(request)))

    return asyncio.run(only())


def test_a_greedy_sample_is_asked_for_without_truncation() -> None:
    body = request_of(call(temperature=0.0, top_p=0.5, top_k=7), "tiny")
    assert body["temperature"] == 0
    assert not {"top_p", "top_k"} & body.keys()
    assert request_of(call(top_p=0.5), "tiny")["top_k"] == 0  # 0 means all tokens


def test_stop_strings_end_a_sample_and_are_part_of_it(replica: TrtllmRollout) -> None:
    decode = replica.context.tokenizer.decode
    free = sample(replica, temperature=0.0)
    text = decode(free.response_ids[:3])
    # A stop string that is the text of one token, and one that spans several tokens.
    for stop in (decode(free.response_ids[2:3]), text[1:]):
        stopped = sample(replica, temperature=0.0, stop=(stop,))
        assert len(stopped.response_ids) <= 3
        assert stop in decode(stopped.response_ids)
        assert stopped.finish_reason is FinishReason.STOP


def test_a_stop_string_within_one_chunk_cuts_the_tokens_after_it() -> None:
    stream = TokenStream(call(stop=("b",)), lambda ids: "".join(map(chr, ids)))
    assert not stream.take(chunk([97, 98, 99]))
    assert stream.result().response_ids.tolist() == [97, 98]
    with pytest.raises(RolloutError, match="tokenizer"):
        TokenStream(call(stop=("b",)), None)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((chunk([5]), "data: [DONE]"), "without a finish_reason"),
        ((chunk([5], "tired"),), "'tired'"),
    ],
)
def test_an_answer_that_is_not_a_whole_sample_is_an_error(
    lines: tuple[str, ...], message: str
) -> None:
    stream = TokenStream(call(), None)

    def read() -> None:
        for line in lines:
            stream.take(line)
        stream.result()

    with pytest.raises(RolloutError, match=message):
        read()


def test_a_refused_request_is_an_error_with_the_servers_message(replica: TrtllmRollout) -> None:
    long = SampleCall(call_id="c", prompt_ids=[7] * 5000, sampling=SamplingParams(max_new_tokens=1))
    with pytest.raises(
        RequestRefusedError, match="status 400: The prompt length 5000 exceeds 4096"
    ):
        asyncio.run(replica.backend.generate(long))
    assert replica.alive()
    assert len(sample(replica).response_ids) == 8
