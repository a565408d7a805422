"""SingleTurn: a sample is one response to the prompt."""

from __future__ import annotations

from dovetail.interfaces import AgentLoop, Session


class SingleTurn(AgentLoop):
    """Agent loop with one response to the prompt; the samples of a group are one request to the engine."""

    name = "single_turn"
    api = ">=1.0,<2"
    one_response = True

    async def run(self, session: Session) -> None:
        await session.generate()
