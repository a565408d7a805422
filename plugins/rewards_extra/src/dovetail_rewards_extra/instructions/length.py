"""Instructions on the length of a response: words, sentences and paragraphs."""

from __future__ import annotations

import re

from dovetail_rewards_extra.instructions.registry import Relation, compare, instruction
from dovetail_rewards_extra.instructions.words import WORD

# The possessive `++` and the lookbehind keep the search linear: a row of full stops is read only once.
_SENTENCE_END = re.compile(
    r"(?<![.!?。！？])[.!?。！？]++[\"'”’)\]]*+(?=\s|$)|[。！？]|\n[^\S\n]*+\n", re.MULTILINE
)
_NO_END = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|e\.g|i\.e|etc|[A-Z])\.(?=\s)")
_RULE = re.compile(r"^[^\S\n]{0,64}(?:\*\*\*|---|___)[^\S\n]*$", re.MULTILINE)


def sentences(text: str) -> int:
    """Return the number of sentences. A sentence has at least one word and ends with `.`, `!`, `?` or an empty line.

    The full stop of a common abbreviation, such as `Dr.`, does not end a sentence.
    """
    plain = _NO_END.sub(lambda match: match.group()[:-1], text)
    return sum(WORD.search(piece) is not None for piece in _SENTENCE_END.split(plain))


def paragraphs(text: str) -> list[str]:
    """Return the non-empty paragraphs between empty lines."""
    return [part.strip() for part in re.split(r"\n[^\S\n]*\n", text) if part.strip()]


@instruction("length_constraints:number_words")
def has_words(text: str, *, num_words: int, relation: Relation = "at least") -> bool:
    """Check for at least `num_words` words or, with `relation` "less than", for fewer."""
    return compare(len(WORD.findall(text)), relation, num_words)


@instruction("length_constraints:number_sentences")
def has_sentences(text: str, *, num_sentences: int, relation: Relation = "at least") -> bool:
    """Check for at least `num_sentences` sentences or, with `relation` "less than", for fewer."""
    return compare(sentences(text), relation, num_sentences)


@instruction("length_constraints:number_paragraphs")
def has_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Check for exactly `num_paragraphs` paragraphs, separated by lines of `***`."""
    parts = [part.strip() for part in _RULE.split(text)]
    inner = parts[1 if not parts[0] else 0 : -1 if len(parts) > 1 and not parts[-1] else None]
    return len(inner) == num_paragraphs and all(inner)


@instruction("length_constraints:nth_paragraph_first_word")
def nth_begins_with(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Check for exactly `num_paragraphs` paragraphs between empty lines, with `first_word` at the start of the n-th, counted from 1."""
    parts = paragraphs(text)
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    word = WORD.search(parts[nth_paragraph - 1])
    return word is not None and word.group().casefold() == first_word.strip().casefold()
