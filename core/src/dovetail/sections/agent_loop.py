"""The section of agent loops of many turns: the limits of an episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from dovetail.sections.fields import ABOVE_ZERO, AT_LEAST_ONE, COUNT, TOKENS, PluginSection


@attrs.frozen(kw_only=True)
class EpisodeSection(PluginSection):
    """Base of the configs of multi-turn agent loops."""

    max_turns: int = attrs.field(default=16, validator=COUNT)
    """Maximum number of the policy's turns, after which the episode is scored as it is. All turns and observations together have at most
    data.max_response_length tokens."""
    max_turn_tokens: int | None = attrs.field(default=None, validator=AT_LEAST_ONE)
    """Maximum tokens that the policy may generate in one turn; None: as many as the episode has left."""
    max_seconds: float | None = attrs.field(default=600.0, validator=ABOVE_ZERO)
    """Seconds that an episode may take; a longer episode fails and has no score. Waiting for new weights does not count."""
    max_observation_tokens: int = attrs.field(default=1024, validator=TOKENS)
    """Maximum tokens of the content of one message shown to the policy; longer content is cut."""
    observation_cut: Literal["left", "middle", "right"] = "middle"
    """Which part is cut out of content that is longer than `max_observation_tokens`."""
    on_history_change: Literal["keep", "fork", "refuse"] = "keep"
    """What to do if the chat template renders earlier turns differently once other turns follow (Qwen3 drops earlier thinking). `keep`: the
    policy continues to see the tokens that it produced. `fork`: the trajectory continues in a new sequence, with the conversation rendered
    again as a server would. `refuse`: such a template ends the run with an error before the first step."""

    def settings(self) -> Mapping[str, Any]:
        """Return the loop's defaults for other sections, as nested mappings; a key that a config layer gives overrides its default."""
        return {}
