"""The server of a replica: what it answers, who may join it, and how it dies. The engine is the stand-in."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from dovetail.errors import RolloutError
from dovetail.interfaces import RolloutRequest, SamplingParams
from dovetail.random_streams import SampleStream
from dovetail_rollout_trtllm.backend import TrtllmBackend
from dovetail_rollout_trtllm.rollout import TrtllmRollout
from dovetail_rollout_trtllm.surroundings import TOKEN_VARIABLE
from dovetail_sdk.testing.conformance.rollout.plain import PlainModel, manifest_of
from dovetail_sdk.testing.fake_server import words_of
from dovetail_sdk.testing.replicas import send_weights

pytestmark = pytest.mark.usefixtures("stand_in")


@pytest.fixture(scope="module", autouse=True)
def _first_update(replica: TrtllmRollout, tiny: Path) -> None:
    """It has started on random weights: those on disk are its first update."""
    weights = PlainModel.of(tiny).weights()
    assert replica.context.transport is not None
    sender = replica.context.transport.sender()
    try:
        send_weights(replica, sender, manifest_of(1, weights), weights.items())
    finally:
        sender.close()


def _url(replica: TrtllmRollout) -> str:
    backend = replica.backend
    assert isinstance(backend, TrtllmBackend)
    return backend.url


def _token(replica: TrtllmRollout) -> str:
    connection: Any = replica.backend._connection  # type: ignore[attr-defined]
    return str(connection._http.headers["authorization"].removeprefix("Bearer "))


def _greedy(rollout: TrtllmRollout, prompt: tuple[int, ...], **sampling: Any) -> Any:
    request = RolloutRequest(
        request_id="r",
        prompt_ids=np.array(prompt, np.int64),
        sampling=SamplingParams(
            **{"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling}
        ),
        streams=(SampleStream(seed=1),),
    )

    async def only() -> Any:
        return await anext(aiter(rollout.submit(request)))

    return asyncio.run(only())


def test_stop_strings_end_a_sample_and_are_part_of_it(replica: TrtllmRollout, tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(tiny))
    free = _greedy(replica, (7, 8, 9))
    text = tokenizer.decode(free.response_ids[:3])
    # By its own token, and across tokens of which it is none.
    for stop in (tokenizer.decode(free.response_ids[2:3]), text[1:]):
        stopped = _greedy(replica, (7, 8, 9), stop=(stop,))
        assert len(stopped.response_ids) <= 3
        assert stop in tokenizer.decode(stopped.response_ids)
        assert stopped.finish_reason.value == "stop"


def test_the_engines_own_paths_are_replica_beside_but_not_those_for_weights(
    replica: TrtllmRollout,
) -> None:
    url = _url(replica)
    assert httpx2.get(f"{url}/v1/models").json()["data"]
    assert httpx2.get(f"{url}/health").status_code == 200
    for path in ("/update_weights", "/release_memory", "/resume_memory"):
        assert httpx2.post(f"{url}{path}", json={"weights": {}}).status_code == 403
    assert httpx2.post(f"{url}/dovetail/v1/describe").status_code == 401


def test_another_replica_may_join_with_the_token_and_leaves_it_running(
    replica: TrtllmRollout, context: Any, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"mode": "server", "urls": (_url(replica),), "tensor_parallel_size": 2}
    monkeypatch.setenv(TOKEN_VARIABLE, _token(replica))
    guest = TrtllmRollout(config(**settings), context())
    guest.start()
    joined = _greedy(guest, (7, 8, 9))
    guest.close()
    np.testing.assert_array_equal(joined.response_ids, _greedy(replica, (7, 8, 9)).response_ids)
    monkeypatch.setenv(TOKEN_VARIABLE, "another")
    with pytest.raises(RolloutError, match="another token"):
        TrtllmRollout(config(**settings), context()).start()


def test_a_server_that_does_not_fit_is_refused_with_all_that_is_wrong(
    replica: TrtllmRollout, context: Any, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, _token(replica))
    other = config(mode="server", urls=(_url(replica),), offload=True)
    with pytest.raises(RolloutError) as refused:
        TrtllmRollout(other, context()).start()
    assert "its ranks is 2, not 1" in str(refused.value)
    assert "sleep_config" in str(refused.value)
    assert "dovetail_rollout_trtllm.server" in (refused.value.hint or "")


def test_where_no_server_or_another_one_answers_it_is_said(
    context: Any, config: Any, fake_server: Any
) -> None:
    nobody = config(mode="server", urls=("http://127.0.0.1:9",))
    with pytest.raises(RolloutError, match="no server answers"):
        TrtllmRollout(nobody, context()).start()
    stranger = config(mode="server", urls=(fake_server.url,))
    with pytest.raises(RolloutError, match="no paths for Dovetail"):
        TrtllmRollout(stranger, context()).start()
    fake_server.answers["/dovetail/v1/describe"] = words_of({"hello": "whoever asks"})
    with pytest.raises(RolloutError, match="no paths for Dovetail"):
        TrtllmRollout(stranger, context()).start()


def test_a_server_that_dies_fails_what_runs_with_the_end_of_what_it_printed(
    replica: TrtllmRollout,
) -> None:
    """The last test of this module with the replica: nothing answers after it."""
    own: Any = replica.backend._own  # type: ignore[attr-defined]
    server = own._process._guard.pid
    for _ in ("the guarding process", "the server"):
        server = int(Path(f"/proc/{server}/task/{server}/children").read_text().split()[0])

    def kill() -> None:
        while not replica._gate.running:
            time.sleep(0.01)
        time.sleep(0.2)  # on its way there, it would not be in the middle of anything
        os.kill(server, signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    with pytest.raises(RolloutError, match="has died"):
        _greedy(replica, (7, 8, 9), max_new_tokens=2000)
    killing.join()
    assert not replica.alive()
    run_directory = replica.context.run_directory
    assert run_directory is not None
    assert (run_directory / "logs" / "rollout-0.trtllm.log").is_file()
