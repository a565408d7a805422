"""The reward function `instruction_following`: checks whether the response follows instructions that a program can check."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from dovetail.errors import nearest
from dovetail.interfaces import GroundTruth, PluginConfig, RewardFunction
from dovetail_rewards_extra.config import InstructionFollowingConfig
from dovetail_rewards_extra.instructions import INSTRUCTIONS


@attrs.frozen
class _Wanted:
    """One instruction of a sample's ground truth: its name and arguments."""

    name: str
    arguments: Mapping[str, Any]

    @property
    def complaint(self) -> str | None:
        known = INSTRUCTIONS.get(self.name)
        if known is not None:
            return known.complaint(self.arguments)
        close = nearest(self.name, INSTRUCTIONS)
        return f"the ground truth names an unknown instruction {self.name!r}" + (
            f"; nearest: {close!r}" if close else ""
        )


class InstructionFollowing(RewardFunction):
    """Checks verifiable instructions as IFEval does (arXiv:2311.07911), under IFEval's names: `keywords:existence` and 23 others.

    The ground truth is `{"instruction_id_list": […], "kwargs": [{…}, …]}` as in IFEval, a list of `{"instruction": name, …arguments}`, or
    JSON text of either; null arguments are ignored. An empty response follows no instruction. Strict scoring checks the unchanged response.
    `loose` also checks the response without the first line, the last line or both, each with and without asterisks.
    """

    name = "instruction_following"
    api = ">=1.0,<2"
    aliases = ("ifeval", "google/IFEval")
    capabilities = frozenset({"deterministic"})
    pure = True
    Config = InstructionFollowingConfig

    def compute_score(
        self,
        data_source: str | None,
        solution_str: str,
        ground_truth: GroundTruth,
        extra_info: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        """Return `score`, `share` (of instructions followed), `all` (1 or 0), and `broken`: the names of instructions not followed.

        Raises:
            ValueError: the ground truth holds no instructions, or invalid instructions.
        """
        wanted = _instructions(ground_truth)
        problem = _complaint(wanted)
        if wanted is None or problem:
            raise ValueError(problem)
        texts = list(_versions(solution_str)) if self.config.loose else [solution_str]
        texts = [text for text in texts if text.strip()]
        kept = [
            any(INSTRUCTIONS[one.name].holds(text, **one.arguments) for text in texts)
            for one in wanted
        ]
        share = sum(kept) / len(kept)
        result = share if self.config.scoring == "share" else float(all(kept))
        broken = [one.name for one, good in zip(wanted, kept, strict=True) if not good]
        return {
            "score": self.config.score * result,
            "share": share,
            "all": float(all(kept)),
            "broken": broken,
        }

    @classmethod
    def check_row(cls, config: PluginConfig, ground_truth: GroundTruth) -> str | None:
        return _complaint(_instructions(ground_truth))


def _instructions(ground_truth: GroundTruth) -> list[_Wanted] | None:
    """Return the instructions in a ground truth; None if the ground truth has none of the accepted forms."""
    if isinstance(ground_truth, str):
        try:
            ground_truth = json.loads(ground_truth)
        except (ValueError, RecursionError):
            return None
    if isinstance(ground_truth, Mapping) and "instruction_id_list" in ground_truth:
        names = ground_truth["instruction_id_list"]
        arguments = ground_truth.get("kwargs")
        if not _is_list(names) or not (arguments is None or _is_list(arguments)):
            return None
        arguments = [{}] * len(names) if arguments is None else arguments
        pairs = list(zip(names, arguments, strict=True)) if len(names) == len(arguments) else []
    elif _is_list(ground_truth) and all(isinstance(item, Mapping) for item in ground_truth):
        pairs = [
            (item.get("instruction"), {k: v for k, v in item.items() if k != "instruction"})
            for item in ground_truth
        ]
    else:
        return None
    if not all(isinstance(n, str) and isinstance(a, (Mapping, type(None))) for n, a in pairs):
        return None
    return [
        _Wanted(name, {key: value for key, value in (given or {}).items() if value is not None})
        for name, given in pairs
    ]


def _complaint(wanted: Sequence[_Wanted] | None) -> str | None:
    if not wanted:
        return (
            "the ground truth holds no instructions; expected {'instruction_id_list': […], 'kwargs': […]} with lists of equal "
            "lengths, or a list of {'instruction': name, …}, or either as JSON text"
        )
    return next((one.complaint for one in wanted if one.complaint), None)


def _versions(text: str) -> Iterator[str]:
    """Yield the response, the response without its first line, last line, or both, and each of these without asterisks."""
    lines = text.strip().split("\n")
    for part in (lines, lines[1:], lines[:-1], lines[1:-1]):
        version = "\n".join(part).strip()
        yield version
        yield version.replace("*", "")


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))
