"""How the samples of a step are generated and scored, as `dovetail plan` prints it, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.interfaces.rollout import ON_REQUEST
from dovetail.interfaces.source import PlannedPart
from dovetail.interfaces.stage import PlanFacts
from dovetail.planning.model_shape import BYTES, read_shape
from dovetail.planning.plan import Plan
from dovetail.rollouts.columns import BASELINE, LOSS_MASK, OF_REWARDS, columns_of
from dovetail.sections import RunConfig


def planned_parts(facts: PlanFacts) -> Iterator[PlannedPart]:
    """Yield rollout, greedy baselines, rewards, filters."""
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


def generation_memory(config: RunConfig, plan: Plan) -> Iterator[tuple[str, int]]:
    """Yield what a rank of a replica's engine takes, in bytes by purpose. For errors see `read_shape`."""
    shape, width = read_shape(config.model), BYTES[config.model.dtype]
    ranks = max(1, config.rollout.ranks_per_replica())
    yield "rollout weights", -(-shape.parameters // ranks) * width
    longest = config.data.max_prompt_length + config.data.max_response_length
    samples = -(-plan.counts.samples_per_step // plan.placement.source.replicas)
    # Stages have layers of their own; what is divided beside them, down to one head, is heads.
    tensor = min(ranks, getattr(config.rollout, "tensor_parallel_size", ranks))
    parts = max(1, ranks // tensor) * max(1, min(tensor, shape.kv_heads))
    each = -(-shape.cached_per_token // parts)
    yield "kv cache, at most", each * width * longest * samples
