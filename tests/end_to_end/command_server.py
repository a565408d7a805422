"""Runs the `dovetail` command in processes that are forked from this one, which has imported what a run needs.

Most of a command on a tiny model is imports. Reads orders from standard input, one line of JSON each: `{"args", "cwd",
"env", "output"}` starts a command, whose output goes to the files OUTPUT.out and OUTPUT.err, and prints its process id;
with `"kill": [POINT, CALL, "before" | "after"]`, the command kills itself around that call (counted from 1) of the function
POINT, `module:qualified.name`. `{"wait": PID}` waits for a command and prints its exit code, negative for a signal. A command that
hangs ends before the test does, and its error output shows where each of its threads is.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import json
import os
import signal
import sys
from operator import attrgetter
from typing import Any

from dovetail.cli.main import main

LATE = 600.0
"""Seconds after which a command counts as hanging: fewer than pytest gives a test."""
IMPORTED = (
    "dovetail.cli.train",
    "dovetail.config.load",
    "dovetail.run.build",
    "dovetail.run.examination",
    "dovetail.run.run",
    "dovetail_stages.update_actor",
    "dovetail_rollouts.transports.in_process",
    "dovetail_algorithms.losses",
    "dovetail_report.page",
    "dovetail_rewards.managers.naive",
    "dovetail_rollout_hf.rollout",
    "dovetail_train_fsdp2.engine",
    "dovetail_train_megatron.preflight",
    "transformers.models.qwen2.modeling_qwen2",
)


def serve() -> None:
    """Follow orders until there are none; in a forked process: run the command."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            answer = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
        else:
            answer = os.fork()
            if not answer:
                run(order)
        print(answer, flush=True)


def run(order: dict[str, Any]) -> None:
    """Become the command; does not return."""
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    seen = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in seen if path and path not in sys.path]
    files = (os.devnull, f"{order['output']}.out", f"{order['output']}.err")
    for number, name in enumerate(files):
        file = os.open(name, (os.O_WRONLY if number else os.O_RDONLY) | os.O_CREAT, 0o644)
        os.dup2(file, number)
        os.close(file)
    faulthandler.dump_traceback_later(LATE, exit=True)
    if "kill" in order:
        kill_at(*order["kill"])
    main(order["args"], prog_name="dovetail")
    sys.exit(0)


def kill_at(point: str, call: int, when: str) -> None:
    """Have this process killed around a call of a function, as if the machine failed there."""
    module, _, name = point.partition(":")
    place, _, attribute = name.rpartition(".")
    owner = importlib.import_module(module)
    owner = attrgetter(place)(owner) if place else owner
    function = getattr(owner, attribute)
    calls = 0

    @functools.wraps(function)
    def killing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        last = calls == call
        if last and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, attribute, killing)


if __name__ == "__main__":
    for module in IMPORTED:
        importlib.import_module(module)
    gc.freeze()  # A collection in a command looks at none of it, and copies no page of it.
    serve()
