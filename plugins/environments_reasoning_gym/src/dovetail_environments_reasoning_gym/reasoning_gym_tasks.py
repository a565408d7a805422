"""ReasoningGym: an environment of questions that reasoning-gym generates and scores in this process; the policy answers in one turn."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dovetail.errors import ConfigError, nearest
from dovetail.interfaces import PluginConfig, PluginContext
from dovetail_environments import Environment, EnvironmentEpisode, EnvironmentTask, EpisodeScore
from dovetail_environments_reasoning_gym.config import ReasoningGymConfig

_TAG = "<answer>"
_APART = 2**30
"""Distance between the seeds of training and held-out questions. It is large, since reasoning-gym adds a question's index to the seed."""
_TRIES = 20
"""Maximum number of questions generated per held-out task; small datasets repeat questions, and repeated ones are skipped."""


class ReasoningGym(Environment):
    """Asks the policy questions from reasoning-gym's datasets. The reward is the result of the dataset's `score_answer`, from 0 to 1.

    A question depends only on the config, the run's seed and the task's index. No held-out question is asked in training.

    In a config:

        rollout:
          agent_loop:
            name: environments
            environments: {puzzles: {name: reasoning_gym, datasets: {chain_sum: {max_terms: 3}, coin_flip: {}}}}
    """

    name = "reasoning_gym"
    api = ">=1.0,<2"
    Config = ReasoningGymConfig

    def __init__(self, config: PluginConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._made: dict[tuple[str, bool], Any] = {}

    def tasks(self, count: int, *, held_out: bool) -> Sequence[EnvironmentTask]:
        names = list(self.config.datasets)
        if not held_out:
            places = [(names[n % len(names)], n // len(names)) for n in range(count)]
            return [self._task(name, number, held_out=False) for name, number in places]
        asked = {task.prompt for task in self.tasks(self.config.tasks, held_out=False)}
        found: list[EnvironmentTask] = []
        for place, name in enumerate(names):
            found += self._unasked(name, (count + len(names) - 1 - place) // len(names), asked)
        return found

    async def run(self, task: Mapping[str, Any], episode: EnvironmentEpisode) -> EpisodeScore:
        from reasoning_gym.utils import extract_answer

        turn = await episode.session.generate()
        tagged = _TAG in self.config.instruction
        answer = extract_answer(turn.text) if tagged else turn.text.strip()
        score = await asyncio.to_thread(self._score, task, answer)
        parts = {task["dataset"]: score, "answered": float(answer is not None)}
        return EpisodeScore(reward=score, parts=parts)

    def _score(self, task: Mapping[str, Any], answer: str | None) -> float:
        dataset = self._dataset(task["dataset"], held_out=task["held_out"])
        return float(dataset.score_answer(answer, dataset[task["number"]]))

    def _unasked(self, name: str, count: int, asked: set[Any]) -> Iterator[EnvironmentTask]:
        """Yield up to `count` held-out tasks of the dataset `name`, without prompts that are in `asked`; add their prompts to `asked`."""
        for number in range(_TRIES * self.config.held_out):
            if not count:
                return
            task = self._task(name, number, held_out=True)
            if task.prompt not in asked:
                asked.add(task.prompt)
                count -= 1
                yield task

    def _task(self, name: str, number: int, *, held_out: bool) -> EnvironmentTask:
        entry = self._dataset(name, held_out=held_out)[number]
        return EnvironmentTask(
            prompt=f"{entry['question']}\n{self.config.instruction}".strip(),
            data={"dataset": name, "number": number, "held_out": held_out},
            ground_truth=None if entry["answer"] is None else str(entry["answer"]),
        )

    def _dataset(self, name: str, *, held_out: bool) -> Any:
        """Return the questions of a dataset, cached.

        Raises:
            ConfigError: reasoning-gym has no such dataset, or refuses the settings.
        """
        if (name, held_out) in self._made:
            return self._made[name, held_out]
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        key = f"rollout.agent_loop.environments.{self.context.role}.datasets"
        if name not in DATASETS:
            near = nearest(name, DATASETS)
            raise ConfigError(
                f"{key}: reasoning-gym has no dataset {name!r}",
                hint=f"did you mean {near!r}?"
                if near
                else "choose a dataset from reasoning-gym's GALLERY.md",
            )
        size = _TRIES * self.config.held_out if held_out else self.config.tasks
        seed = self.context.seed + _APART * held_out
        given = {"seed": seed, "size": size}
        settings = {**given, **self.config.datasets.get(name, {})}
        try:
            made = reasoning_gym.create_dataset(name, **settings)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"{key}.{name}: reasoning-gym refuses the dataset's settings {settings}: {error}",
                hint=f"set only settings that reasoning-gym's config class of {name} has",
            ) from error
        self._made[name, held_out] = made
        return made
