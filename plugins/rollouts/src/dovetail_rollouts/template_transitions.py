"""Changes that a chat template makes to earlier turns when later turns follow, tried on short conversations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from typing import Any

import attrs

from dovetail.interfaces import MessageCall
from dovetail_datasets import SENTINEL, unmarked
from dovetail_rollouts.turn_encoder import TurnEncoder, squeezed

CHOICES = {
    "keep": "The policy sees its turns as it produced them",
    "fork": "After such a change, a new sequence of the episode begins with the conversation rendered again",
    "refuse": "The run is refused",
}
"""The values of `on_history_change`, each with its effect."""
OTHER_TEMPLATE = "set model.chat_template to a template that renders them"
_PROMPT = ({"role": "user", "content": "question"},)
_SHOWN = "OBSERVEDKQZ"
_OPEN = "<think>"
_THOUGHT = "THOUGHTKQZ"


class TransitionClass(StrEnum):
    """How a chat template renders earlier turns when later turns follow."""

    STABLE = "stable"
    """Earlier turns stay as they were produced."""
    HISTORY_CHANGING = "history-changing"
    """Earlier turns are rendered differently from how they were produced."""
    UNSUPPORTED = "unsupported"
    """The template raises an error, or leaves out the later messages."""


@attrs.frozen(kw_only=True)
class TemplateTransition:
    """How a chat template changes the rendering of a turn when a message of one kind follows the turn."""

    name: str
    """The transition's name: `tool`, `parallel_tools`, `user`; `thinking/tool` and `thinking/user` after a turn with reasoning."""
    found: TransitionClass
    why: str = ""
    """The error that the template raised, or the change that it made."""


def template_transitions(encoder: TurnEncoder) -> tuple[TemplateTransition, ...]:
    """Render each kind of message that may follow an assistant's turn, and classify what the chat template does to the turn.

    A transition is stable if the rendered conversation begins with the policy's prompt and produced turn, apart from white space. The
    template gets a turn's reasoning as part of the text: `<think>…</think>`.
    """
    calls = {"tool": _calls(1), "parallel_tools": _calls(2), "user": []}
    found = []
    for thinks in (False, True):
        for name, called in calls.items():
            if not (thinks and name == "parallel_tools"):
                found.append(_tried(encoder, name, called, thinks=thinks))
    return tuple(found)


def observed_transitions(
    encoder: TurnEncoder, observed: Collection[str]
) -> tuple[TemplateTransition, ...]:
    """Return the transitions for the kinds of message in `observed` (see `AgentLoop.transitions`), with and without reasoning."""
    found = template_transitions(encoder)
    return tuple(t for t in found if t.name.split("/")[-1] in observed)


def history_changes(found: Iterable[TemplateTransition]) -> str:
    """Return a text that names the kinds of message after which the template renders earlier turns differently; empty without any."""
    changing = [t for t in found if t.found is TransitionClass.HISTORY_CHANGING]
    if not changing:
        return ""
    return f"the chat template renders earlier turns differently once other turns follow: {listed(changing)}"


def listed(transitions: Iterable[TemplateTransition]) -> str:
    """Return the names and reasons of transitions as a text of one line."""
    return "; ".join(f"{t.name} ({t.why})" for t in transitions)


def not_rendered(found: Iterable[TemplateTransition], observed: Collection[str]) -> str:
    """Return a text with the kinds of message in `observed` that the template can't render, and why; empty if it renders all.

    Only turns without reasoning count.
    """
    return listed(t for t in found if t.found is TransitionClass.UNSUPPORTED and t.name in observed)


def _tried(
    encoder: TurnEncoder, name: str, calls: Sequence[MessageCall], *, thinks: bool
) -> TemplateTransition:
    following = _results(calls) if calls else [{"role": "user", "content": _SHOWN}]
    title = f"thinking/{name}" if thinks else name

    def unsupported(why: str) -> TemplateTransition:
        return TemplateTransition(name=title, found=TransitionClass.UNSUPPORTED, why=why)

    try:
        asked = unmarked(encoder.render(_PROMPT, generate=True))
        # If the prompt ends with `<think>`, every turn has a thought, and the policy does not write the opening tag.
        opened = asked.rstrip().endswith(_OPEN)
        turn = encoder.sentinel_turn(calls)
        if thinks or opened:
            turn["content"] = f"{_OPEN}\n{_THOUGHT}\n</think>\n\n{turn['content']}"
        after = unmarked(encoder.render([*_PROMPT, turn, *following], generate=True))
    except Exception as error:  # noqa: BLE001 - a template raises what it likes
        return unsupported(f"{type(error).__name__}: {error}")
    before, sentinel, rest = after.rpartition(SENTINEL)
    if not sentinel:
        return unsupported("it leaves out the assistant's turn")
    left_out = [m for m in following if m["content"] not in rest]
    if left_out:
        return unsupported(f"it leaves out {len(left_out)} of {len(following)} messages")
    produced = str(turn["content"]).removeprefix(_OPEN if opened else "")
    if squeezed(before + sentinel).startswith(squeezed(asked + produced)):
        return TemplateTransition(name=title, found=TransitionClass.STABLE)
    why = "it renders the turn differently"
    if not squeezed(after).startswith(squeezed(asked)):
        why = "it renders the messages before the turn differently"
    elif _THOUGHT in produced and _THOUGHT not in after:
        why = "it leaves out the turn's thinking"
    return TemplateTransition(name=title, found=TransitionClass.HISTORY_CHANGING, why=why)


def _calls(count: int) -> list[MessageCall]:
    return [
        {
            "id": f"call{number:05}",  # nine letters and digits, which Mistral's templates require
            "type": "function",
            "function": {"name": f"tool_{number}", "arguments": {"value": number}},
        }
        for number in range(count)
    ]


def _results(calls: Sequence[MessageCall]) -> list[dict[str, Any]]:
    return [
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "name": call["function"]["name"],
            "content": f"{_SHOWN}{number}",
        }
        for number, call in enumerate(calls)
    ]
