"""Dovetail's code in vLLM's processes: registers the weight-transfer engine `dovetail`, and names the worker's methods that operate it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from dovetail.workers import await_turn

OWNER_VARIABLE = "DOVETAIL_VLLM_OWNER"
"""Environment variable with the process id of the rollout; set only in processes that a rollout started."""
LOG_VARIABLE = "DOVETAIL_VLLM_LOG"
"""Environment variable with the log file to which vLLM's processes print."""
TRANSFER_ENGINE = "dovetail"
"""The name of the weight-transfer engine (vLLM's argument `weight_transfer_config`)."""
TURN_VARIABLE = "DOVETAIL_VLLM_TURN"
"""Environment variable with the lock file (`dovetail.workers.loading`) on which vLLM's processes wait before they measure memory."""
WORKER_EXTENSION = "dovetail_rollout_vllm.worker_methods.WorkerMethods"
"""Value of vLLM's argument `worker_extension_cls`."""

_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Register the weight-transfer engine `dovetail`; vLLM calls this function in each of its processes.

    A process that a rollout started also redirects its output to the rollout's log, and ends with the rollout.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if TRANSFER_ENGINE not in WeightTransferEngineFactory._registry:  # noqa: SLF001 - registering twice is an error
        WeightTransferEngineFactory.register_engine(
            TRANSFER_ENGINE, "dovetail_rollout_vllm.transfer_engine", "DovetailTransferEngine"
        )
    owner = os.environ.get(OWNER_VARIABLE)
    if owner is not None and owner != str(os.getpid()):
        _end_with_parent()
        _print_to(os.environ.get(LOG_VARIABLE))
        turn = os.environ.get(TURN_VARIABLE)
        if turn:
            await_turn(Path(turn))


def _end_with_parent() -> None:
    """Make the kernel end this process when its parent ends. On systems other than Linux do nothing, and rely on vLLM's own monitoring."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _print_to(path: str | None) -> None:
    if not path:
        return
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
