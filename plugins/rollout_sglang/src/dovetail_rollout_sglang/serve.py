"""`python -m dovetail_rollout_sglang.serve JSON`: an SGLang server with Dovetail's paths.

The argument is a JSON object of SGLang's `ServerArgs`, such as `{"model_path": "Qwen/Qwen2.5-0.5B", "port": 30000}`. Runs start the
same server. If the environment variable `DOVETAIL_SGLANG_TOKEN` is set, all paths but SGLang's health and metrics require its value
as bearer token.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import sys
import threading
from collections.abc import Collection, Mapping
from multiprocessing import resource_tracker
from typing import Any

from dovetail.errors import ConfigError, nearest
from dovetail_rollout_sglang.environment import TOKEN_VARIABLE
from dovetail_rollout_sglang.hooks import SERVED_VARIABLE


def main(argument: str) -> None:
    """Run an SGLang server with Dovetail's routes until the process ends.

    Args:
        argument: a JSON object of SGLang's server arguments.

    Raises:
        PluginNeedsError: SGLang is missing, or this plugin does not support its version.
        ConfigError: SGLang does not have one of the arguments.
    """
    end_at_once_when_asked()
    from dovetail_rollout_sglang.versions import require

    require()
    os.environ[SERVED_VARIABLE] = "1"
    # A health check that generates would wait while a scheduler receives weights, and report the server as unhealthy.
    os.environ.setdefault("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "false")
    given = json.loads(argument)
    if given.get("device") == "cpu":
        # SGLang chooses its kernels when it is imported, before it reads this argument.
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.launch_server import run_server
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils import kill_process_tree

    from dovetail_rollout_sglang.routes import SglangRoutes

    arguments = server_args(given)
    # SGLang would send itself the request to freeze garbage over HTTP, before it listens and without the token. `SglangHost` does
    # this when a run connects.
    http_server._freeze_gc_after_server_warmup = lambda *_: None  # noqa: SLF001
    http_server.app.add_middleware(SglangRoutes)
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def end_at_once_when_asked() -> None:
    """Start a thread that ends this process and all its children on SIGTERM; the children themselves ignore the signal.

    If the children handled SIGTERM, schedulers would end first, and SGLang would treat that as a crash: it waits, and dumps its state.
    Call this function before starting child processes or threads: they inherit that the signal is blocked.
    """
    # Started here, because starting the tracker, as the first child process would, unblocks the signal.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        signal.sigwait({signal.SIGTERM})
        import psutil  # type: ignore[import-untyped]

        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        os._exit(0)

    threading.Thread(target=wait, name="dovetail-end", daemon=True).start()


def server_args(arguments: dict[str, Any]) -> Any:
    """Construct SGLang's `ServerArgs` from arguments by name.

    Raises:
        ConfigError: SGLang does not have one of the arguments.
    """
    from sglang.srt.server_args import ServerArgs

    from dovetail_rollout_sglang.versions import settle_grpc

    known = set(inspect.signature(ServerArgs).parameters)
    guarded = bool(os.environ.get(TOKEN_VARIABLE))
    settle_grpc(os.environ, arguments.get("port", 0), known, guarded=guarded)
    return ServerArgs(**settled(arguments, known, guarded=guarded))


def settled(
    arguments: Mapping[str, Any], known: Collection[str], *, guarded: bool
) -> dict[str, Any]:
    """Return a server's arguments under the names of the installed SGLang version.

    Args:
        arguments: the arguments, under their oldest names or the names of this version.
        known: the argument names of this version.
        guarded: whether the server requires a token. If so, SGLang's warm-up is skipped: it sends no token, and its refusal would
            end the server.

    Raises:
        ConfigError: SGLang does not have one of the arguments.
    """
    from dovetail_rollout_sglang.versions import in_this_versions_words

    found = in_this_versions_words(arguments, known)
    for name in found:
        if name not in known:
            close = meant(name, known)
            raise ConfigError(
                f"rollout.engine_args: SGLang has no server argument {name!r}",
                hint=f"did you mean {close!r}?"
                if close
                else "see the fields of SGLang's ServerArgs",
            )
    return {"skip_server_warmup": True, **found} if guarded else found


def meant(name: str, known: Collection[str]) -> str | None:
    """Return the argument most likely meant by an unknown name: `tp_size` for `tp`, else the most similar name; None if none is similar."""
    size = f"{name}_size"
    return size if size in known else nearest(name, known)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit('usage: python -m dovetail_rollout_sglang.serve \'{"model_path": …, "port": …}\'')
    main(sys.argv[1])
