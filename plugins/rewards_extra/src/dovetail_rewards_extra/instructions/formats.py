"""Instructions on the form of a response: lists, sections, titles, JSON."""

from __future__ import annotations

import json
import re

from dovetail_rewards_extra.instructions.registry import instruction

_BULLET = re.compile(r"^[^\S\n]{0,64}(?:\*(?!\*)|[-+•])[^\S\n]?(?=[^\s*-])", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*\*([^\n*]+)\*\*|(?<!\*)\*([^\n*]+)\*(?!\*)")
_PLACEHOLDER = re.compile(r"\[[^\[\]\n]{1,200}\]")
_TITLE = re.compile(r"<<([^<>\n]{1,500})>>")
_CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


@instruction("detectable_format:number_bullet_lists")
def has_bullets(text: str, *, num_bullets: int) -> bool:
    """Check for exactly `num_bullets` bullet points, each a line that begins with `*`, `-`, `+` or `•`."""
    return len(_BULLET.findall(text)) == num_bullets


@instruction("detectable_format:number_highlighted_sections")
def has_highlights(text: str, *, num_highlights: int) -> bool:
    """Check for at least `num_highlights` passages between `*` and `*`, or `**` and `**`, on one line."""
    found = sum(bool((a or b).strip()) for a, b in _HIGHLIGHT.findall(text))
    return found >= num_highlights


@instruction("detectable_format:multiple_sections")
def has_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    """Check for at least `num_sections` sections, each headed by `section_spliter` and a number, such as `SECTION 1`."""
    head = rf"(?<!\w){re.escape(section_spliter.strip())}\s?\d"
    return len(re.findall(head, text)) >= num_sections


@instruction("detectable_format:title")
def has_title(text: str) -> bool:
    """Check for a title in double angular brackets: `<<Title>>`."""
    return any(title.strip() for title in _TITLE.findall(text))


@instruction("detectable_format:json_format")
def is_json(text: str) -> bool:
    """Check that the whole response is JSON; a code fence around it is allowed."""
    text = text.strip()
    opening, _, body = text.partition("\n")
    if opening.startswith("```") and body.endswith("```"):
        text = body.removesuffix("```")
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


@instruction("detectable_format:constrained_response")
def is_constrained(text: str) -> bool:
    """Check for one of the answers `My answer is yes.`, `… no.`, `… maybe.`."""
    return any(choice in text for choice in _CHOICES)


@instruction("detectable_content:number_placeholders")
def has_placeholders(text: str, *, num_placeholders: int) -> bool:
    """Check for at least `num_placeholders` placeholders in square brackets, such as `[address]`."""
    return len(_PLACEHOLDER.findall(text)) >= num_placeholders


@instruction("detectable_content:postscript")
def has_postscript(text: str, *, postscript_marker: str) -> bool:
    """Check that text follows a marker such as `P.S.` at the beginning of a line, ignoring case and spaces inside the marker."""
    letters = [re.escape(letter) for letter in postscript_marker if not letter.isspace()]
    marker = r"[^\S\n]?".join(letters)
    return (
        re.search(rf"^[^\S\n]{{0,64}}{marker}[^\S\n]*\S", text, re.IGNORECASE | re.MULTILINE)
        is not None
    )


@instruction("combination:two_responses")
def has_two_responses(text: str) -> bool:
    """Check for two different responses, separated by six asterisks."""
    parts = [part.strip() for part in text.split("******")]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]
