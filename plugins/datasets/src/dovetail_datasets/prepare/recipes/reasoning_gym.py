"""`reasoning_gym`: tasks that a program generates and checks."""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError, DataError, PluginNeedsError, nearest
from dovetail.interfaces import PlacedRow
from dovetail_datasets.prepare.config import ReasoningGymRecipeConfig
from dovetail_datasets.prepare.recipe import DataRecipe, Split, UnusedRow

_ASKED = "Reason step by step, and put the final answer between <answer> and </answer>."


class ReasoningGymRecipe(DataRecipe):
    """Reasoning Gym: one of about a hundred generated tasks, such as `reasoning_gym:leg_counting` (arXiv 2505.24760).

    Rows are generated on this machine, the validation rows after the training rows. Needs the package `reasoning-gym`, which also scores
    the answers.
    """

    name = "reasoning_gym"
    api = ">=1.0,<2"
    Config = ReasoningGymRecipeConfig
    licence = "Apache-2.0"
    scored_by = "reasoning_gym"
    distinct = True
    argument = "task"
    changes = (
        f"The prompt is the question and `{_ASKED}`.",
        "`extra_info.entry` is what the task's own scorer reads, as Python writes it.",
        "Of rows with the same prompt the first is kept, and no validation row has the prompt of a training row.",
    )

    def patterns(self) -> dict[Split, str]:
        return {"train": "", "validation": ""}

    def read(self, split: Split, folder: Path) -> Iterator[PlacedRow]:
        gym, config = reasoning_gym(), self.config
        if not config.task:
            raise ConfigError(
                "the recipe reasoning_gym has no task; expected the name of a task in Reasoning Gym",
                hint="name the task, as in `dovetail data prepare reasoning_gym:leg_counting`",
            )
        tasks = gym.factory.DATASETS
        if config.task not in tasks:
            near = nearest(config.task, tasks)
            raise ConfigError(
                f"Reasoning Gym has no task {config.task!r}; its tasks: {', '.join(sorted(tasks))}",
                hint=f"did you mean {near!r}?" if near else None,
            )
        size = config.size if split == "train" else config.validation_size
        # Reasoning Gym draws row i from seed + i, so the seeds of the splits must be `size` apart to have no row in common.
        seed = config.seed + (0 if split == "train" else config.size)
        try:
            made = gym.create_dataset(config.task, size=size, seed=seed, **config.options)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"Reasoning Gym refuses the options of the task {config.task!r}: {error}",
                hint="set in `options` only fields of the task's config in Reasoning Gym",
            ) from error
        for number in range(size):
            yield f"{config.task} of seed {seed}, row {number}", made[number]

    def convert(self, row: Mapping[str, Any], where: str) -> dict[str, Any] | UnusedRow:
        if row["answer"] is None:
            return UnusedRow("the task gives no answer")
        task, answer = self.config.task, str(row["answer"])
        # A Python literal keeps tuples and numeric keys, which scorers compare and JSON lacks.
        entry = repr(row)
        if scored(task, answer, entry) < 1:
            return UnusedRow("the task's own scorer does not give its answer the full score")
        return {
            "prompt": [{"role": "user", "content": f"{row['question'].strip()}\n\n{_ASKED}"}],
            "response": f"<answer>{answer}</answer>",
            "data_source": f"reasoning_gym/{task}",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"task": task, "entry": entry},
        }

    def made_with(self) -> str:
        version = importlib.metadata.version("reasoning-gym")
        return f"reasoning-gym {version}, task `{self.config.task}`"


def scored(task: str, answer: str, entry: str) -> float:
    """Return the score of an answer from the task's own scorer, from 0 to 1.

    Args:
        task: the task's name in Reasoning Gym.
        answer: the answer's text.
        entry: the row that the task made, as the text of a Python literal.

    Raises:
        DataError: the entry is not a row of the task.
    """
    try:
        row = ast.literal_eval(entry)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise DataError(
            f"an entry of the task {task!r} is not a Python literal: {error}: {entry[:80]}",
            hint="choose another task",
        ) from error
    return float(reasoning_gym().get_score_answer_fn(task)(answer, row))


def reasoning_gym() -> Any:
    """Return the imported package `reasoning_gym`.

    Raises:
        PluginNeedsError: the package is not installed.
    """
    try:
        import reasoning_gym as package
    except ImportError as error:
        raise PluginNeedsError(
            f"reasoning_gym needs the package reasoning-gym, which can't be imported: {error}",
            hint="pip install 'dovetail-datasets[reasoning_gym]'",
        ) from error
    return package
