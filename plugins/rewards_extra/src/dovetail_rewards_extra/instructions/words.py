"""Instructions on words, letters and case."""

from __future__ import annotations

import re

from dovetail_rewards_extra.instructions.registry import Relation, compare, instruction

WORD = re.compile(r"\w+(?:['’-]\w+)*")
"""Pattern of a word: letters and digits, joined by apostrophes or hyphens."""


def occurrences(text: str, word: str) -> int:
    """Return the number of occurrences of a word or phrase as whole words, ignoring case."""
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


@instruction("keywords:existence")
def has_keywords(text: str, *, keywords: tuple[str, ...]) -> bool:
    """Check that every keyword occurs."""
    return all(occurrences(text, word) for word in keywords)


@instruction("keywords:forbidden_words")
def lacks_words(text: str, *, forbidden_words: tuple[str, ...]) -> bool:
    """Check that no forbidden word occurs."""
    return not any(occurrences(text, word) for word in forbidden_words)


@instruction("keywords:frequency")
def has_keyword_often(
    text: str, *, keyword: str, frequency: int, relation: Relation = "at least"
) -> bool:
    """Check that a keyword occurs at least `frequency` times or, with `relation` "less than", less often."""
    return compare(occurrences(text, keyword), relation, frequency)


@instruction("keywords:letter_frequency")
def has_letter_often(
    text: str, *, letter: str, let_frequency: int, let_relation: Relation = "at least"
) -> bool:
    """Check that a letter, ignoring case, occurs at least `let_frequency` times or, with `let_relation` "less than", less often."""
    return compare(text.casefold().count(letter.casefold()), let_relation, let_frequency)


@instruction("change_case:english_lowercase")
def is_lower_case(text: str) -> bool:
    """Check that the text has letters and no capitals."""
    return text.islower()


@instruction("change_case:english_capital")
def is_upper_case(text: str) -> bool:
    """Check that the text has letters, and that all letters are capitals."""
    return text.isupper()


@instruction("change_case:capital_word_frequency")
def has_capital_words(
    text: str, *, capital_frequency: int, capital_relation: Relation = "at least"
) -> bool:
    """Check that at least `capital_frequency` words or, with `capital_relation` "less than", fewer words are in capitals."""
    return compare(
        sum(word.isupper() for word in WORD.findall(text)), capital_relation, capital_frequency
    )


@instruction("punctuation:no_comma")
def has_no_comma(text: str) -> bool:
    """Check that the text has no comma."""
    return "," not in text


@instruction("startend:end_checker")
def ends_with(text: str, *, end_phrase: str) -> bool:
    """Check that the text ends with the phrase, ignoring case and quotation marks around the response."""
    return text.strip().strip('"').strip().casefold().endswith(end_phrase.strip().casefold())


@instruction("startend:quotation")
def is_quoted(text: str) -> bool:
    """Check that the whole response is in double quotation marks."""
    text = text.strip()
    return len(text) > 1 and text[0] in '"“' and text[-1] in '"”'


@instruction("combination:repeat_prompt")
def repeats_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    """Check that the response begins with the prompt, word for word, ignoring case."""
    return text.strip().casefold().startswith(prompt_to_repeat.strip().casefold())
