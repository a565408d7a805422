"""Problems that can be found before a run starts: in files, data, rewards and the plan, and by the installed rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs

from dovetail.config.checks import missing_files
from dovetail.config.load import LoadedConfig, raise_problems
from dovetail.errors import ConfigError, DovetailError, nearest
from dovetail.interfaces.plugin import Logger, PluginContext
from dovetail.interfaces.preflight import Finding
from dovetail.interfaces.source_data import SourceData
from dovetail.planning.plan import Plan, make_plan
from dovetail.planning.resolved_plugins import source_facts
from dovetail.plugins.load import find, make_plugin
from dovetail.plugins.rules import installed_rules
from dovetail.run.data import load_data, plan_from_data
from dovetail.run.finite import bad_weights
from dovetail.run.requeue import checkpoint_at
from dovetail.sections import RunConfig
from dovetail.telemetry.run_directory import RunDirectory

T = TypeVar("T")
WEIGHT_SECONDS = 10
"""Seconds for which a model's files are searched for non-finite weights; weights that are missed end the first step."""


@attrs.frozen
class Examination:
    """Everything that an examination of a config found."""

    notes: tuple[str, ...]
    """Notes on what was checked, a line each."""
    findings: tuple[Finding, ...]
    """Problems that were found."""
    needs: tuple[str, ...] = ()
    """Packages that the chosen plugins need and this environment lacks, a line each; not an error if a run is only checked."""

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Problems that prevent a run."""
        return tuple(f for f in self.findings if f.severity == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Problems that do not prevent a run."""
        return tuple(f for f in self.findings if f.severity == "warning")


def examine(loaded: LoadedConfig, *, reward: Callable[..., Any] | None = None) -> Examination:
    """Check everything that needs no loaded model; continue after problems, so that all problems are reported at once.

    Args:
        loaded: the config.
        reward: a function that scores every row, if the config names no function.
    """
    found = _Examiner(loaded, reward)
    found.run()
    return Examination(tuple(found.notes), tuple(found.findings), tuple(found.needs))


def enforce(loaded: LoadedConfig, plan: Plan, logger: Logger) -> tuple[Finding, ...]:
    """Apply the preflight rules to a run that is about to start; log and return the warnings.

    Warnings go to `events.jsonl` at the level info; the caller shows them, as `dovetail check` does.

    Raises:
        ConfigError: a rule found an error; `problems` lists all errors.
    """
    findings = rule_findings(loaded.config, plan)
    warnings = tuple(f for f in findings if f.severity == "warning")
    for finding in warnings:
        logger.info(
            finding.message, severity=finding.severity, rule=finding.rule, hint=finding.hint
        )
    errors = [f for f in findings if f.severity == "error"]
    if errors:
        raise refusal("preflight", errors)
    return warnings


def refusal(source: str, errors: Sequence[Finding]) -> ConfigError:
    """Return one ConfigError that lists all findings, each with the id of the rule and the fix, under the heading `source`."""
    count = "1 error" if len(errors) == 1 else f"{len(errors)} errors"
    listed = "\n".join("  " + str(finding).replace("\n", "\n  ") for finding in errors)
    return ConfigError(f"{source}: {count}\n{listed}", problems=[f.message for f in errors])


def rule_findings(config: RunConfig, plan: Plan | None) -> list[Finding]:
    """Return the installed rules' findings on a config and its plan, except those that `preflight.ignore` names.

    A rule that raises an error is reported by a warning with the name of the rule.
    """
    rules = installed_rules()
    findings = list(_unknown_ignored(config, [rule.name for rule in rules]))
    for rule in rules:
        if rule.name in config.preflight.ignore:
            continue
        try:
            for finding in rule.check(config, plan):
                findings.append(attrs.evolve(finding, rule=rule.name))  # noqa: PERF401 - those before a failure count
        except Exception as error:  # noqa: BLE001 - a rule is anybody's code, and its fault is not a fault of the config
            broken = Finding.warning(
                f"the preflight rule {rule.name} of {rule.distribution} failed on this config: "
                f"{type(error).__name__}: {error}",
                hint=f"report it to the author of {rule.distribution}, or set preflight.ignore={rule.name}",
            )
            findings.append(attrs.evolve(broken, rule=rule.name))
    return findings


def _unknown_ignored(config: RunConfig, known: Sequence[str]) -> Iterator[Finding]:
    for rule in config.preflight.ignore:
        if rule not in known:
            close = nearest(rule, known)
            yield Finding(
                rule="preflight.ignore",
                severity="error",
                message=f"preflight.ignore names {rule!r}, but no installed rule has that id",
                hint=f"did you mean {close!r}?"
                if close
                else f"the ids are: {', '.join(sorted(known))}",
            )


def _unmet_needs(plan: Plan, apart: frozenset[str]) -> Iterator[str]:
    """Yield, once for each chosen plugin, the requirements that this environment lacks, and the command that installs them.

    Plugins of the roles `apart` are skipped. Their processes run in other Python environments, which the rule `environment_unfit`
    checks, or are engines that already run, which have their packages.
    """
    seen: set[tuple[str, str]] = set()
    for path, ref in plan.refs.items():
        if path in apart or (path.endswith(".engine") and path.partition(".")[0] in apart):
            continue
        if ref.path is not None or (ref.kind, ref.name) in seen:
            continue
        seen.add((ref.kind, ref.name))
        entry = find(ref)
        unmet = [need for need in entry.needs if not need.met]
        if unmet:
            wanted = " and ".join(f"{need} ({need.found})" for need in unmet)
            yield (f"{ref.kind} {ref.name!r} needs {wanted} where it runs: {entry.install_command}")


class _Examiner:
    """Examination of a config part by part, which collects the problems of every part."""

    def __init__(self, loaded: LoadedConfig, reward: Callable[..., Any] | None = None) -> None:
        self.loaded, self.reward = loaded, reward
        self.config = loaded.config
        self.notes: list[str] = []
        self.needs: list[str] = []
        self.findings: list[Finding] = []

    def run(self) -> None:
        self._try("run_directory", self._run_directory)
        data = self._data()
        self._examine(data)
        plan = self._plan(data)
        if plan is not None:
            if data is not None:
                for stage, found in plan.examined(data):
                    self._keep(stage, found)
            self._runtime(plan)
            self._trackers(plan)
            self._weights(plan)
            self.notes += [f"plan: {what}: {how_many}" for what, how_many in plan.counts.rows()]
            elsewhere = plan.placement.source.elsewhere
            self.needs += _unmet_needs(plan, self.config.runtime.roles_apart | elsewhere)
        by_rules = rule_findings(self.config, plan)
        better = [f.instead_of for f in by_rules if f.instead_of is not None]
        self.findings = [
            f
            for f in self.findings
            if f.rule != "plan" or not any(words in f.message for words in better)
        ] + by_rules

    def _run_directory(self) -> None:
        path, resume = RunDirectory.path_for(self.config), self.config.trainer.resume
        RunDirectory.check_writable(path)
        if resume == "never" or not RunDirectory.begun(path):
            RunDirectory.check_free(path)
            checkpoint_at(resume)

    def _data(self) -> SourceData | None:
        config, section = self.config, self.config.data
        missing = list(missing_files(config))
        try:
            raise_problems("", missing, self.loaded.origins)
        except ConfigError as error:
            for problem in error.problems:
                self._fault("data", ConfigError(problem))
        absent = {problem.path[1] for problem in missing}
        if "val_files" in absent:
            section = attrs.evolve(section, val_files=())
        data = None
        if not absent & {"train_files", "mixture"}:
            data = self._try("data", lambda: load_data(attrs.evolve(config, data=section)))
        if data is None:
            if section.training_files and section.val_files:
                # If the training files failed, the held-out files have not been read: read them in their place.
                swapped = attrs.evolve(
                    section,
                    train_files=section.val_files,
                    val_files=(),
                    mixture={},
                    streaming=False,
                )
                self._try("data", lambda: load_data(attrs.evolve(config, data=swapped)))
            return None
        held_out = "" if data.val is None else f", {len(data.val.prompts):,} held out"
        self.notes.append(f"data: {len(data.train.prompts):,} training {data.rows_are}{held_out}")
        self.notes += [f"data: {note}" for note in data.notes]
        return data

    def _examine(self, data: SourceData | None) -> None:
        """Collect what the experience source finds when it checks the scoring of responses, with the data if it could be read."""

        def examine() -> None:
            facts = source_facts(self.config)
            source = facts.plugins["source"]
            self._keep("reward", source.cls.examine(source.config, facts, data, self.reward))

        self._try("reward", examine)

    def _keep(self, what: str, found: Iterable[str | Finding | DovetailError]) -> None:
        for each in found:
            if isinstance(each, DovetailError):
                self._fault(what, each)
            elif isinstance(each, Finding):
                self.findings.append(each if each.rule else attrs.evolve(each, rule=what))
            else:
                self.notes.append(each)

    def _plan(self, data: SourceData | None) -> Plan | None:
        """Return the plan; without data, or if no plan fits the data, a plan of the config alone, so that rules can still be applied."""
        plan = None
        if data is not None:
            plan = self._try("plan", lambda: plan_from_data(self.config, data))
        return plan or self._try("plan", lambda: make_plan(self.config))

    def _runtime(self, plan: Plan) -> None:
        def device() -> str:
            runtime: Any = make_plugin(plan.refs["runtime"], PluginContext(seed=self.config.seed))
            return str(runtime.device())

        found = self._try("runtime", device)
        if found is not None:
            self.notes.append(f"runtime: {plan.refs['runtime'].name} on {found}")

    def _trackers(self, plan: Plan) -> None:
        context = PluginContext(seed=self.config.seed)
        for path, ref in plan.refs.items():
            if path.startswith("tracking["):
                self._try("tracking", lambda ref=ref: make_plugin(ref, context))  # type: ignore[misc]

    def _weights(self, plan: Plan) -> None:
        here = [m for m in plan.models if Path(m.path).expanduser().is_dir()]
        for error in bad_weights(self.config, here, WEIGHT_SECONDS):
            self._fault("weights", error)

    def _try(self, what: str, do: Callable[[], T]) -> T | None:
        """Return the result of `do`; None if `do` fails, with the fault collected."""
        try:
            return do()
        except DovetailError as error:
            self._fault(what, error)
            return None

    def _fault(self, what: str, error: DovetailError) -> None:
        finding = Finding(rule=what, severity="error", message=error.message, hint=error.hint)
        if finding not in self.findings:
            self.findings.append(finding)
