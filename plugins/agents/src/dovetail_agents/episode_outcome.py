"""EpisodeOutcome: leaves episodes out of training because of the way in which they ended, or of errors in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool

from dovetail.batch import Batch
from dovetail.interfaces import EpisodeEnd, Groups, PluginConfig, SampleFilter, Trajectory, Turn
from dovetail_agents.config import EpisodeOutcomeConfig
from dovetail_agents.tool_agent import UNREADABLE


class EpisodeOutcome(SampleFilter):
    r"""keep episode i  ⇔  none of `outcomes` applies to episode i.

    | outcome | the episode |
    |---|---|
    | `no_answer` | was ended neither by a tool nor by an answer, which is a turn without calls that has a match of `answer` |
    | `void_turn` | has a turn with neither a readable call nor a match of `answer` (SimpleTIR, arXiv 2509.02479) |
    | `unreadable_call` | has a call that the parser can't read |
    | `turns` | ended at `max_turns` |
    | `tokens` | ended at `data.max_response_length`, or its last turn was cut off at this limit |
    | `calls` | has a turn with more calls than `max_calls_per_turn` |

    With `action: drop`, an episode is removed from its group before advantages are computed. With `mask`, the episode still
    counts in the group's mean and spread, but its tokens have no loss, as in SimpleTIR. An episode that took longer than
    `max_seconds`, or whose tool failed, has no score and is never trained on.

    In a config:

        algorithm:
          sample_filters:
          - {name: episode_outcome, outcomes: [void_turn], answer: '\\boxed', action: mask}
    """

    name = "episode_outcome"
    api = ">=1.1,<2"
    capabilities = frozenset({"deterministic"})
    Config = EpisodeOutcomeConfig
    action = "drop"

    @classmethod
    def action_of(cls, config: PluginConfig) -> Literal["drop", "mask"]:
        return config.action

    @classmethod
    def requires(cls, config: PluginConfig) -> frozenset[str]:
        return frozenset({"trajectory", "finish_reason"})

    def keep(self, columns: Batch, groups: Groups) -> Bool[np.ndarray, "N"]:
        """Return bool [N]: False for the sequences of an episode with one of the configured outcomes.

        Args:
            columns: `trajectory`, N JSON objects, and `finish_reason`, N texts.
            groups: the episode to which each sequence belongs.
        """
        columns.require(["trajectory", "finish_reason"], "sample filter 'episode_outcome'")
        unwanted = frozenset(self.config.outcomes)
        found_N = np.array(
            [
                not unwanted.isdisjoint(self._outcomes(trajectory, str(reason)))
                for trajectory, reason in zip(
                    columns["trajectory"], columns["finish_reason"], strict=True
                )
            ],
            np.bool_,
        )
        return groups.trajectory_mean_N(found_N.astype(np.float64)) == 0

    def _outcomes(self, document: Mapping[str, Any], finish_reason: str) -> set[str]:
        """Return all outcomes that apply to an episode, from its trajectory as JSON values and its `finish_reason`."""
        trajectory = Trajectory.from_json(document)
        last = trajectory.turns[-1]
        by_tool = trajectory.end is EpisodeEnd.DONE and bool(last.calls)
        true_of = {
            "no_answer": not by_tool and not self._answers(last),
            "void_turn": any(
                not _readable_calls(turn) and not self._answers(turn) for turn in trajectory.turns
            ),
            "unreadable_call": trajectory.counts.get("unreadable_calls", 0) > 0,
            "turns": trajectory.end is EpisodeEnd.TURNS,
            "tokens": trajectory.end is EpisodeEnd.TOKENS or finish_reason == "length",
            "calls": trajectory.counts.get("skipped_calls", 0) > 0,
        }
        return {outcome for outcome, holds in true_of.items() if holds}

    def _answers(self, turn: Turn) -> bool:
        return not turn.calls and re.search(self.config.answer, turn.text) is not None


def _readable_calls(turn: Turn) -> bool:
    return any(call["function"]["name"] != UNREADABLE for call in turn.calls)
