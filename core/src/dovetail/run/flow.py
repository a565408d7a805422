"""Flow: the stages of one step, each a method that the trainer's loop calls in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import attrs

from dovetail.batch.batch import Batch
from dovetail.batch.ragged import Ragged
from dovetail.errors import NumericsError
from dovetail.experience.faults import checked_estimate
from dovetail.experience.refill import Rollout
from dovetail.experience.sampling import training_sampling
from dovetail.interfaces.advantage import Groups
from dovetail.interfaces.objective import AnyObjectiveSpec, ObjectiveSpec
from dovetail.metrics import Metric, values
from dovetail.numerics.rollout_correction import correct_batch
from dovetail.planning.stages import actor_columns, actor_pass_name
from dovetail.run.finite import check_finite, with_fault_file
from dovetail.run.gate import chosen_rows, measure
from dovetail.run.generation_stages import GenerationStages
from dovetail.run.shaping import shape_rewards
from dovetail.run.updates import Cut, Updates, run_updates, with_loss_mask
from dovetail.sections import PluginSection


class Flow(GenerationStages):
    """The stages over the parts of a run. A step of which no group is left goes through them with an empty batch.

    Args:
        parts: what `dovetail.run.build.build` made.
        state: where the run stands: fresh, or read from a checkpoint.
    """

    def prepare(self, rollout: Rollout) -> Batch:
        """Turn samples into columns, and add what the plan found necessary before the update: log-probabilities
        of the actor and the reference policy, values, and the rollout correction.

        Raises:
            NumericsError: a column is not finite, or rollout and trainer differ by more than the gate allows.
        """
        parts, plan = self._parts, self._parts.plan
        self._passive.rollout(
            self._now.number,
            rollout.samples,
            parts.config.rollout,
            parts.config.data.max_response_length,
        )
        batch = rollout.batch(temperature=parts.config.rollout.temperature)
        if not len(batch):
            parts.logger.warning(
                "no group is left to train on: the step changes no weight",
                step=self._now.number,
                prompts=len({sample.group for sample in rollout.samples}),
            )
            return batch
        if plan.bypass:
            batch = batch.with_columns({"old_log_probs": batch["rollout_log_probs"]})
        if plan.actor_outputs:
            columns = actor_columns(plan.actor_outputs)
            batch = self._scored(actor_pass_name(plan.actor_outputs), batch, "actor", columns)
        if parts.ref is not None:
            batch = self._scored("ref_log_probs", batch, "ref", {"ref_log_probs": "log_probs"})
        if parts.critic is not None:
            batch = self._scored("values", batch, "critic", {"values": "values"})
        self._check_finite(batch)
        with self._faults_written():
            batch = self._through_the_gate(batch)
            if parts.correction is not None:
                with self._phase("rollout_correction"):
                    batch, metrics = correct_batch(parts.correction, batch)
                self._now.metrics |= values(metrics)
        self._stop.check()
        return batch

    def estimate_advantages(self, batch: Batch) -> Batch:
        """Rewards, shaped where the config says so, to advantages and returns.

        Raises:
            NumericsError: one of them is not finite.
        """
        if not len(batch):
            return batch
        parts, now, algorithm = self._parts, self._now, self._parts.config.algorithm
        controller = parts.kl_controllers.get("in_reward")
        penalty = algorithm.kl.in_reward
        with self._phase("advantage"):
            shaped = shape_rewards(
                batch,
                overlong=algorithm.overlong_penalty,
                max_response_length=parts.config.data.max_response_length,
                kl=penalty if penalty is not None and penalty.coef else None,
                kl_factor=controller.value if controller is not None else 1.0,
            )
            groups = Groups.of(batch["group_id"], batch["trajectory_id"])
            result = checked_estimate(parts.estimator, shaped.batch, groups)
        columns = {"advantages": result.advantages}
        if result.returns is not None:
            columns["returns"] = result.returns
        batch = shaped.batch.with_columns(columns)
        self._check_finite(batch)
        advantages = result.advantages
        flat = advantages.values if isinstance(advantages, Ragged) else advantages
        if len(flat):
            now.metrics |= {
                "advantage/mean": float(flat.mean()),
                "advantage/std": float(flat.std()),
            }
        now.metrics |= {**shaped.metrics, **result.metrics}
        now.kl_in_reward = shaped.kl
        return batch

    def update(self, batch: Batch) -> None:
        """Train the critic, where there is one, and the actor: passes over mini-batches of whole groups. The actor
        stays as it is while the critic warms up.

        Raises:
            NumericsError: a loss or gradient is not finite; that mini-batch changed nothing.
        """
        parts, now = self._parts, self._now
        objective = self._objective()
        metrics: dict[str, float] = {"actor/updates": 0.0}
        with self._faults_written():
            if len(batch):
                metrics |= self._update_critic(batch)
            if len(batch) and now.number > parts.plan.counts.critic_warmup_steps:
                metrics |= self._update_actor(batch, objective)
        self._account(batch)
        self._torn, now.counts = False, True
        now.metrics |= metrics
        self._learn_kl(objective, metrics, len(batch))
        parts.observers.emit("update_finished", step=now.number, metrics=metrics)
        self._stop.check()

    # -- helpers -------------------------------------------------------------------------------

    def _scored(self, phase: str, batch: Batch, role: str, columns: dict[str, str]) -> Batch:
        """The batch with columns from a role's forward pass, each from the engine's output of the given name."""
        group = getattr(self._parts, role)
        with self._residency.present(role), self._phase(phase):
            scored = group.forward(batch, frozenset(columns.values())).result()
        section = self._engine_of(role)
        self._passive.scored(self._now.number, batch, scored, sorted(columns.values()), section)
        self._stop.check()
        return batch.with_columns({column: scored[output] for column, output in columns.items()})

    def _engine_of(self, role: str) -> PluginSection:
        """The section that selects a role's engine; a role without one has the actor's."""
        own: PluginSection | None = getattr(getattr(self._parts.config, role, None), "engine", None)
        return own or self._parts.config.actor.engine

    def _check_finite(self, batch: Batch) -> None:
        rollout = self._now.rollout
        check_finite(
            batch,
            step=self._now.number,
            directory=self._parts.run_directory,
            samples=rollout.samples if rollout is not None else (),
        )

    @contextmanager
    def _faults_written(self) -> Iterator[None]:
        """The samples that a NumericsError names are written to the run directory."""
        now = self._now
        try:
            yield
        except NumericsError as error:
            # The engine took no step with what was at fault: before a step's first one, all weights are whole.
            self._torn = now.updates > 0
            if not error.sample_ids:
                raise
            raise with_fault_file(
                error,
                step=now.number,
                directory=self._parts.run_directory,
                samples=now.rollout.samples if now.rollout is not None else (),
            ) from error

    def _through_the_gate(self, batch: Batch) -> Batch:
        """Compare rollout and trainer, where this step can or must, and take out the columns that were for that alone.

        Raises:
            NumericsError: they differ by more than `algorithm.gate.stop_above`.
        """
        parts, config, plan = self._parts, self._parts.config, self._parts.plan
        if "rollout_log_probs" in batch and ("log_probs" in plan.actor_outputs or self._gate_due()):
            if "log_probs" in plan.actor_outputs:
                compared, log_probs = batch, batch["old_log_probs"]
            else:
                rows = chosen_rows(batch["response_mask"], config.algorithm.gate.samples)
                compared = batch.take(rows)
                with self._residency.present("actor"), self._phase("gate"):
                    scored = parts.actor.forward(compared, frozenset({"log_probs"})).result()
                log_probs = scored["log_probs"]
            with self._phase("gate"):
                verdict = measure(
                    compared,
                    log_probs,
                    sampling=training_sampling(config),
                    section=config.algorithm.gate,
                    weight_version=self._state.weight_version,
                )
            self._now.metrics |= values(verdict.metrics)
            if verdict.message:
                log = parts.logger.info if verdict.level == "ok" else parts.logger.warning
                log(verdict.message, step=self._now.number, stage=verdict.stage, hint=verdict.hint)
            verdict.check()
        return batch.drop(set(plan.gate_log_probs) - set(self._wanted_of_rollout()))

    def _objective(self) -> ObjectiveSpec:
        """What the actor minimises in this step: the KL weight as its controller has it."""
        objective, controller = (
            self._parts.plan.objective,
            self._parts.kl_controllers.get("in_loss"),
        )
        if objective.kl is None or controller is None:
            return objective
        coef = objective.kl.coef * controller.value
        return attrs.evolve(objective, kl=attrs.evolve(objective.kl, coef=coef))

    def _update_actor(self, batch: Batch, objective: ObjectiveSpec) -> dict[str, float]:
        counts, actor = self._parts.plan.counts, self._parts.config.actor
        cut = self._cut(counts.prompts_per_mini_batch, counts.epochs_per_step)
        with self._residency.present("actor"), self._phase("update"):
            self._moved = True
            done = self._train("actor", with_loss_mask(batch), objective, cut, max_kl=actor.max_kl)
        metrics = {**done.metrics, "actor/updates": float(done.count)}
        if actor.max_kl is not None:
            metrics["actor/early_stop"] = float(done.stopped)
        return metrics

    def _update_critic(self, batch: Batch) -> dict[str, float]:
        counts, objective = self._parts.plan.counts, self._parts.plan.value_objective
        if objective is None:
            return {}
        cut = self._cut(counts.critic_prompts_per_mini_batch, counts.critic_epochs_per_step)
        with self._residency.present("critic"), self._phase("update_critic"):
            return dict(self._train("critic", batch, objective, cut).metrics)

    def _cut(self, prompts: int, epochs: int) -> Cut:
        config = self._parts.config
        return Cut(prompts=prompts, epochs=epochs, shuffle=config.actor.shuffle, seed=config.seed)

    def _train(
        self,
        role: str,
        batch: Batch,
        objective: AnyObjectiveSpec,
        cut: Cut,
        max_kl: float | None = None,
    ) -> Updates:
        now = self._now

        def count(metrics: Mapping[str, Metric]) -> None:
            now.updates += 1
            self._passive.updated(now.number, metrics, role, self._engine_of(role))

        self._torn = True
        group = getattr(self._parts, role)
        return run_updates(
            group, batch, objective, cut, step=now.number, max_kl=max_kl, after_each=count
        )

    def _account(self, batch: Batch) -> None:
        """Tell the ledger which prompts were trained on, and why the others were not."""
        ledger, rollout = self._parts.ledger, self._now.rollout
        names = (batch[column].tolist() for column in ("epoch", "prompt_id", "attempt"))
        used = set(zip(*names, strict=True))
        reasons = rollout.reasons if rollout is not None else {}
        for key in ledger.finished():
            if key in used:
                ledger.use(*key)
            else:
                ledger.drop(*key, reason=reasons.get(key, "reward_failures"))

    def _learn_kl(self, objective: ObjectiveSpec, metrics: dict[str, float], samples: int) -> None:
        """Tell the KL controllers how far the policy is from the reference, now that the step counts. A policy that
        stayed as it was teaches them nothing.
        """
        controllers, now = self._parts.kl_controllers, self._now
        if not metrics["actor/updates"]:
            return
        if "in_loss" in controllers and objective.kl is not None and "actor/kl" in metrics:
            now.metrics["actor/kl_coef"] = objective.kl.coef
            controllers["in_loss"].update(metrics["actor/kl"], samples)
        if "in_reward" in controllers and now.kl_in_reward is not None:
            controllers["in_reward"].update(now.kl_in_reward, samples)
