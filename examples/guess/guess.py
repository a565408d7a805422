"""A game: the policy guesses a number from 1 to 7, and `>` says that the number is larger, `<` that it is smaller."""

from __future__ import annotations

from dovetail.interfaces import AgentLoop, Session
from dovetail.sections import EpisodeSection

LOW, HIGH = 1, 7
DIGITS = tuple("1234567")
CONTRADICTION = -0.5


class Guess(AgentLoop):
    """Rewards a turn: 1 for the number, −0.5 for a guess that earlier answers exclude or that is no number, else 0."""

    name = "guess"
    api = ">=1.0,<2"
    Config = EpisodeSection

    async def run(self, session: Session) -> None:
        wanted = int(session.prompt.ground_truth)
        low, high = LOW, HIGH
        while True:
            text = (await session.generate(max_new_tokens=1, stop=DIGITS)).text
            guess = int(text) if text in DIGITS else 0
            if guess == wanted:
                session.reward(1.0)
                return
            if not low <= guess <= high:
                session.reward(CONTRADICTION)
                session.count("contradictions")
            if guess < wanted:
                low = max(low, guess + 1)
            else:
                high = min(high, guess - 1)
            await session.observe(">" if guess < wanted else "<")
