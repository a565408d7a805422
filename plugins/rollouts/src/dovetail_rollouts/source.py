"""The source `rollouts`: scored samples that the policy generates for the prompts of a dataset."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import attrs

from dovetail.errors import ConfigError, DataError, DovetailError, PlanError
from dovetail.interfaces import (
    ON_REQUEST,
    Experience,
    ExperienceSource,
    Finding,
    Key,
    Measure,
    MemoryRules,
    PlanFacts,
    PlannedPart,
    PlanNote,
    Plugin,
    PluginConfig,
    PluginContext,
    PluginRef,
    RowVerdict,
    Runtime,
    Selection,
    Site,
    SourceData,
    StepAsk,
    StepContext,
    StepRows,
    Tokenizer,
    WorkerSpec,
)
from dovetail.planning import Plan
from dovetail.plugins import make_plugin
from dovetail.sections import PluginSection, Pool
from dovetail_datasets import load_prompt_data, read_tokenizer
from dovetail_rollouts.collector import RolloutCollector
from dovetail_rollouts.columns import columns_of, lacks
from dovetail_rollouts.episodes import chat_tools, running_episodes
from dovetail_rollouts.measured_run import forecast, read_run
from dovetail_rollouts.placement import (
    ROLLOUT,
    TRANSPORT,
    RolloutPlacement,
    default_transport,
    place_rollout,
)
from dovetail_rollouts.plan_lines import (
    cache_tokens,
    forecast_note,
    generated_ahead,
    generation_memory,
    generation_rules,
    planned_parts,
    weight_update,
    whole_updates,
)
from dovetail_rollouts.pool_commands import PoolCommands, adding_to
from dovetail_rollouts.pool_socket import served
from dovetail_rollouts.rollout_pool import RolloutPool
from dovetail_rollouts.rollout_service import RolloutService
from dovetail_rollouts.sample_files import KeptSamples, shown
from dovetail_rollouts.scoring.functions import configured_functions
from dovetail_rollouts.scoring.rows import check_sources, functions_found_by_rows, unused_functions
from dovetail_rollouts.scoring.scorer import Scorer
from dovetail_rollouts.scoring.trial import TrialSample, samples_of, score_samples, verdict
from dovetail_rollouts.validation import Accuracy, held_out_samples, unscored, validation_metrics
from dovetail_rollouts.weight_check import WeightCheck
from dovetail_rollouts.weight_sync import WeightSync


class RolloutsSource(ExperienceSource):
    """Generates samples on replicas of a rollout engine, and scores each sample while others still generate."""

    name = "rollouts"
    api = ">=2.2,<3"
    roles = (ROLLOUT,)
    on_request = frozenset(ON_REQUEST)

    @classmethod
    def selects(cls, config: PluginConfig, facts: PlanFacts) -> Mapping[str, Selection]:
        rollout, reward = facts.config.rollout, facts.config.reward
        loop = rollout.agent_loop or PluginSection(name="single_turn")
        return {
            ROLLOUT: ("rollout", rollout),
            "rollout.agent_loop": ("agent_loop", loop),
            TRANSPORT: (
                "weight_transport",
                rollout.weight_transport or PluginSection(name=default_transport(facts.config)),
            ),
            **{
                f"algorithm.sample_filters[{number}]": ("sample_filter", section)
                for number, section in enumerate(facts.config.algorithm.sample_filters)
            },
            "reward.manager": ("reward_manager", reward.manager),
            "reward.function": ("reward_function", reward.function),
            **{
                f"reward.functions[{source}]": ("reward_function", section)
                for source, section in reward.functions.items()
            },
        }

    @classmethod
    def rows(cls, config: PluginConfig, facts: PlanFacts) -> StepRows:
        """Return the description of the rows that a step takes: they are called `prompts`, and each gives `rollout.n` samples.

        Raises:
            PlanError: the trainer trains on examples of a dataset, not on generated samples.
        """
        trainer = facts.plugins["trainer"]
        if trainer.cls.examples(trainer.config) != "prompts":
            raise PlanError(
                f"trainer {trainer.ref.name!r} trains on examples of the dataset, but source 'rollouts' generates samples",
                hint="leave source out, or set trainer.name=on_policy",
            )
        return StepRows(name="prompts", samples=facts.config.rollout.n)

    @classmethod
    def gives(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        return columns_of(facts)

    @classmethod
    def lacks(cls, config: PluginConfig, facts: PlanFacts, column: str) -> tuple[str, str] | None:
        return lacks(facts, column)

    @classmethod
    def parts_of_step(cls, config: PluginConfig, facts: PlanFacts) -> Sequence[PlannedPart]:
        return [*planned_parts(facts)]

    @classmethod
    def publication(cls, config: PluginConfig, facts: PlanFacts) -> PlannedPart:
        who = facts.plugins[TRANSPORT].ref.name
        return PlannedPart(name="weight_sync", who=who, because="the rollout follows the actor")

    @classmethod
    def placed(
        cls, config: PluginConfig, facts: PlanFacts, pools: Mapping[str, Pool]
    ) -> RolloutPlacement:
        return place_rollout(facts, pools[ROLLOUT], pools.get("actor", pools[ROLLOUT]))

    @classmethod
    def memory(cls, config: PluginConfig, plan: Plan) -> Mapping[str, Mapping[str, int]]:
        joined = plan.placement.source.joined
        return {} if joined else {ROLLOUT: dict(generation_memory(plan.facts.config, plan))}

    @classmethod
    def memory_rules(cls, config: PluginConfig, plan: Plan) -> Mapping[str, MemoryRules]:
        return {ROLLOUT: generation_rules(plan)}

    @classmethod
    def notes(cls, config: PluginConfig, plan: Plan) -> Iterator[PlanNote]:
        yield from generated_ahead(plan)
        update = weight_update(plan.facts.config, plan)
        value = update and attrs.asdict(update)
        yield PlanNote(name="weight_update", text=str(update or ""), value=value)

    @classmethod
    def forecast(cls, config: PluginConfig, plan: Plan, run: Path) -> PlanNote:
        return forecast_note(forecast(read_run(run), plan))

    @classmethod
    def read_tokenizer(cls, config: PluginConfig, facts: PlanFacts) -> Tokenizer:
        return read_tokenizer(facts.config)

    @classmethod
    def load(cls, config: PluginConfig, facts: PlanFacts, tokenizer: Tokenizer) -> SourceData:
        """Read the prompts of the dataset, with the tools of the agent loop. See `load_prompt_data` for errors."""
        tools = chat_tools(facts.config, tokenizer)
        if facts.config.data.continue_answer and tools is not None:
            raise ConfigError(
                "data.continue_answer=true does not work with rollout.agent_loop, which begins a new turn after each prompt",
                hint="leave out rollout.agent_loop, or data.continue_answer",
            )
        return load_prompt_data(facts.config, tokenizer, tools=tools)

    @classmethod
    def examine(
        cls,
        config: PluginConfig,
        facts: PlanFacts,
        data: SourceData | None,
        reward: Callable[..., Any] | None,
    ) -> Iterator[str | Finding | DovetailError]:
        """Check that every row can be scored, by `reward` (the caller's function) if it is given, else by the configured functions.

        Yields errors, or one line without errors; without `reward`, also a warning for each unused data source in `reward.functions`.
        """
        run, found = facts.config, list[str | Finding | DovetailError]()
        functions = configured_functions(run.reward, PluginContext(seed=run.seed), given=reward)
        if data is None:
            return
        for prompts in data.sets:
            try:
                check_sources(functions, prompts.prompts)
            except DovetailError as fault:
                found.append(fault)
        yield from found or ["reward: every data source has a function"]
        if reward is None:
            for unused in unused_functions(run.reward, data.prompts):
                yield Finding(rule="reward", severity="warning", message=unused)

    @classmethod
    def named_by_rows(
        cls, config: PluginConfig, facts: PlanFacts, data: SourceData
    ) -> list[PluginRef]:
        """Return the installed reward functions that rows select by their `data_source`."""
        return functions_found_by_rows(facts.config.reward, data.prompts)

    @classmethod
    def verdicts(
        cls, config: PluginConfig, facts: PlanFacts, rows: Iterable[Any]
    ) -> Iterator[RowVerdict]:
        """Yield the scores of the rows' reference answers. See `try_rewards` for errors."""
        run, samples = facts.config, list[TrialSample]()
        for row in rows:
            with suppress(DataError):  # bad rows get no verdict
                samples += samples_of(row, run.data.prompt_key)
        yield from map(verdict, score_samples(run.reward, samples) if samples else [])

    def launch(self, plan: Plan, reward: Callable[..., Any] | None) -> None:
        """Load the reward functions (or use `reward`, the caller's function, for every row), and start the rollout replicas."""
        config, runtime = plan.facts.config, self._runtime
        functions = configured_functions(
            config.reward, PluginContext(seed=config.seed), given=reward
        )
        self.context = context = attrs.evolve(self.context, reward_functions=functions)
        self._plan, self._started = plan, ExitStack()
        self._spec = WorkerSpec(
            role="rollout",
            plugin=plan.refs["rollout"],
            # The spec is sent to other processes, and a runtime can't be pickled.
            context=attrs.evolve(
                context,
                role="rollout",
                runtime=None,
                weights_follow=whole_updates(plan),
                cache_tokens=cache_tokens(plan),
            ),
            transport=plan.refs["rollout.weight_transport"],
        )
        replicas = runtime.rollout_replicas(self._spec, plan.placement.source.replicas)
        self._pool = RolloutPool(
            replicas,
            restart=runtime.restart_replica,
            addresses=config.rollout.addresses,
        )
        self._started.callback(self._pool.replicas.close)

    def start(self) -> None:
        """Start the agent loop and the reward manager, and construct the sample filters."""
        config, context = self._plan.facts.config, self.context
        self._episodes = self._started.enter_context(
            running_episodes(config, context, context.logger)
        )
        self._manager: Any = make_plugin(self._plan.refs["reward.manager"], context)
        self._started.callback(self._manager.close)
        self._manager.start()
        filters = (
            make_plugin(ref, context)
            for path, ref in self._plan.refs.items()
            if path.startswith("algorithm.sample_filters[")
        )
        self._filters = _by_name(filters)
        self._accuracy = Accuracy(context.logger)

    def open(self, site: Site) -> None:
        self._site, config = site, site.config
        tokenizer = self.context.tokenizer
        scorer = Scorer(
            self._manager,
            timeout=config.reward.timeout,
            retries=config.reward.retries,
            concurrency=config.reward.concurrency,
        )
        self._service = service = RolloutService(
            pool=self._pool,
            manager=self._manager,
            scorer=scorer,
            tokenizer=tokenizer,
            seed=config.seed,
            episodes=self._episodes,
            partial=config.rollout.partial_rollout,
            keeps_cache=config.rollout.keep_cache,
            continues=site.plan.facts.age > 0,
            check_stop=site.check_stop,
            stall_seconds=config.rollout.stall_seconds,
            logger=site.logger,
        )
        self._started.callback(service.close)
        check = WeightCheck.of(config, site.plan, site.data.train.prompts, tokenizer, site.logger)
        self._sync = WeightSync(site, service, self._pool, check)
        self._collector = RolloutCollector(
            site,
            self._sync,
            service,
            pool=self._pool,
            tokenizer=tokenizer,
            whole=self._manager.unit == "group",
            filters=self._filters,
        )
        self._answer(site)

    def _answer(self, site: Site) -> None:
        """Serve the commands of `dovetail pool` during the run."""
        machines = self._plan.placement.pool(ROLLOUT).nodes
        add = adding_to(self._spec, self._runtime.device(), machines)
        commands = PoolCommands(self._pool, self._service, add)
        self._started.enter_context(served(commands, self._service, site.directory, site.logger))

    @property
    def observers(self) -> Mapping[str, object]:
        """The observer that writes notable samples; empty if it is turned off."""
        size = self._plan.facts.config.trainer.kept_samples_bytes
        return {"kept_samples": KeptSamples(self.context.tokenizer, size)} if size else {}

    @property
    def outstanding(self) -> int:
        return self._service.outstanding

    @property
    def parts(self) -> Mapping[str, Plugin]:
        """The reward manager and the sample filters."""
        filters = {f"algorithm.sample_filters.{name}": one for name, one in self._filters.items()}
        return {"reward.manager": self._manager, **filters}

    def admit(self, groups: int, ask: StepAsk) -> None:
        self._collector.admit(groups, ask)

    def collect(self, step: StepContext, ask: StepAsk) -> Experience:
        return self._collector.collect(step, ask)

    def settle(self, step: int, trained: Collection[Key], left_out: Mapping[Key, str]) -> None:
        self._site.ledger.settle(step, trained, left_out)

    def give_back(self, step: int, *, sound: bool) -> None:
        self._collector.give_back(step, sound=sound)

    def publish(self) -> None:
        self._sync.publish()

    def rest(self) -> None:
        self._sync.rest()

    def validate(self, measure: Measure) -> dict[str, float]:
        """Generate and score samples for the held-out prompts, and return their metrics; `measure`, which computes losses, is not used."""
        site, config = self._site, self._site.config
        prompts = site.data.val.prompts if site.data.val else ()
        if not prompts:
            return {}
        how = config.rollout.validation
        self._sync.ready()
        with self._service.uncounted(), site.phase("validation"):
            samples = held_out_samples(config, prompts, self._service, self._sync.generated)
        metrics = validation_metrics(
            samples, how.n, seed=config.seed, pass_threshold=how.pass_threshold
        )
        step = site.finished()
        if (problem := unscored(samples)) is not None:
            site.logger.warning(problem, step=step)
        self._pool.replicas.metrics()  # discarded: the next step must not report validation's metrics
        self._accuracy.update(metrics, how.n, step)
        rows = [s.row() for s in shown(samples, config.trainer.validation_samples)]
        site.directory.write_samples(step, rows, name="validation")
        return metrics

    def summary(self) -> Mapping[str, Any]:
        """Return the accuracy before and after training, and the name of its metric."""
        return self._accuracy.state()

    def state(self) -> dict[str, Any]:
        return {"accuracy": self._accuracy.state(), **self._collector.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._accuracy.load_state(state["accuracy"])
        self._collector.load_state(state)

    def close(self) -> None:
        if (started := getattr(self, "_started", None)) is not None:
            started.close()

    @property
    def _runtime(self) -> Runtime:
        runtime: Runtime = self.context.runtime
        return runtime


def _by_name(plugins: Iterable[Any]) -> dict[str, Any]:
    """Return plugins by name; a second plugin of the same name gets the key `name_2`, and so on."""
    named: dict[str, Any] = {}
    for plugin in plugins:
        names = (plugin.name if i == 1 else f"{plugin.name}_{i}" for i in itertools.count(1))
        named[next(name for name in names if name not in named)] = plugin
    return named
