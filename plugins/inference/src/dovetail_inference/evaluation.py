"""Evaluation of a model outside of its run: the samples and metrics are those of a validation in the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from dovetail.errors import ConfigError
from dovetail.interfaces import PluginContext, Prompt, Sample, Tokenizer
from dovetail.plugins import make_plugin, ref_for
from dovetail.sections import RunConfig
from dovetail_datasets import read_prompts, read_tokenizer
from dovetail_inference.models import ModelSource, serving
from dovetail_inference.served import ModelServer, ServedRollout, check_template
from dovetail_rollouts import (
    RolloutPool,
    RolloutService,
    Scorer,
    chat_tools,
    check_sources,
    configured_functions,
    held_out_samples,
    running_episodes,
    validation_metrics,
)


def evaluate(
    config: RunConfig, source: ModelSource, server: ModelServer | None = None
) -> tuple[dict[str, float], list[Sample]]:
    """Generate and score `rollout.validation.n` samples for each prompt of `data.val_files`.

    Args:
        config: the result of `source.load_config`.
        source: the model.
        server: the server that generates; by default the config's engine.

    Returns:
        The metrics of `validation_metrics`, and the samples.

    Raises:
        ConfigError: the config names no held-out files, or the server's chat template differs from the run's.
        DovetailError: data, rewards or the engine failed.
    """
    if not config.data.val_files:
        raise ConfigError(
            "data.val_files is empty; expected at least one file to evaluate on",
            hint="set data.val_files=path/to/test.parquet",
        )
    tokenizer = read_tokenizer(config)
    tools = chat_tools(config, tokenizer)
    prompts = read_prompts(config, tokenizer, config.data.val_files, tools=tools).prompts
    functions = configured_functions(config.reward, PluginContext(seed=config.seed))
    check_sources(functions, prompts)
    if server is not None:
        check_template(config, server, prompts, tools)
    with _replicas(config, source, tokenizer, server) as (pool, context):
        samples = _samples(config, pool, context, prompts, functions)
    how = config.rollout.validation
    metrics = validation_metrics(
        samples, how.n, seed=config.seed, pass_threshold=how.pass_threshold
    )
    return metrics, samples


@contextmanager
def _replicas(
    config: RunConfig, source: ModelSource, tokenizer: Tokenizer, server: ModelServer | None
) -> Iterator[tuple[RolloutPool, PluginContext]]:
    if server is None:
        with source.on_disk(config) as model, serving(config, model, tokenizer) as served:
            yield served
    else:
        context = PluginContext(seed=config.seed, tokenizer=tokenizer, model=config.model)
        yield RolloutPool([ServedRollout(server, context)]), context


def _samples(
    config: RunConfig,
    pool: RolloutPool,
    context: PluginContext,
    prompts: Sequence[Prompt],
    functions: Any,
) -> list[Sample]:
    with running_episodes(config, context, context.logger) as episodes:
        manager: Any = make_plugin(
            ref_for("reward_manager", config.reward.manager),
            attrs.evolve(context, model=config.model, reward_functions=functions),
        )
        try:
            manager.start()
            service = RolloutService(
                pool=pool,
                manager=manager,
                scorer=Scorer(
                    manager,
                    timeout=config.reward.timeout,
                    retries=config.reward.retries,
                    concurrency=config.reward.concurrency,
                ),
                tokenizer=context.tokenizer,
                seed=config.seed,
                episodes=episodes,
                check_stop=lambda: None,
            )
            try:
                return held_out_samples(config, prompts, service)
            finally:
                service.close()
        finally:
            manager.close()
