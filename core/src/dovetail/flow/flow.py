"""Flow: the stages of one run, each a method that the trainer's loop calls in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np

from dovetail.batch import Batch
from dovetail.errors import DovetailError, StopRequested
from dovetail.flow.build import Parts
from dovetail.flow.faults import check_failures, checked_estimate
from dovetail.flow.generation import Sample, generate_and_score, rollout_metrics, to_batch
from dovetail.flow.interrupt import StopSwitch
from dovetail.flow.scorer import Scorer
from dovetail.flow.state import RunState, save_checkpoint
from dovetail.flow.validation import validation_metrics
from dovetail.interfaces.advantage import Groups
from dovetail.interfaces.reward import Failure
from dovetail.interfaces.rollout import SamplingParams
from dovetail.telemetry.logging import set_step
from dovetail.telemetry.metrics import merge_metrics, values


class Flow:
    """Runs stages over the parts of a run, with timers, metrics, hooks and clean stops around them.

    Args:
        parts: what `dovetail.flow.build.build` made.
        state: where the run stands: fresh, or read from a checkpoint.
    """

    def __init__(self, parts: Parts, state: RunState) -> None:
        self._parts = parts
        self._state = state
        self._stop = StopSwitch()
        self._metrics: dict[str, float] = {}
        self._tokens = 0
        self._updated = False
        self._torn = False
        self._status = "running"
        self._began = time.monotonic()
        self._seconds_before = state.train_seconds
        self.loader = parts.loader

    # -- where the run stands ------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Finished steps."""
        return self._state.step

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        steps = self._parts.plan.counts.steps
        if steps is None:
            raise DovetailError(
                "a flow needs a plan made from the data, so that it knows its steps"
            )
        return steps

    @property
    def validated(self) -> bool:
        """Whether the first validation has been done, or its time is over."""
        return self.step > 0 or self._state.accuracy_before is not None

    def summary(self) -> dict[str, Any]:
        """What `summary.json` holds."""
        return {
            "status": self._status,
            "seed": self._parts.config.seed,
            "steps": self.step,
            "total_steps": self.total_steps,
            "accuracy_before": self._state.accuracy_before,
            "accuracy_after": self._state.accuracy_after,
            "train_seconds": self._state.train_seconds,
            "directory": str(self._parts.run_directory.path),
        }

    # -- around the loop -----------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        """The whole run: hooks, trackers, signals. However it ends, its finished steps are saved."""
        parts = self._parts
        self._began = time.monotonic()
        try:
            with self._stop:
                parts.trackers.begin(
                    {
                        "config": parts.config,
                        "plan": parts.plan,
                        "directory": parts.run_directory.path,
                        "start_step": self.step,
                        "total_steps": self.total_steps,
                    }
                )
                parts.logger.info("run started", total_steps=self.total_steps, done=self.step)
                parts.observers.emit("run_started", config=parts.config, plan=parts.plan)
                yield
                self._status = "completed"
        except StopRequested:
            self._status = "stopped"
            self.save()
            raise
        except BaseException as error:
            self._status = "failed"
            if isinstance(error, Exception):
                self._save_what_is_whole()
            # Whoever runs the command prints the error; the log keeps it with its traceback.
            parts.logger.info("run failed", error=repr(error), exc_info=error)
            parts.observers.emit("failure", step=self.step, error=error)
            raise
        finally:
            self._tick()
            parts.logger.info("run finished", status=self._status, steps=self.step)
            parts.observers.emit("run_finished", summary=self.summary())

    @contextmanager
    def begin_step(self) -> Iterator[None]:
        """One step. What ends it before the update leaves no trace of it; after the update it counts."""
        parts = self._parts
        before = parts.loader.state()
        self._metrics, self._tokens, self._updated = {}, 0, False
        parts.timers.reset()
        number = self.step + 1
        set_step(number)
        parts.observers.emit("step_started", step=number)
        began = time.monotonic()
        try:
            yield
        except Exception:
            if self._updated:
                self._finish_step(number, began)
            else:
                parts.loader.load_state(before)
            raise
        self._finish_step(number, began)

    def _finish_step(self, number: int, began: float) -> None:
        parts = self._parts
        seconds = time.monotonic() - began
        self._state = attrs.evolve(self._state, step=number)
        self._tick()
        metrics = {
            **self._metrics,
            **parts.timers.metrics(),
            "time/step": seconds,
            "perf/tokens_per_second": self._tokens / seconds,
            "data/epoch": float(parts.loader.epoch),
        }
        parts.trackers.log(number, metrics)
        parts.observers.emit("step_finished", step=number, metrics=metrics)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """A timed phase. After it, and after what it brought is kept, the stage asks for a stop."""
        self._parts.trackers.phase(self.step, name)
        with self._parts.timers(name):
            yield

    def _tick(self) -> None:
        seconds = self._seconds_before + time.monotonic() - self._began
        self._state = attrs.evolve(self._state, train_seconds=seconds)

    # -- the stages ----------------------------------------------------------------------------

    def rollout_and_score(self, issued: Sequence[Any]) -> list[Sample]:
        """Generate and score the step's samples, streaming.

        Raises:
            RewardError: more than `reward.max_failure_share` of the samples could not be scored.
        """
        parts, config = self._parts, self._parts.config
        rollout = config.rollout
        sampling = SamplingParams(
            max_new_tokens=config.data.max_response_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=rollout.stop,
            stop_token_ids=rollout.stop_token_ids,
            ignore_eos=rollout.ignore_eos,
            log_probs=parts.plan.rollout_log_probs,
            raw_log_probs=parts.plan.raw_rollout_log_probs,
        )
        with self._phase("rollout"):
            samples = self._generate(issued, rollout.n, sampling, "train")
            for item in issued:
                parts.ledger.finish(item.epoch, item.prompt.index, item.attempt)
        self._metrics |= rollout_metrics(samples, sampling.max_new_tokens)
        generated = sum(len(s.completion.response_ids) for s in samples)
        self._tokens = generated + sum(len(s.issued.prompt.prompt_ids) for s in samples)
        self._metrics["perf/rollout_tokens_per_second"] = generated / max(
            parts.timers.seconds("rollout"), 1e-9
        )
        parts.run_directory.write_samples(self.step + 1, [s.row() for s in self._shown(samples)])
        parts.trackers.samples(self.step + 1, [s.row() for s in self._shown(samples)])
        parts.observers.emit("rollout_finished", step=self.step + 1, samples=samples)
        check_failures(
            samples, config.reward.max_failure_share, self.step + 1, parts.run_directory.path
        )
        parts.observers.emit("reward_finished", step=self.step + 1, metrics=dict(self._metrics))
        self._stop.check()
        return samples

    def prepare(self, samples: Sequence[Sample]) -> Batch:
        """Turn samples into columns, and add the log-probabilities that the plan found necessary."""
        parts = self._parts
        batch = to_batch(samples, temperature=parts.config.rollout.temperature)
        for column, group in (("old_log_probs", parts.actor), ("ref_log_probs", parts.ref)):
            if parts.plan.has_stage(column):
                with self._phase(column):
                    scored = group.forward(batch, frozenset({"log_probs"})).result()
                batch = batch.with_columns({column: scored["log_probs"]})
                self._stop.check()
        return batch

    def estimate_advantages(self, batch: Batch) -> Batch:
        """Rewards to advantages and returns."""
        parts = self._parts
        with self._phase("advantage"):
            result = checked_estimate(parts.estimator, batch, Groups.of(batch["group_id"]))
        columns = {"advantages": result.advantages}
        if result.returns is not None:
            columns["returns"] = result.returns
        flat = (
            result.advantages
            if isinstance(result.advantages, np.ndarray)
            else (result.advantages.values)
        )
        if len(flat):
            self._metrics |= {
                "advantage/mean": float(flat.mean()),
                "advantage/std": float(flat.std()),
            }
        self._metrics |= dict(result.metrics)
        return batch.with_columns(columns)

    def update(self, batch: Batch) -> None:
        """Train the actor: epochs over mini-batches of whole groups."""
        parts, counts = self._parts, self._parts.plan.counts
        objective = self._objective()
        parts_of_step = []
        with self._phase("update"):
            self._torn = True
            for _ in range(counts.epochs_per_step):
                for first in range(0, counts.prompts_per_step, counts.prompts_per_mini_batch):
                    last = first + counts.prompts_per_mini_batch
                    groups = batch["group_id"]
                    rows = np.flatnonzero((groups >= first) & (groups < last))
                    if len(rows):
                        mini_batch = batch.take(rows)
                        parts_of_step.append(parts.actor.update(mini_batch, objective).result())
            metrics = values(merge_metrics(parts_of_step))
            self._account(batch)
        self._torn, self._updated = False, True
        self._metrics |= metrics
        if parts.kl_controller is not None and "actor/kl" in metrics:
            self._metrics["actor/kl_coef"] = objective.kl.coef if objective.kl else 0.0
            parts.kl_controller.update(metrics["actor/kl"], len(batch))
        parts.observers.emit("update_finished", step=self.step + 1, metrics=metrics)
        self._stop.check()

    def sync_weights(self) -> None:
        """Send the actor's weights to every rollout replica, as a new version."""
        parts = self._parts
        version = self._state.weight_version + 1
        with self._phase("weight_sync"):
            manifest = parts.actor.weight_manifest(version).result()
            sent = parts.actor.send_weights(version, manifest)
            parts.pool.receive_weights(version, manifest)
            sent.result()
        self._state = attrs.evolve(self._state, weight_version=version)
        self._stop.check()

    def validate(self) -> dict[str, float]:
        """Score held-out prompts; nothing where the config names none."""
        parts, config = self._parts, self._parts.config
        if not parts.val_prompts:
            return {}
        how = config.rollout.validation
        sampling = SamplingParams(
            max_new_tokens=config.data.max_response_length,
            temperature=how.temperature,
            top_p=how.top_p,
            top_k=how.top_k,
            stop=config.rollout.stop,
            stop_token_ids=config.rollout.stop_token_ids,
        )
        size = config.data.val_batch_size or len(parts.val_prompts)
        samples: list[Sample] = []
        began = time.monotonic()
        with self._phase("validation"):
            for start in range(0, len(parts.val_prompts), size):
                chunk = parts.val_prompts[start : start + size]
                samples += self._generate(chunk, how.n, sampling, "validation")
        metrics = validation_metrics(samples, how.n)
        metrics["time/validation"] = time.monotonic() - began
        accuracy = metrics.get(f"val/mean@{how.n}")
        if self._state.accuracy_before is None and self.step == 0:
            self._state = attrs.evolve(self._state, accuracy_before=accuracy)
        self._state = attrs.evolve(self._state, accuracy_after=accuracy)
        parts.run_directory.write_samples(
            self.step, [s.row() for s in self._shown(samples)], name="validation"
        )
        parts.trackers.log(self.step, metrics)
        self._stop.check()
        return metrics

    def save(self) -> None:
        """Write a checkpoint of the finished steps; nothing where one is there already."""
        parts = self._parts
        self._tick()
        if parts.store.has(self.step):
            return
        parts.trackers.phase(self.step, "checkpoint")
        path = save_checkpoint(parts, self._state)
        parts.logger.info("checkpoint saved", path=str(path))
        parts.observers.emit("checkpoint_saved", step=self.step, path=path)

    def _save_what_is_whole(self) -> None:
        """After a failure: the finished steps, unless the update itself broke off; a second fault is only reported."""
        if self._torn or not self.step:
            return
        try:
            self.save()
        except Exception as error:  # noqa: BLE001 - the run's own error must be the one that is seen
            self._parts.logger.warning("the failed run could not be saved", error=repr(error))

    # -- helpers -------------------------------------------------------------------------------

    def _generate(
        self, issued: Sequence[Any], n: int, sampling: SamplingParams, purpose: str
    ) -> list[Sample]:
        parts, reward = self._parts, self._parts.config.reward
        scorer = Scorer(
            parts.manager,
            timeout=reward.timeout,
            retries=reward.retries,
            concurrency=reward.concurrency,
        )
        return asyncio.run(
            generate_and_score(
                issued,
                n=n,
                sampling=sampling,
                pool=parts.pool,
                scorer=scorer,
                tokenizer=parts.tokenizer,
                seed=parts.config.seed,
                purpose=purpose,
            )
        )

    def _objective(self) -> Any:
        objective, controller = self._parts.plan.objective, self._parts.kl_controller
        if objective.kl is None or controller is None:
            return objective
        coef = objective.kl.coef * controller.value
        return attrs.evolve(objective, kl=attrs.evolve(objective.kl, coef=coef))

    def _account(self, batch: Batch) -> None:
        """Tell the ledger which prompts were trained on, and which had no scored sample left."""
        ledger = self._parts.ledger
        used = set(
            zip(
                batch["epoch"].tolist(),
                batch["prompt_id"].tolist(),
                batch["attempt"].tolist(),
                strict=True,
            )
        )
        for key in ledger.finished():
            if key in used:
                ledger.use(*key)
            else:
                ledger.drop(*key, reason="reward_failures")

    def _shown(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        limit = self._parts.config.trainer.samples_per_step
        failures = [s for s in samples if isinstance(s.outcome, Failure)]
        shown = list(samples) if limit < 0 else list(samples)[:limit]
        return shown + [s for s in failures[:64] if s not in shown]
