"""Workers for the suite of runtimes: small, without a model, and loaded from this file in every process."""

from __future__ import annotations

from typing import Any

from dovetail.interfaces import PluginContext
from dovetail_sdk.testing.scripted_rollout import Script, ScriptedRollout


class EchoRollout(ScriptedRollout):
    """Rollout replica whose response to every prompt is the run's seed, the replica's index and the prompt's token ids."""

    name = "EchoRollout"

    def __init__(self, config: Any, context: PluginContext) -> None:
        super().__init__(config, context)
        first = [context.seed, context.rank]
        self.script = Script(answer=lambda request, _: first + request.prompt_ids.tolist())
