"""Images in calls to servers: they are sent as references, and never to engines without support for images."""

from __future__ import annotations

from dovetail.interfaces import MediaRef, SamplingParams
from dovetail_serving import SampleCall
from dovetail_serving.frames import unpack
from dovetail_serving.messages import calls_of, packed_calls


def test_references_arrive_with_their_calls_and_text_is_as_ever() -> None:
    images = tuple(MediaRef(digest=f"{i:064x}", path=f"/data/{i}.png") for i in range(2))
    sampling = SamplingParams(max_new_tokens=2)
    calls = {
        name: SampleCall(call_id=name, prompt_ids=[1, 2], sampling=sampling, media=media)
        for name, media in (("with", images), ("without", ()))
    }
    arrived = calls_of(unpack(packed_calls(calls)))
    assert [call.media for call in arrived] == [images, ()]
    alone = unpack(packed_calls({"without": calls["without"]}))
    assert "media" not in alone.header
