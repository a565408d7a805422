"""A reward model is trained at the token at which rewards read it: the last token of a conversation under the chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dataset_rows import files_source

from dovetail.config import config_from_mapping
from dovetail.errors import DataError
from dovetail.planning.plan import make_plan
from dovetail.sections import DataSection, ModelSection
from dovetail_datasets.closing import Closing
from dovetail_datasets.encoding import TextEncoder
from dovetail_datasets.examples_source import StepExamples
from dovetail_datasets.load_examples import load_examples
from dovetail_rollouts import conversation_ids
from dovetail_sdk.testing import template_tokenizer
from dovetail_sdk.testing.chat_templates import TEMPLATES

CONFIG: dict[str, Any] = {
    "data": {"train_files": ["x"], "train_batch_size": 1},
    "actor": {"objective": {"name": "bradley_terry"}},
    "trainer": {"name": "supervised", "examples": "preferences", "total_steps": 1},
}
BLOCKS = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}INSIDE{% endgeneration %}"
    "OUTSIDE{% else %}{{ m.content }}<|end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def blocks(inside: str, outside: str) -> str:
    return BLOCKS.replace("INSIDE", inside).replace("OUTSIDE", outside)


CASES = {
    **TEMPLATES,
    "blocks with the line break": blocks("<|end|>\n", ""),
    "blocks up to the end": blocks("<|end|>", "\n"),
    "blocks without the end": blocks("", "<|end|>\n"),
    "line breaks at the end": blocks("<|end|>", "\n\n")
    .replace("{% generation %}", "")
    .replace("{% endgeneration %}", ""),
    "no special token": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
    "a line break before the next mark": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{# <|user|> <|assistant|> #}",
    "parts": "{% for m in messages %}<|start|>{{ m.role }}:{% for p in m.content %}{{ p['text'] + '' }}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% endif %}",
}
ANSWERS = "dos", "tres<|user|> cuatro<|end|><|im_end|>"
"""Two answers; the second spells ends of turns, which must be encoded as text."""
QUESTION = [{"role": "user", "content": "one"}]
PROMPTS: list[Any] = [
    "one",
    QUESTION,
    [{"role": "system", "content": "brief"}, *QUESTION],
    [*QUESTION, {"role": "assistant", "content": "uno"}, {"role": "user", "content": "two"}],
]


def differences(template: str, folder: Path, known_ends: bool = False) -> int:
    """Compare each answer's tokens up to the trained token with the tokens that rewards read; return the number of answers compared.

    With `known_ends`, the model has a config, which names no end token besides the tokenizer's.
    """
    tokenizer = template_tokenizer(template)
    if known_ends:
        (folder / "config.json").write_text('{"model_type": "qwen2"}')
    model = ModelSection(path=str(folder))
    plan = make_plan(config_from_mapping({**CONFIG, "model": {"path": str(folder)}}).config)
    closing = Closing.of(plan.facts, tokenizer)
    source, limits = (
        files_source(),
        {"max_prompt_length": 999, "max_response_length": 999},
    )
    compared, path = 0, folder / "pairs.jsonl"
    for prompt in PROMPTS:
        path.write_text(
            json.dumps({"prompt": prompt, "chosen": ANSWERS[0], "rejected": ANSWERS[1]})
        )
        try:
            found = load_examples(
                source,
                [str(path)],
                tokenizer,
                DataSection(**limits),
                model,
                "preferences",
            )
        except DataError:
            continue
        batch = StepExamples(found.prompts, closing).batch()  # type: ignore[arg-type]
        for number, answer in enumerate(ANSWERS):
            ids = [*batch["prompt_ids"][number].tolist(), *batch["response_ids"][number].tolist()]
            mask = batch["response_mask"][number].tolist()
            assert mask == [False] * (len(mask) - 1) + [True]
            # The value at a token is the value of all tokens before it.
            assert ids[:-1] == conversation_ids(TextEncoder(tokenizer), prompt, answer)
            compared += 1
    return compared


@pytest.mark.parametrize("template", CASES.values(), ids=CASES)
@pytest.mark.parametrize("known_ends", [False, True])
def test_the_token_that_is_trained_is_the_one_that_is_read(
    template: str, known_ends: bool, tmp_path: Path
) -> None:
    assert differences(template, tmp_path, known_ends) >= 6


@pytest.mark.nightly
def test_the_token_that_is_trained_is_the_one_that_is_read_under_the_templates_of_trl(
    trl_templates: dict[str, str], tmp_path: Path
) -> None:
    compared = 0
    for template in trl_templates.values():
        compared += differences(template, tmp_path)
    assert compared > 400
