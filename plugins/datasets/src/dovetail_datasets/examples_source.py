"""The source `examples`: takes the examples of a step from the dataset."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, get_args

import attrs
import numpy as np

from dovetail.batch import GLOSSARY, Batch, Ragged
from dovetail.errors import ConfigError, DataError, PlanError
from dovetail.interfaces import (
    Examples,
    ExperienceSource,
    Key,
    Measure,
    PlanFacts,
    PlannedPart,
    PluginConfig,
    Sample,
    Site,
    SourceData,
    StepAsk,
    StepContext,
    StepRows,
    Tokenizer,
)
from dovetail.plugins import called
from dovetail.telemetry import plain
from dovetail.text import encodable
from dovetail_datasets.closing import Closing
from dovetail_datasets.example_kinds import LABELS, NAMES, OBJECTIVES, advice_on_column
from dovetail_datasets.example_rows import LABEL_COLUMNS, Example, TrainedResponse, count_tokens
from dovetail_datasets.limits import Truncation
from dovetail_datasets.load_examples import load_datasets, load_examples
from dovetail_datasets.loading import (
    configured_dataset,
    data_of,
    datasets_of,
    media_dir,
    read_tokenizer,
    refuse_no_files,
)
from dovetail_datasets.mixtures import share_metrics

_COLUMNS = frozenset(
    [
        "sample_id",
        "epoch",
        "prompt_id",
        "attempt",
        "sample_index",
        "group_id",
        "trajectory_id",
        "data_source",
        "prompt_ids",
        "response_ids",
        "response_mask",
        "temperature",
    ]
)
"""Columns of every example."""
_GENERATED = frozenset({"rollout", "reward", "baseline"})
"""Values of `Column.owner` that mark columns which only generated samples have."""
_SIDES = ("chosen", "rejected")


@attrs.frozen(eq=False)
class StepExamples:
    """The examples of a step, as the experience that the step trains on."""

    examples: Sequence[Example]
    closing: Closing | None = None
    """The tokens after each response, if the model is trained at the response's end; else None."""
    labels: Collection[str] = LABEL_COLUMNS
    """The label columns that the batch gets, each only if all examples of the step have it."""

    samples: Sequence[Sample] = ()
    """Generated samples; always empty, since the step trains on examples of a dataset."""
    reasons: Mapping[tuple[int, int, int], str] = attrs.field(factory=dict)
    """(epoch, row, attempt) of each prompt that is not trained on → the reason; always empty, since all examples are trained on."""

    def batch(self) -> Batch:
        """Return the columns, one row per answer; the answers of a pair are adjacent."""
        rows = [(e, answer) for e in self.examples for answer in e.answers]
        examples = [example for example, _ in rows]
        responses = [_response(example, answer, self.closing) for example, answer in rows]
        counts = [len(example.answers) for example in self.examples]
        group_N = np.repeat(np.arange(len(self.examples), dtype=np.int64), counts)
        index_N = np.concatenate([np.arange(count, dtype=np.int64) for count in counts])
        columns: dict[str, Any] = {
            "sample_id": [_name(e, int(i)) for e, i in zip(examples, index_N, strict=True)],
            "epoch": np.array([e.epoch for e in examples], np.int64),
            "prompt_id": np.array([e.index for e in examples], np.int64),
            "attempt": np.array([e.attempt for e in examples], np.int64),
            "sample_index": index_N,
            "group_id": group_N,
            "trajectory_id": np.arange(len(rows), dtype=np.int64),
            "data_source": [e.data_source for e in examples],
            "prompt_ids": Ragged.from_list([e.prompt_ids for e in examples], dtype=np.int64),
            "response_ids": Ragged.from_list([ids for ids, _ in responses], dtype=np.int64),
            "response_mask": Ragged.from_list([mask for _, mask in responses], dtype=np.bool_),
            "temperature": np.ones(len(rows), np.float32),
        }
        if any(example.media for example in examples):
            columns["media"] = [[one.as_json() for one in e.media] for e in examples]
        if any(answer.image_mask is not None for _, answer in rows):
            masks = [_image_mask(a, len(r)) for (_, a), (r, _) in zip(rows, responses, strict=True)]
            columns["image_mask"] = Ragged.from_list(masks, dtype=np.bool_)
        if max(counts) > 1:
            columns |= {"pair_id": group_N, "chosen": index_N == 0}
        # Datasets of a mixture may have different labels. `_check_labels` has made sure that all have the required labels.
        first, *others = (example.labels.keys() for example in self.examples)
        for name in sorted(set(self.labels).intersection(first, *others)):
            labels = [example.labels[name] for example in examples]
            columns[name] = np.array(labels, GLOSSARY[name].dtype)
        return Batch(columns)


class ExamplesSource(ExperienceSource):
    """Takes each step's examples from the dataset; the trainer's `examples` names their kind."""

    name = "examples"
    api = ">=2.0,<3"
    follows = False

    @classmethod
    def rows(cls, config: PluginConfig, facts: PlanFacts) -> StepRows:
        """Return the number and the kind of the examples that a step takes.

        Raises:
            PlanError: the trainer takes prompts, or sample filters are configured.
        """
        kind, trainer = _kind(facts), facts.plugins["trainer"].ref.name
        if kind == "prompts":
            raise PlanError(
                f"trainer {trainer!r} trains on samples generated for prompts, but the source 'examples' provides only examples of a dataset",
                hint="leave the key `source` out, or set trainer.name=supervised",
            )
        if facts.config.algorithm.sample_filters:
            raise PlanError(
                f"algorithm.sample_filters applies to generated samples, but trainer {trainer!r} trains on {NAMES[kind]} "
                "of the dataset",
                hint="leave algorithm.sample_filters out",
            )
        samples = 2 if kind == "preferences" else 1
        return StepRows(name=NAMES[kind], samples=samples, samples_are="answers")

    @classmethod
    def gives(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        labels = LABELS.get(_kind(facts), frozenset())
        return _COLUMNS | (labels - ({"margin"} - facts.required.keys()))

    @classmethod
    def lacks(cls, config: PluginConfig, facts: PlanFacts, column: str) -> tuple[str, str] | None:
        kind = _kind(facts)
        why = f"trainer {facts.plugins['trainer'].ref.name!r} trains on {NAMES[kind]} of the dataset, which don't have this column"
        if (fix := advice_on_column(column, kind)) is not None:
            return why, fix
        if GLOSSARY[column].owner not in _GENERATED:
            return None
        return why, (
            f"set actor.objective to one for {NAMES[kind]}, such as {OBJECTIVES[kind]}, leave out what requires the column, "
            "or set trainer.name=on_policy"
        )

    @classmethod
    def parts_of_step(cls, config: PluginConfig, facts: PlanFacts) -> Sequence[PlannedPart]:
        kind, trainer = _kind(facts), facts.plugins["trainer"].ref.name
        part = PlannedPart(
            name=kind,
            who=facts.plugins["data.source"].ref.name,
            because=f"trainer {trainer} takes {NAMES[kind]} of the dataset",
            provides=cls.gives(config, facts),
        )
        return [part]

    @classmethod
    def read_tokenizer(cls, config: PluginConfig, facts: PlanFacts) -> Tokenizer:
        return read_tokenizer(facts.config)

    @classmethod
    def load(cls, config: PluginConfig, facts: PlanFacts, tokenizer: Tokenizer) -> SourceData:
        run, kind = facts.config, _kind(facts)
        section = run.data
        refuse_no_files(section)
        if section.continue_answer:
            raise ConfigError(
                f"data.continue_answer=true makes the policy continue an unfinished answer, but trainer {facts.plugins['trainer'].ref.name!r} "
                f"generates no responses: it trains on {NAMES[kind]} of the dataset",
                hint="leave data.continue_answer out: this trainer trains on the complete answers of the dataset",
            )
        dataset, folder = configured_dataset(run, tokenizer), media_dir(run)
        before = f"{section.max_prompt_length} tokens before the first trained token"
        limits = f"{before}, or {section.max_response_length} from that token on,"
        if section.max_length is not None:
            limits = f"{section.max_length} tokens"
        how = tokenizer, section, run.model, kind, folder
        train = load_datasets(dataset, datasets_of(section), *how)
        val = load_examples(dataset, section.val_files, *how) if section.val_files else None
        return data_of(tokenizer, train, val, section, rows_are=NAMES[kind], limits=limits)

    def open(self, site: Site) -> None:
        self._site, facts = site, site.plan.facts
        self._closing = Closing.of(facts, self.context.tokenizer)
        self._labels = LABEL_COLUMNS & self.gives(self.config, facts)
        self._given_back: list[Example] = []
        self._taken: dict[int, list[Example]] = {}
        self._held_out: Sequence[Any] = site.data.val.prompts if site.data.val else ()
        _check_labels([*site.data.train.one_of_each(), *self._held_out[:1]], facts.required)
        self._validation = self._batch(self._held_out) if self._held_out else None

    def collect(self, step: StepContext, ask: StepAsk) -> StepExamples:
        """Return the next examples; those that an earlier step gave back, because it ended early, come first."""
        config = self._site.config
        issued: Any = self._site.loader.next_batch(ask.groups - len(self._given_back))
        examples: list[Example] = [*self._given_back, *issued]
        self._given_back, self._taken = [], {step.number: examples}
        ledger = self._site.ledger
        for example in examples:
            epoch, row, attempt = example.key
            ledger.take(epoch, row, attempt, step=step.number)
        step.tokens = count_tokens(examples)
        step.metrics |= _metrics(examples)
        tokens = [(example, count_tokens([example])) for example in examples]
        step.metrics |= share_metrics(tokens, config.data.mixture)
        if self._site.data.train.streamed:
            dropped = ledger.counts()["dropped"]
            step.metrics["data/overlong"] = float(dropped.get("overlong", 0))
            if met := self._site.loader.prompts.bad:
                step.metrics["data/bad_rows"] = float(len(met))
                self._site.directory.name_bad_rows(filter(None, met.values()), self._site.logger)
        self._show(examples, step)
        return StepExamples(examples, self._closing, self._labels)

    def settle(self, step: int, trained: Collection[Key], left_out: Mapping[Key, str]) -> None:
        self._site.ledger.settle(step, trained, left_out)

    def give_back(self, step: int, *, sound: bool) -> None:
        self._site.ledger.give_back(step)
        self._given_back = self._taken.pop(step, self._given_back)

    def validate(self, measure: Measure) -> dict[str, float]:
        """Return the metrics of each trained model's objective on the held-out examples, as one mini-batch; empty if there are none."""
        if self._validation is None:
            return {}
        with self._site.phase("validation"):
            return dict(measure(self._validation))

    def fixed(self) -> Sequence[Batch]:
        """Return all examples as batches, held-out ones included, so that frozen models score each example only once.

        Empty if the examples are streamed, or if the run trains on none of them twice.
        """
        config, examples = self._site.config, self._site.loader.prompts
        size, steps = config.data.train_batch_size, self._site.plan.counts.steps
        if self._site.data.train.streamed or steps * size <= len(examples):
            return ()
        return [
            self._batch(part[start : start + size])
            for part in (examples, self._held_out)
            for start in range(0, len(part), size)
        ]

    def _batch(self, examples: Sequence[Any]) -> Batch:
        return StepExamples(examples, self._closing, self._labels).batch()

    def _show(self, examples: Sequence[Example], step: StepContext) -> None:
        """Write up to `trainer.samples_per_step` answers to the run directory, and send them to observers."""
        limit = self._site.config.trainer.samples_per_step
        rows: list[dict[str, Any]] = []
        for example in examples:
            for number, answer in enumerate(example.answers):
                if 0 <= limit <= len(rows):
                    break
                text = self.context.tokenizer.decode(answer.ids.tolist())
                row = {"sample_id": _name(example, number), "prompt": example.raw, "response": text}
                side = {"side": _SIDES[number]} if len(example.answers) > 1 else {}
                rows.append({**row, **side, **example.labels})
        self._site.directory.write_samples(step.number, rows)
        self._site.hooks.samples_logged(step=step.number, rows=encodable(plain(rows)))


def _kind(facts: PlanFacts) -> Examples:
    """Return the kind of example that the trainer takes.

    Raises:
        PlanError: the trainer's `examples` returned no kind of example.
    """
    trainer = facts.plugins["trainer"]
    kind: Examples = called(
        lambda: f"`examples` of {trainer.title}", trainer.cls.examples, trainer.config
    )
    if kind not in get_args(Examples):
        raise PlanError(
            f"`examples` of {trainer.title} returned {kind!r}; expected one of {', '.join(map(repr, get_args(Examples)))}"
        )
    return kind


def _check_labels(examples: Iterable[Any], required: Mapping[str, str]) -> None:
    """Check that the rows of every dataset have the label columns that the run requires.

    Args:
        examples: one example of each dataset, whose columns are taken as those of all its rows.
        required: the required columns of a step, each with the plugin that requires it.

    Raises:
        DataError: a dataset lacks a required column.
    """
    for example in examples:
        for column in LABEL_COLUMNS & required.keys() - example.labels.keys():
            raise DataError(
                f"{example.where}: the row has no column {column!r}, which {required[column]} requires",
                hint=f"add the column {column!r} to the dataset, or choose settings that do not require it",
            )


def _response(
    example: Example, answer: TrainedResponse, closing: Closing | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and mask of a response, [T] each; with closing tokens, the mask is True on the last token only."""
    if closing is None:
        return answer.ids, answer.mask
    ids_T = answer.ids.tolist()
    if not isinstance(example.raw, str):
        ids_T = [*ids_T[: len(ids_T) - closing.added], *closing.tail]
    ids = np.array([*ids_T, closing.token], np.int64)
    return ids, np.arange(len(ids)) == len(ids) - 1


def _image_mask(answer: TrainedResponse, length: int) -> np.ndarray:
    """Return a mask, bool [length]: True on the answer's image placeholders, False on other tokens and on closing tokens."""
    mask = np.zeros(length, np.bool_)
    if answer.image_mask is not None:
        mask[: len(answer.image_mask)] = answer.image_mask[:length]
    return mask


def _name(example: Example, number: int) -> str:
    epoch, row, attempt = example.key
    return f"train.e{epoch}.p{row}.a{attempt}.s{number}"


def _metrics(examples: Sequence[Example]) -> dict[str, float]:
    """Return metrics of a step's examples, under the names of rollout metrics if they mean the same."""
    answers = [answer for example in examples for answer in example.answers]
    lengths = np.array([len(answer.ids) for answer in answers], np.float64)
    prompts = np.array([len(example.prompt_ids) for example in examples], np.float64)
    truncated = Truncation.of((example.lost for example in examples), count_tokens(examples))
    return {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "prompt_length/mean": float(prompts.mean()),
        "prompt_length/max": float(prompts.max()),
        "data/trained_tokens": float(sum(answer.mask.sum() for answer in answers)),
        "data/truncated_share": truncated.rows / truncated.of_rows,
        "data/lost_token_share": truncated.tokens / max(truncated.of_tokens, 1),
    }
