"""RemoteSandbox: runs programs by a sandbox service over HTTP, with SandboxFusion's interface `POST /run_code`."""

from __future__ import annotations

import base64
import http.client
import json
import time
from typing import Any, Final
from urllib.parse import urlsplit

from dovetail_rewards.sandbox.errors import SandboxError, SandboxUnreachableError
from dovetail_rewards.sandbox.values import MIB, Program, ProgramLimits, ProgramVerdict, Result
from dovetail_rewards.urls import without_secrets

_RETRYABLE: Final = frozenset({408, 425, 429, *range(500, 600)})
_SLACK_S = 10.0
"""Seconds that the service may take in addition to the program's limit."""
_MOST_ANSWER = 64 * MIB


class RemoteSandbox:
    """Runs programs on a sandbox service, which enforces the limits sent with each request.

    Args:
        url: the address of the service, such as `http://sandbox:8080`; `/run_code` is added to an address without a path.
        headers: the headers of each request, such as an authorization.

    Raises:
        SandboxError: the address is not http or https.
    """

    def __init__(self, url: str, *, headers: dict[str, str] | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SandboxError(
                f"sandbox service {url!r} is not an HTTP address",
                hint="set `service` to an address such as http://sandbox:8080",
            )
        secure = parts.scheme == "https"
        self._connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path if parts.path not in ("", "/") else "/run_code"
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self.url = url

    def run(self, program: Program, limits: ProgramLimits) -> Result:
        """Run a Python program on the service and return the result.

        Raises:
            SandboxUnreachableError: the service did not answer, is overloaded or failed; a retry may succeed.
            SandboxError: the service refused the request, or its answer is invalid.
        """
        if program.source is None or program.channel is not None:
            raise SandboxError(
                "a sandbox service can't run this program: it accepts only Python source, neither a command (`argv`) nor a socket (`channel`)"
            )
        answer = self._post(
            {
                "code": program.source,
                "language": "python",
                "stdin": program.stdin.decode("utf-8", "replace"),
                "compile_timeout": limits.wall,
                "run_timeout": limits.wall,
                "memory_limit_MB": limits.memory // MIB,
                "files": {
                    name: base64.b64encode(data).decode() for name, data in program.files.items()
                },
                "fetch_files": [],
            },
            limits.wall + _SLACK_S,
        )
        return _result(answer, limits, without_secrets(self.url))

    def cancel(self, program: Program) -> None:
        """Do nothing: the service can't cancel a program, and ends it at its time limit."""

    def _post(self, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        began = time.monotonic()
        connection = self._connect(self._host, self._port, timeout=timeout)
        try:
            connection.request("POST", self._path, json.dumps(body), self._headers)
            response = connection.getresponse()
            status, data = response.status, response.read(_MOST_ANSWER)
        except (OSError, http.client.HTTPException) as error:
            waited = time.monotonic() - began
            raise SandboxUnreachableError(
                f"sandbox service {without_secrets(self.url)} gave no answer within {waited:.1f} s: {error!r}",
                hint="check that the service runs and that this machine can reach it",
            ) from error
        finally:
            connection.close()
        if status in _RETRYABLE:
            raise SandboxUnreachableError(
                f"sandbox service {without_secrets(self.url)} failed with HTTP status {status}: {_shown(data)}"
            )
        try:
            answer = json.loads(data) if status == http.client.OK else None
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise SandboxError(
                f"sandbox service {without_secrets(self.url)} answered with HTTP status {status} and {_shown(data)}; "
                "expected status 200 and a JSON object"
            )
        return answer


def _result(answer: dict[str, Any], limits: ProgramLimits, url: str) -> Result:
    """Return the program's result from the service's answer."""
    status, run = answer.get("status"), answer.get("run_result")
    if status == "SandboxError":
        raise SandboxUnreachableError(
            f"sandbox service {url} failed: {answer.get('message') or 'no message'}"
        )
    if status not in ("Success", "Failed") or not isinstance(run, dict):
        raise SandboxError(
            f"sandbox service {url} answered with status {status!r} and run_result {run!r}; "
            "expected status Success or Failed and a mapping as run_result"
        )
    stdout = str(run.get("stdout") or "").encode()
    stderr = str(run.get("stderr") or "").encode()
    code = run.get("return_code")
    return Result(
        verdict=_verdict(run, code, stderr, too_much=len(stdout) > limits.output, url=url),
        exit_status=code if isinstance(code, int) and code >= 0 else None,
        signal=-code if isinstance(code, int) and code < 0 else None,
        stdout=stdout[: limits.output],
        stderr=stderr[-(1 << 14) :],
        cpu_s=float(run.get("execution_time") or 0.0),
        wall_s=float(run.get("execution_time") or 0.0),
    )


def _verdict(
    run: dict[str, Any], code: object, stderr: bytes, *, too_much: bool, url: str
) -> ProgramVerdict:
    if run.get("status") == "TimeLimitExceeded":
        return ProgramVerdict.TIMEOUT
    if run.get("status") != "Finished" or not isinstance(code, int):
        raise SandboxUnreachableError(
            f"sandbox service {url} could not run a program; it answered with run_result {run!r}"
        )
    if too_much:
        return ProgramVerdict.OUTPUT_LIMIT
    if code == 0:
        return ProgramVerdict.OK
    last = stderr.rstrip().rpartition(b"\n")[2]
    ended = ProgramVerdict.FAILED if code > 0 else ProgramVerdict.CRASHED
    return ProgramVerdict.MEMORY if last.startswith(b"MemoryError") else ended


def _shown(data: bytes) -> str:
    return data[:200].decode("utf-8", "replace").strip() or "nothing"
