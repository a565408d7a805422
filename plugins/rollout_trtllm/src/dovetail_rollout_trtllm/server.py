"""The server of a replica: `python -m dovetail_rollout_trtllm.server --arguments JSON`. An engine, and what it answers over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import uvicorn

from dovetail.serving import shape_of
from dovetail_rollout_trtllm.driver import Driver
from dovetail_rollout_trtllm.engine_imports import make_engine, openai_app, start_ray
from dovetail_rollout_trtllm.host import TrtllmHost
from dovetail_rollout_trtllm.server_app import DovetailRoutes, OwnPaths
from dovetail_rollout_trtllm.versions import require

log = logging.getLogger("dovetail.trtllm")


_NEEDED = (
    "model",
    "dtype",
    "tensor_parallel_size",
    "trust_remote_code",
    "skip_tokenizer_init",
    "ray_worker_extension_cls",
)
"""Arguments of an engine that a rollout asks about when it joins."""


def main(words: Sequence[str] | None = None) -> None:
    """Start an engine and serve it until the process is ended."""
    parser = _parser()
    told = parser.parse_args(words)
    arguments: dict[str, Any] = json.loads(told.arguments)
    if lacking := [name for name in _NEEDED if name not in arguments]:
        parser.error(
            f"--arguments lacks {', '.join(lacking)}: a run whose rollout.urls name this server prints the whole command"
        )
    logging.basicConfig(
        level=logging.INFO, format="%(levelname)s %(asctime)s [%(name)s] %(message)s"
    )
    require()
    # Those of the run, where the replica is one of its actors, would lead to the run's own cluster.
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]
    os.environ |= {
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Tensors of an update are handed over on one stream, and are to be read on the same.
        "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",
    }
    start_ray(int(arguments["tensor_parallel_size"]))
    asyncio.run(serve(arguments, host=told.host, port=told.port, openai=told.openai))


async def serve(arguments: Mapping[str, Any], *, host: str, port: int, openai: bool) -> None:
    """Serve an engine.

    Args:
        arguments: of `engine_args.engine_arguments`.
        host: address to listen on.
        port: port to listen on.
        openai: whether TensorRT-LLM's own paths are served too.
    """
    engine = make_engine(arguments)
    try:
        await engine.setup_async()
        driver = Driver(engine, sleeps=arguments.get("sleep_config") is not None)
        facts = model_facts(arguments)
        below = openai_app(engine, str(arguments["model"])) if openai else None
        app = DovetailRoutes(OwnPaths(driver, below), lambda: TrtllmHost(driver, arguments, facts))
        settings = uvicorn.Config(
            app, host=host, port=port, access_log=False, log_level="warning", lifespan="on"
        )
        log.info("TensorRT-LLM serves %s at http://%s:%s", arguments["model"], host, port)
        await uvicorn.Server(settings).serve()
    finally:
        engine.shutdown()


def model_facts(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Architecture and shape of the model, from its config: what a rollout that joins compares with its own."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        arguments["model"],
        revision=arguments.get("revision"),
        trust_remote_code=arguments["trust_remote_code"],
    )
    return {
        "architectures": list(config.architectures or ()),
        "shape": shape_of(config.get_text_config()),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Serve TensorRT-LLM for Dovetail rollouts.")
    parser.add_argument("--arguments", required=True, help="JSON of the engine's arguments")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--openai", action="store_true", help="serve TensorRT-LLM's own paths too")
    return parser


if __name__ == "__main__":
    main()
