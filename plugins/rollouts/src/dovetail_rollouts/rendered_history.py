"""RenderedHistory: the conversation of a session as messages, and where its chat template changes what was served."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces import Message, MessageCall
from dovetail_datasets import unmarked
from dovetail_rollouts.turn_encoder import TurnEncoder, squeezed


class RenderedHistory:
    """Compares the appended tokens with those of a server that renders all messages again at each turn.

    Args:
        encoder: the encoder of the run's chat template.
        messages: the messages of the prompt.
    """

    def __init__(self, encoder: TurnEncoder, messages: Sequence[Message]) -> None:
        self._encoder, self._messages = encoder, list(messages)
        self._served: str | None = None
        """What has been appended, up to where the latest turn began; every turn ends as the template ends it."""
        self._turn: str | None = None
        """What the policy has produced since, with texts that continued its turn."""

    def copy(self) -> RenderedHistory:
        """Return a copy that continues independently."""
        copied = RenderedHistory(self._encoder, self._messages)
        copied._served, copied._turn = self._served, self._turn
        return copied

    def produced(self, text: str) -> None:
        """Add to the latest turn."""
        self._turn = (self._turn or "") + text

    def observed(
        self,
        messages: Sequence[Message],
        calls: Sequence[MessageCall],
        produced: Message | None,
        appended: str,
    ) -> str | None:
        """Append messages that the policy sees after its turn.

        Args:
            messages: the messages as shown.
            calls: the tool calls of the turn.
            produced: the turn as a message without its calls; by default its text is the content, calls included.
            appended: the text between the turn and the next one, the end of the turn included.

        Returns:
            The whole conversation, rendered anew and to be encoded, where that is another text than the one that was served, white space
            aside.

        Raises:
            Exception: what the chat template raises.
        """
        if self._served is None:
            self._served = unmarked(self._encoder.render(self._messages, generate=True))
        if self._turn is not None:
            turn = {"content": self._turn} if produced is None else produced
            self._messages.append(
                self._encoder.produced_turn(turn, () if produced is None else calls)
            )
        self._messages += messages
        served = self._served + (self._turn or "") + appended
        rendered = self._encoder.render(self._messages, generate=True)
        reads = unmarked(rendered)
        same, self._turn = squeezed(reads) == squeezed(served), None
        self._served = served if same else reads
        return None if same else rendered
