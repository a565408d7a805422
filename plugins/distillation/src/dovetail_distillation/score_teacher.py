"""ScoreTeacher: computes the teachers' log-probabilities of the samples, and the teachers' most likely words (vocabulary tokens).

A teacher is a role of the config, whose engine scores the samples, or a server. The `data_source` of a sample's row selects the
teacher. Legend: N samples; T response tokens, packed end to end; K most likely words at each token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np

from dovetail.batch import Batch, Ragged
from dovetail.errors import ConfigError, DataError, DovetailError
from dovetail.interfaces import (
    OUTPUTS,
    Finding,
    OutputSpec,
    PlanFacts,
    PluginContext,
    Stage,
    StepContext,
)
from dovetail.plugins import objective_spec
from dovetail_distillation.columns import COLUMNS, LOG_PROBS, TOP_IDS, TOP_LOG_PROBS
from dovetail_distillation.config import DEFAULT, ScoreTeacherConfig
from dovetail_distillation.endpoint import Endpoint
from dovetail_distillation.servers import described, without_processes
from dovetail_torch_engines import token_places

_OUTPUTS = {LOG_PROBS: "log_probs", TOP_IDS: "top_ids", TOP_LOG_PROBS: "top_log_probs"}


class ScoreTeacher(Stage):
    """Scores every response token with the teacher of its sample."""

    name = "score_teacher"
    api = ">=1.0,<2"
    phase = "score"
    columns = COLUMNS
    Config = ScoreTeacherConfig

    def __init__(self, config: ScoreTeacherConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._endpoints: dict[str, Endpoint] = {}

    @classmethod
    def requires(cls, config: ScoreTeacherConfig, facts: PlanFacts) -> frozenset[str]:
        return frozenset(
            {"prompt_ids", "response_ids", "response_mask", "temperature", "data_source"}
        )

    @classmethod
    def provides(cls, config: ScoreTeacherConfig, facts: PlanFacts) -> frozenset[str]:
        return frozenset(_OUTPUTS).intersection(facts.required)

    @classmethod
    def because(cls, config: ScoreTeacherConfig, facts: PlanFacts) -> str | None:
        provided = sorted(cls.provides(config, facts))
        readers = [f"{column} required by {facts.required[column]}" for column in provided]
        served = [
            f"teacher {name!r} on {described(section)}"
            for name, section in config.endpoints.items()
            if section.serve is not None
        ]
        return "; ".join([*readers, *served]) if readers else None

    @classmethod
    def roles(cls, config: ScoreTeacherConfig, facts: PlanFacts) -> tuple[str, ...]:
        named = dict.fromkeys(config.by_source.values())
        return tuple(name for name in named if name not in config.endpoints)

    @classmethod
    def examine(
        cls, config: ScoreTeacherConfig, facts: PlanFacts, data: Any
    ) -> Iterator[str | Finding | DovetailError]:
        """Report servers that the runtime can't start, and every `data_source` without a teacher; streamed rows are checked as they are
        read.
        """
        runtime = facts.plugins["runtime"]
        for name, section in config.endpoints.items():
            if section.serve is not None and "task_workers" not in runtime.cls.capabilities:
                yield without_processes(name, runtime.ref.name)
            elif section.serve is not None:
                yield f"teacher {name!r}: {described(section)}"
        if DEFAULT in config.by_source or data.train.streamed:
            return
        sources = {row.data_source for row in data.prompts}
        missing = sorted(str(source) for source in sources if source not in config.by_source)
        if missing:
            yield _without_teacher(", ".join(map(repr, missing)), config)

    def start(self) -> None:
        """Connect to every server, and check its model.

        Raises:
            TeacherError: a server can't be reached, or lacks a required feature.
            ConfigError: an endpoint is not the teacher of any `data_source`.
        """
        if unused := sorted(self.config.endpoints.keys() - set(self.config.by_source.values())):
            raise ConfigError(
                f"endpoint {unused[0]!r} of the stage score_teacher is not used: no entry of `teachers` names it",
                hint=f"set teachers.default={unused[0]}, or remove the endpoint",
            )
        for name, section in self.config.endpoints.items():
            self._endpoints[name] = Endpoint(name, section, self.context)
            self._endpoints[name].check(self.context.tokenizer)

    def close(self) -> None:
        for endpoint in self._endpoints.values():
            endpoint.close()

    def run(self, batch: Batch, step: StepContext) -> Batch:
        wanted = sorted(self.provides(self.config, step.facts))
        if not wanted:
            return batch
        outputs = {column: _sized(_OUTPUTS[column], step.facts) for column in wanted}
        rows = self._rows(batch)
        parts = {
            name: self._scored(
                name, batch if len(own) == len(batch) else batch.take(own), outputs, step
            )
            for name, own in rows.items()
        }
        if len(parts) == 1:
            (only,) = parts.values()
            return batch.with_columns({column: only[column] for column in wanted})
        mask: Ragged = batch["response_mask"]
        written: dict[str, Ragged] = {}
        for column, output in outputs.items():
            values = np.zeros((len(mask.values), *output.inner), output.dtype)
            for name, own in rows.items():
                values[token_places(mask.offsets, own)] = parts[name][column].values
            written[column] = mask.with_values(values)
        return batch.with_columns(written)

    def _rows(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return the row indices of each teacher's samples, int64 each, by teacher.

        Raises:
            DataError: a sample has no teacher.
        """
        teachers = self.config.by_source
        names = [
            teachers.get(source or "", teachers.get(DEFAULT)) for source in batch["data_source"]
        ]
        if None in names:
            source = batch["data_source"][names.index(None)]
            raise _without_teacher(repr(source), self.config)
        return {
            name: np.flatnonzero([own == name for own in names])
            for name in dict.fromkeys(names)
            if name is not None
        }

    def _scored(
        self, name: str, batch: Batch, outputs: dict[str, OutputSpec], step: StepContext
    ) -> Batch:
        """Return the columns of `outputs`, computed by the teacher `name`; `batch` holds only the samples of this teacher."""
        if name in self._endpoints:
            count = max((output.inner[0] for output in outputs.values() if output.inner), default=0)
            return asyncio.run(self._endpoints[name].score(batch, count))
        found: Batch = step.roles[name].forward(batch, frozenset(outputs.values())).result()
        return Batch({c: found[output.name] for c, output in outputs.items()}, length=len(batch))


def _without_teacher(sources: str, config: ScoreTeacherConfig) -> DataError:
    return DataError(
        f"the stage score_teacher has no teacher for data_source {sources}; it has teachers for: {', '.join(sorted(config.by_source))}",
        hint="add the data_source to `teachers`, or set teachers.default to the teacher for all other data sources",
    )


def _sized(name: str, facts: PlanFacts) -> OutputSpec:
    """Return the spec of the output `name`; an output of most likely words has K words at each token (see `_words`)."""
    if not OUTPUTS[name].inner:
        return OUTPUTS[name]
    return OUTPUTS[name].sized(_words(facts))


def _words(facts: PlanFacts) -> int:
    """Return K, the number of the teacher's most likely words per token that the student's objective compares.

    Raises:
        ConfigError: no objective reads the teacher's words, or the objectives of several roles need different K.
    """
    sizes = {
        output.inner[0]
        for plugin in facts.plugins.values()
        if plugin.ref.kind == "objective"
        for output in objective_spec(plugin.config).outputs
        if TOP_IDS in output.reads
    }
    if len(sizes) != 1:
        raise ConfigError(
            f"column {TOP_IDS} can't be computed: the objectives that read it have top_k of {sorted(sizes) or 'none'}; expected one common value",
            hint="set the same top_k for all objectives that read the column",
        )
    return sizes.pop()
