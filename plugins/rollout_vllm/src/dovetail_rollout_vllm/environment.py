"""The environment of vLLM's processes: environment variables, and the log file to which they print."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from dovetail.errors import ConfigError
from dovetail.interfaces import PluginContext
from dovetail.workers import environment_variables, turn_path
from dovetail_datasets import read_config
from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_rollout_vllm.versions import RUNNER_VARIABLE, V2_PASSED, VLLM
from dovetail_rollout_vllm.worker import LOG_VARIABLE, OWNER_VARIABLE, TURN_VARIABLE
from dovetail_serving import visible_devices

TOKEN_VARIABLE = "DOVETAIL_VLLM_TOKEN"  # noqa: S105 - the name of a variable
"""Environment variable of a server with the bearer token that requests must carry."""

_V2_ARGUMENTS = frozenset({"max_num_batched_tokens", "attention_backend", "kv_cache_memory_bytes"})
"""Engine arguments with which vLLM's model runner v2 passed the tests of `V2_PASSED`. If the user sets any other argument, vLLM chooses
the model runner."""

_FORMAT = "%(levelname)s %(asctime)s [%(name)s %(process)d] %(message)s"
_STARTING = threading.Lock()
"""Lock for the environment variables, which all replicas in one process share."""


def turn_of(context: PluginContext) -> Path | None:
    """Return the lock file on which a replica's processes wait while training models load; None outside a run."""
    directory = context.run_directory
    return None if directory is None else turn_path(Path(directory).resolve())


@contextmanager
def process_environment(
    config: VllmRolloutConfig, context: PluginContext, log: Path
) -> Iterator[Callable[[], None]]:
    """Set, within the block, the environment variables that vLLM's processes inherit from this process; one replica at a time does so.

    Yields a function that restores this process's variables before the block ends, so that the next replica can start.
    """
    with tempfile.TemporaryDirectory(prefix="dovetail-vllm-") as scratch, ExitStack() as held:
        held.enter_context(_STARTING)
        logging_config = Path(scratch) / "logging.json"
        logging_config.write_text(json.dumps(_logging_to(log)))
        wanted = variables(config, context, log)
        wanted.setdefault("VLLM_LOGGING_CONFIG_PATH", str(logging_config))
        held.enter_context(environment_variables(wanted))
        yield held.close


def _logging_to(log: Path) -> dict[str, Any]:
    """Return vLLM's logging config: all output goes to one file, to which several processes append."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": _FORMAT}},
        "handlers": {
            "log": {"class": "logging.FileHandler", "formatter": "plain", "filename": str(log)}
        },
        "loggers": {"vllm": {"handlers": ["log"], "level": "INFO", "propagate": False}},
    }


def print_to(log: Path) -> None:
    """Redirect vLLM's logger in this process to a log file. Call this function after vLLM is imported."""
    logger = logging.getLogger("vllm")
    handler = logging.FileHandler(log, encoding="utf-8")
    handler.setFormatter(logging.Formatter(_FORMAT))
    for old in list(logger.handlers):
        logger.removeHandler(old)
        if isinstance(old, logging.FileHandler):
            old.close()
    logger.addHandler(handler)
    logger.propagate = False


def variables(config: VllmRolloutConfig, context: PluginContext, log: Path) -> dict[str, str]:
    """Return the environment variables to add for vLLM's processes."""
    return {**_unless_set(config, context), **_always(config, context, log)}


def _unless_set(config: VllmRolloutConfig, context: PluginContext) -> Mapping[str, str]:
    defaults = {
        # No data on the run is sent to vLLM's developers.
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # A process with threads and an accelerator can't be forked.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(config.start_timeout)),
    }
    if config.engine_args.get("distributed_executor_backend") != "ray":
        defaults["VLLM_HOST_IP"] = "127.0.0.1"
    if not torch.accelerator.is_available():
        defaults["VLLM_CPU_KVCACHE_SPACE"] = "1"
        shares = _cores_of(config.ranks_per_replica())
        if shares is not None:
            defaults["VLLM_CPU_OMP_THREADS_BIND"] = shares
    if config.model_runner == "auto" and RUNNER_VARIABLE not in os.environ:
        runner = model_runner(config, context)
        if runner is not None:
            defaults[RUNNER_VARIABLE] = runner
    return {name: value for name, value in defaults.items() if name not in os.environ}


def _always(config: VllmRolloutConfig, context: PluginContext, log: Path) -> Mapping[str, str]:
    found = {OWNER_VARIABLE: str(os.getpid()), LOG_VARIABLE: str(log)}
    turn = turn_of(context)
    if turn is not None:
        found[TURN_VARIABLE] = str(turn)
    if config.model_runner != "auto":
        found[RUNNER_VARIABLE] = str(model_runner(config, context))
    if torch.accelerator.is_available() and torch.device(context.device).index:
        from vllm.platforms import current_platform

        variable = current_platform.device_control_env_var
        found |= visible_devices(config.ranks_per_replica(), context, variable)
    return found


def _cores_of(workers: int) -> str | None:
    """Divide this process's cores evenly among vLLM's CPU workers; return the value of VLLM_CPU_OMP_THREADS_BIND.

    None leaves the choice to vLLM: for a single worker, or on a system where Python can't list a process's cores.
    """
    if workers == 1 or not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    each = max(len(cores) // workers, 1)
    shares = [cores[(i * each) % len(cores) :][:each] for i in range(workers)]
    return "|".join(",".join(map(str, share)) for share in shares)


def model_runner(config: VllmRolloutConfig, context: PluginContext) -> str | None:
    """Return the value of VLLM_USE_V2_MODEL_RUNNER (0 or 1) for a replica; None leaves the choice of the model runner to vLLM.

    Raises:
        ConfigError: the installed vLLM lacks the configured model runner.
    """
    if config.model_runner != "auto":
        if not VLLM.defines("vllm.envs", RUNNER_VARIABLE):
            raise ConfigError(
                f"rollout.model_runner={config.model_runner} can't be used: {VLLM.installed()} has only one model runner; {VLLM.tried}",
                hint="leave rollout.model_runner out",
            )
        return str(int(config.model_runner == "v2"))
    release = VLLM.installed()
    models = None if release is None else V2_PASSED.get(release.number.release[:2])
    tried = config.ranks_per_replica() == 1 and _V2_ARGUMENTS.issuperset(config.engine_args)
    if not models or not tried or not torch.accelerator.is_available() or context.model is None:
        return None
    return "1" if models.intersection(read_config(context.model).architectures or ()) else None
