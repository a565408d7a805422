r"""Extracts a response's answer: from the last box, after the last label, or from the last tag.

Every search reads the text once, so that even a response of 100 kB of braces takes milliseconds.
"""

from __future__ import annotations

import re

from dovetail.interfaces import GroundTruth

_BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)\s{0,4}\{|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s{1,4}([^\s{}$\\]{1,64})")
_LABEL = re.compile(
    r"\banswer\b[*_`\s]{0,4}(?:is|[:：=])[*_`]{0,3}[^\S\n]{0,8}[:：]?", re.IGNORECASE
)
_STATED_LABEL = re.compile(r"\banswer\b[*_`]{0,3}[^\S\n]{0,4}[:：][*_`]{0,3}", re.IGNORECASE)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{…}` (or `\fbox{…}`), or None.

    Braces must match; escaped braces (`\{`) are ignored. `\boxed 5` without braces counts only if no box has braces.
    """
    opened: list[int | None] = []
    start, found = -1, None
    for token in _BOX_TOKEN.finditer(text):
        mark = token.group()
        if len(mark) > 2:
            opened.append(token.end())
        elif mark == "{":
            opened.append(None)
        elif mark == "}" and opened:
            box = opened.pop()
            if box is not None and box > start:
                start, found = box, text[box : token.start()]
    if found is not None:
        return found.strip()
    bare = last_match(_BARE_BOX, text)
    return bare.group(1).rstrip(".,;") if bare else None


def after_label(text: str, *, stated: bool = False) -> str | None:
    """Return the text after the last label `Answer:` or `answer is`, up to the end of its line; None without a label or without text.

    Surrounding Markdown marks are removed. If the label ends its line, the next line with text is returned.

    Args:
        text: the response.
        stated: whether only `Answer:`, in upper or lower case, counts as a label.
    """
    label = last_match(_STATED_LABEL if stated else _LABEL, text)
    if label is None:
        return None
    line = text[label.end() :].lstrip().partition("\n")[0].strip()
    return line.strip("*_`").strip() or None


def last_tag(text: str, tag: str) -> str | None:
    """Return the text between the last `</tag>` and the `<tag>` before it, stripped; None if a tag is missing."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return text[start + len(tag) + 2 : end].strip() if start >= 0 and end >= 0 else None


def extracted(pattern: re.Pattern[str] | None, text: str) -> str | None:
    """Return the last match of a pattern (its first group, if any), or None; without a pattern, return the whole text."""
    if pattern is None:
        return text
    match = last_match(pattern, text)
    return match.group(1 if pattern.groups else 0) if match else None


def truth_texts(ground_truth: GroundTruth) -> list[str]:
    """Return the accepted answers in a ground truth, unchanged; empty if it has none, or an answer is neither text nor number."""
    several = isinstance(ground_truth, (list, tuple))
    answers = list(ground_truth) if several else [ground_truth]
    known = all(isinstance(answer, (str, int, float)) for answer in answers)
    return [str(answer) for answer in answers] if known else []


def accepted_texts(ground_truth: GroundTruth) -> list[str]:
    """Return the accepted answers in a ground truth, stripped; empty if it has none, or an answer is blank."""
    texts = [text.strip() for text in truth_texts(ground_truth)]
    return texts if all(texts) else []


def complaint(ground_truth: GroundTruth) -> str | None:
    """Return why a ground truth holds no accepted answer, or None."""
    if accepted_texts(ground_truth):
        return None
    return f"ground truth {_cut(ground_truth)} holds no answer; expected a number, a text that is not blank, or a list of them"


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Return the last match of a pattern in the text, or None."""
    found = None
    for match in pattern.finditer(text):
        found = match
    return found


def _cut(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
