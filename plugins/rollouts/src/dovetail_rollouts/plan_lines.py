"""The lines of `dovetail plan` about generation and scoring, with their memory and weight updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from dovetail.interfaces import BYTES, ON_REQUEST, MemoryRules, PlanFacts, PlannedPart, PlanNote
from dovetail.planning import Plan
from dovetail.sections import EngineSection, RunConfig
from dovetail_datasets import read_shape
from dovetail_rollouts.columns import BASELINE, LOSS_MASK, OF_REWARDS, columns_of
from dovetail_rollouts.measured_run import Forecast, schedule_of

BETWEEN_MACHINES, WITHIN_MACHINE, HOST_MEMORY, FILES = 25e9, 30e9, 5e9, 1e9
"""Assumed bytes a second of a weight update: over a 200 Gb/s network, between accelerators of one machine with digests (36e9 were
measured on one H200), through host memory, and over a shared disk."""


def planned_parts(facts: PlanFacts) -> Iterator[PlannedPart]:
    """Yield the parts of a step before its stages: rollout, greedy baselines, rewards and filters."""
    config, required, columns = facts.config, facts.required, columns_of(facts)
    rollout = facts.plugins["rollout"].ref.name
    asked = sorted(columns & ON_REQUEST.keys())
    yield PlannedPart(
        name="rollout",
        who=rollout,
        because="every step" + "".join(f"; {column}: {required[column]}" for column in asked),
        provides=columns - OF_REWARDS - {BASELINE, LOSS_MASK},
    )
    if BASELINE in columns:
        yield PlannedPart(
            name="baseline",
            who=f"{rollout}, greedy",
            because=f"required by {required[BASELINE]}",
            provides=frozenset({BASELINE}),
        )
    yield PlannedPart(
        name="reward",
        who=facts.plugins["reward.manager"].ref.name,
        because="every step",
        provides=OF_REWARDS,
    )
    filters = [
        plugin.ref.name
        for path, plugin in facts.plugins.items()
        if path.startswith("algorithm.sample_filters[")
    ]
    if filters:
        rounds = config.algorithm.max_generation_rounds
        again = f"; up to {rounds} rounds of generation" if rounds > 1 else ""
        yield PlannedPart(
            name="filter",
            who=", ".join(filters),
            because=f"algorithm.sample_filters{again}",
            provides=columns & {LOSS_MASK},
        )


def cache_tokens(plan: Plan) -> int:
    """Return the largest number of tokens in a replica's KV cache: its share of all outstanding samples, each at full length."""
    data, schedule = plan.facts.config.data, schedule_of(plan)
    samples = -(-schedule.most_outstanding * schedule.samples // schedule.replicas)
    return samples * (data.max_prompt_length + data.max_response_length)


def generation_memory(config: RunConfig, plan: Plan) -> Iterator[tuple[str, int]]:
    """Yield each purpose for which the engines on a rank need memory, with the bytes. See `read_shape` for errors."""
    shape, width = read_shape(config.model), BYTES[config.model.dtype] * _engines_a_rank(plan)
    ranks = max(1, config.rollout.ranks_per_replica())
    yield "rollout weights", -(-shape.parameters // ranks) * width
    # Pipeline stages divide the layers. Tensor parallelism divides the KV heads; with more ranks than heads, heads are copied.
    tensor = min(ranks, getattr(config.rollout, "tensor_parallel_size", ranks))
    parts = max(1, ranks // tensor) * max(1, min(tensor, shape.kv_heads))
    each = -(-shape.cached_per_token // parts)
    yield "kv cache, at most", each * width * cache_tokens(plan)


def _engines_a_rank(plan: Plan) -> int:
    """Return the number of replicas on one accelerator: all if the run is one process, otherwise one."""
    return plan.placement.source.replicas if plan.facts.config.runtime.in_process else 1


def generation_rules(plan: Plan) -> MemoryRules:
    """Return how the memory of an accelerator is divided between the rollout's engines and the trainer's models."""
    rollout = plan.facts.config.rollout
    key, share = rollout.memory_share() or ("", None)
    can_sleep = "sleep" in plan.facts.plugins["rollout"].cls.capabilities
    return MemoryRules(
        sleeps=rollout.offload,
        sleep_key="rollout.offload" if can_sleep else None,
        share=share,
        engines=_engines_a_rank(plan),
        bounded=rollout.bounds_cache,
        share_key=f"rollout.{key}",
    )


def whole_updates(plan: Plan) -> bool:
    """Return whether the actor sends all weights, and not only an adapter for a base model that the rollout reads from disk."""
    engines = [model.engine.config for model in plan.models if model.role == "actor"]
    return all(isinstance(e, EngineSection) and e.weight_kind() == "full" for e in engines)


@attrs.frozen(kw_only=True)
class WeightUpdate:
    """The size of one weight update of the rollout in bytes, and its estimated duration."""

    bytes: int
    seconds: Mapping[str, float]
    """Estimated seconds of an update by name of the transport: first the chosen one, then others that the placement allows."""

    def __str__(self) -> str:
        """Return size and times of the update as text, with the assumed rates."""
        ways = ", ".join(f"{seconds:.2g} s by {way}" for way, seconds in self.seconds.items())
        rates = f"{WITHIN_MACHINE / 1e9:g} GB/s within a machine, {BETWEEN_MACHINES / 1e9:g} between machines"
        return (
            f"weights, each update: {self.bytes / 1e9:.3g} GB, about {ways} (assumed: {rates}, {HOST_MEMORY / 1e9:g} "
            f"through host memory, {FILES / 1e9:g} through files)"
        )


def weight_update(config: RunConfig, plan: Plan) -> WeightUpdate | None:
    """Estimate size and duration of a weight update; None without updates, or within one process. See `read_shape` for errors."""
    chosen = plan.refs.get("rollout.weight_transport")
    if chosen is None or chosen.name == "in_process":
        return None
    shape, engine = read_shape(config.model), plan.facts.engine("actor").config
    numbers, shards = shape.parameters, 1
    trainer, rollout = plan.placement.pool("actor"), plan.placement.pool("rollout")
    if isinstance(engine, EngineSection):
        shards = engine.shards(trainer.ranks)
        if engine.weight_kind() == "adapter":
            numbers = shape.adapter_parameters(engine.planned_adapter())
    size = numbers * BYTES[config.model.dtype]
    # The first rank of a machine gathers all shards of a tensor, those of other machines over the network.
    gathered = size / BETWEEN_MACHINES if shards > trainer.ranks_per_node else 0.0
    replicas = plan.placement.source.replicas
    ways = {"disk": size * (1 + replicas) / FILES}
    several = max(trainer.nodes, rollout.nodes) > 1
    if trainer == rollout and not plan.placement.source.joined:
        ways["shared_memory"] = size / HOST_MEMORY
        if trainer.accelerators:
            ways["cuda_ipc"] = size / WITHIN_MACHINE
    else:
        ways["nccl"] = size / (BETWEEN_MACHINES if several else WITHIN_MACHINE)
    order = sorted(ways, key=lambda way: (way != chosen.name, ways[way]))
    return WeightUpdate(bytes=size, seconds={way: ways[way] + gathered for way in order})


def generated_ahead(plan: Plan) -> Iterator[PlanNote]:
    """Yield how far generation may run ahead of training, and what a weight update does to running responses; nothing if on-policy."""
    rollout = plan.facts.config.rollout
    if not (steps := plan.facts.age):
        return
    schedule = schedule_of(plan)
    if rollout.keep_cache:
        meanwhile = "keeps running responses and their caches"
    elif rollout.partial_rollout:
        meanwhile = "interrupts running responses, which continue under the new weights"
    else:
        meanwhile = "waits for running responses"
    every = "step" if schedule.sync_every == 1 else f"{schedule.sync_every} steps"
    yield PlanNote(
        name="generated_ahead",
        text=f"generated ahead: at most {schedule.most_outstanding:,} prompts outstanding; samples up to {steps} "
        f"step{'' if steps == 1 else 's'} old; new weights every {every}: their publication {meanwhile}",
        value={
            "prompts": schedule.most_outstanding,
            "steps": steps,
            "sync_every": schedule.sync_every,
        },
    )


def forecast_note(found: Forecast) -> PlanNote:
    """Return a note with the run's measurements, the predictions for the run and for the plan, and the assumptions."""
    own = found.own.step_seconds / found.measured.step_seconds - 1
    spread = f" ({found.low:.3g} to {found.high:.3g})" if found.high > found.low else ""
    table = [
        (f"FROM {found.steps} STEPS", "SECONDS A STEP", "TRAINER WAITS", "ROLLOUT IDLE"),
        *(
            (
                name,
                f"{part.step_seconds:.3g}{more}",
                f"{part.trainer_waits:.0%}",
                f"{part.rollout_idle:.0%}",
            )
            for name, part, more in (
                ("the run, measured", found.measured, ""),
                ("the run, predicted", found.own, f" ({own:+.0%})"),
                ("this plan, predicted", found.predicted, spread),
            )
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)
    return PlanNote(
        name="forecast",
        text="\n".join([*rows, *(f"assumed: {sentence}" for sentence in found.assumed)]),
        value=attrs.asdict(found),
        warnings=tuple(
            f"the run differs in {key}, which the prediction ignores" for key in found.differing
        ),
    )
