"""A scoring service on the loopback interface, which answers like `failing_reward` or by a function of the test."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from dovetail_sdk.testing.failing_reward import compute_score
from dovetail_sdk.testing.fake_server import FakeServer, reply

Answer = Callable[[Any, dict[str, str]], tuple[int, Any]]
"""A function from a request's JSON and headers to a status and a body: a JSON value, or bytes that are sent unchanged."""


def score_rows(request: Any, headers: dict[str, str]) -> tuple[int, Any]:  # noqa: ARG001 - an Answer gets both
    """Score each row of a request with `failing_reward`; a row that fails gets `{"error": …}` instead of a score.

    If scoring a row raises ConnectionError, the whole request gets status 503.
    """
    results: list[Any] = []
    for row in request["samples"]:
        try:
            results.append(
                compute_score(
                    row["data_source"], row["solution_str"], row["ground_truth"], row["extra_info"]
                )
            )
        except ConnectionError:
            return 503, "no judge"
        except (Exception, SystemExit) as error:  # noqa: BLE001 - reported, whatever it is
            results.append({"error": f"{type(error).__name__}: {error}"})
    return 200, {"results": results}


@contextlib.contextmanager
def reward_service(answer: Answer = score_rows) -> Iterator[tuple[str, list[Any]]]:
    """Run a scoring service during the context; yield its address and the list of received requests."""
    requests: list[Any] = []

    def score(request: Any) -> None:
        question = json.loads(request.body)
        requests.append(question)
        status, value = answer(question, dict(request.headers))
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        with contextlib.suppress(OSError):  # the client no longer waits
            reply(request, status, content)

    with FakeServer() as server:
        server.answers["*"] = score
        yield f"{server.url}/score", requests
