"""The section of agent loops of many turns: the limits of an episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from dovetail.sections.fields import ABOVE_ZERO, AT_LEAST_ONE, COUNT, TOKENS, PluginSection


@attrs.frozen(kw_only=True)
class EpisodeSection(PluginSection):
    """Base of the config of an agent loop of many turns."""

    max_turns: int = attrs.field(default=16, validator=COUNT)
    """Most turns of the policy; after them the episode is scored as it is. All turns and observations together have at most
    data.max_response_length tokens."""
    max_turn_tokens: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Most tokens that the policy may produce in one turn; absent: as many as the episode has left."""
    max_seconds: float | None = attrs.field(default=600.0, validator=ABOVE_ZERO)
    """How long an episode may take; one that takes longer fails and has no score. Waiting for new weights does not count."""
    max_observation_tokens: int = attrs.field(default=1024, validator=TOKENS)
    """Most tokens of the content of one message that the policy is shown."""
    observation_cut: Literal["left", "middle", "right"] = "middle"
    """Which part of a longer content is left out."""
    on_history_change: Literal["keep", "fork", "refuse"] = "keep"
    """What to do where the chat template would render earlier turns differently once others follow (Qwen3 drops earlier thinking).
    `keep`: keep the produced tokens, which the policy then sees. `fork`: begin a further sequence of the trajectory with the conversation
    rendered again, as a server shows it. `refuse`: refuse the run."""

    def settings(self) -> Mapping[str, Any]:
        """Return the loop's defaults for other keys, as plain containers; any layer that gives a key overrides them."""
        return {}
