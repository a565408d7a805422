"""Examples with images: tokens and masks in every format, streamed or read before the start, and the errors of bad rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dataset_rows import turns

from dovetail.errors import DataError
from dovetail.run.data import load_data
from dovetail.sections import DataSection, ModelSection
from dovetail_datasets.example_rows import Example
from dovetail_datasets.loading import configured_dataset
from dovetail_datasets.prompts import load_prompts
from dovetail_datasets.tokenizer import load_tokenizer
from dovetail_sdk.testing import square, tiny_vision_model

RED, BLUE = square((255, 0, 0), 56, 84), square((0, 0, 255), 56, 56)
SHOWN = {"red.png": 6, "blue.png": 4}
"""Number of tokens of each picture: one per 28 × 28 pixels."""
LATER = {
    "messages": turns("<image>What?", "red", "And <image>?", "blue"),
    "images": ["red.png", "blue.png"],
}
TEXT = {"messages": turns("a<image>", "b")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_vision_model(tmp_path_factory.mktemp("vision")))


@pytest.fixture
def config(run_config: Any, model: str, tmp_path: Path, write: Any) -> Any:
    """Makes the config of a supervised run on these rows."""
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "blue.png").write_bytes(BLUE)

    def make(
        *rows: dict[str, Any], name: str = "x.jsonl", examples: str = "conversations", **data: Any
    ) -> Any:
        trainer = {"name": "supervised", "examples": examples}
        data = {"train_files": write(name, rows), "train_batch_size": 2, **data}
        return run_config(trainer, {"path": model}, **data)

    return make


def load(config: Any) -> tuple[Example, ...]:
    return tuple(load_data(config).train.prompts)  # type: ignore[arg-type]


def pads(name: str) -> str:
    return "<|vision_start|>" + "<|image_pad|>" * SHOWN[name] + "<|vision_end|>"


def test_images_stand_in_the_prompt_and_in_later_turns_and_only_answers_are_trained_on(
    config, model
) -> None:
    made = config(LATER)
    (example,) = load(made)
    tokenizer = load_tokenizer(ModelSection(path=model))
    (answer,) = example.answers
    prompt = f"<|im_start|>user\n{pads('red.png')}What?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(example.prompt_ids) == prompt
    assert tokenizer.decode(answer.ids) == (
        f"red<|im_end|>\n<|im_start|>user\nAnd {pads('blue.png')}?<|im_end|>\n<|im_start|>assistant\nblue<|im_end|>"
    )
    assert tokenizer.decode(answer.ids[answer.mask]) == "red<|im_end|>blue<|im_end|>"
    assert tokenizer.decode(answer.ids[answer.image_mask]) == "<|image_pad|>" * 4
    assert [image.read() for image in example.media] == [RED, BLUE]
    # The prompt's tokens are the same as for generation.
    row = {"prompt": LATER["messages"][:1], "images": ["red.png"]}
    source, section = configured_dataset(made, tokenizer), DataSection()
    path = Path(made.data.train_files[0]).with_name("prompt.jsonl")
    path.write_text(json.dumps(row))
    (same,) = load_prompts(source, [str(path)], tokenizer, section, made.model).prompts
    np.testing.assert_array_equal(same.prompt_ids, example.prompt_ids)


def test_images_behind_the_last_turn_that_is_trained_on_are_left_out(config) -> None:
    messages = [dict(turn) for turn in LATER["messages"]]
    messages[3]["weight"] = 0
    (example,) = load(config({**LATER, "messages": messages}))
    assert [image.read() for image in example.media] == [RED]
    assert example.answers[0].image_mask is None


def test_parts_of_a_parquet_file_hold_images_beside_rows_of_text(config, tmp_path) -> None:
    asks = [{"type": "image", "image": RED}, {"type": "text", "text": "What?"}]
    with_image = [{"role": "user", "content": asks}]
    answer = [{"type": "text", "text": "b"}]
    messages = [[*with_image, *turns(answer, first="assistant")], turns(answer, answer)]
    first, second = load(config(*({"messages": m} for m in messages), name="x.parquet"))
    assert [image.read() for image in first.media] == [RED]
    assert not second.media
    assert second.raw == [{"role": "user", "content": [{"type": "text", "text": "b"}]}]
    assert Path(first.media[0].path).is_relative_to(tmp_path / "runs" / "media")


def test_both_answers_of_a_pair_have_the_images_of_its_prompt(config) -> None:
    pair = {"prompt": "<image>What?", "chosen": "red", "rejected": "blue", "images": ["red.png"]}
    (example,) = load(config(pair, examples="preferences"))
    assert len(example.media) == 1
    assert len(example.answers) == 2
    sides = {k: turns("<image>What?", k) for k in ("chosen", "rejected")}
    (implicit,) = load(config({**sides, "images": ["red.png"]}, examples="preferences"))
    np.testing.assert_array_equal(implicit.prompt_ids, example.prompt_ids)


def test_a_row_with_images_spells_no_control_tokens(config, model) -> None:
    answer = "red<|image_pad|><|im_end|>"
    row = {"messages": turns("<image>What?<|image_pad|>", answer), "images": ["red.png"]}
    tokenizer = load_tokenizer(ModelSection(path=model))
    for rows in ((row,), (LATER, row)):  # also after the first comparison with the processor
        example = load(config(*rows))[-1]
        (found,) = example.answers
        pad, end = (tokenizer.convert_tokens_to_ids(t) for t in ("<|image_pad|>", "<|im_end|>"))
        assert example.prompt_ids.tolist().count(pad) == SHOWN["red.png"]
        assert tokenizer.decode(found.ids) == f"{answer}<|im_end|>"
        assert [found.ids.tolist().count(token) for token in (pad, end)] == [0, 1]


def test_a_raw_text_writes_the_marks_itself(config, model) -> None:
    row = {
        "prompt": "<|vision_start|><image><|vision_end|>a",
        "response": "b",
        "images": ["red.png"],
    }
    (example,) = load(config(row, plain_prompts="raw"))
    decoded = load_tokenizer(ModelSection(path=model)).decode(example.prompt_ids)
    assert decoded == pads("red.png") + "a"


def test_images_count_towards_the_limits(config) -> None:
    section = {"overlong_prompts": "error"}
    with pytest.raises(DataError, match=r"prompt .* \d+ .* 6 .*data\.max_prompt_length=6"):
        load(config(LATER, max_prompt_length=6, **section))
    with pytest.raises(DataError, match=r"response .* \d+ .* 4 .*data\.max_response_length=6"):
        load(config(LATER, max_response_length=6, **section))


def test_a_conversation_is_cut_where_it_keeps_its_images(config) -> None:
    (whole,) = load(config(LATER))
    length = len(whole.answers[0].ids)
    (cut,) = load(config(LATER, max_response_length=length - 1, overlong_prompts="truncate_right"))
    assert cut.lost
    np.testing.assert_array_equal(cut.answers[0].image_mask, whole.answers[0].image_mask[:-1])
    lost = config(LATER, TEXT, max_response_length=length - 6, overlong_prompts="truncate_right")
    assert [example.index for example in load(lost)] == [1]


@pytest.mark.parametrize("mixed", [False, True])
def test_streamed_examples_are_those_that_are_read_whole(config, write, mixed) -> None:
    def found(streaming: bool) -> Any:
        mixture = {"a": {"files": write("a.jsonl", [TEXT, LATER])}} if mixed else {}
        files = {"train_files": [], "mixture": mixture} if mixed else {}
        train = load_data(config(LATER, TEXT, streaming=streaming, **files)).train
        assert train.has_images
        return [(e.media, e.prompt_ids.tolist(), e.answers[0].ids.tolist()) for e in train.prompts]

    assert found(True) == found(False)


def test_a_streamed_row_with_images_behind_many_without_is_refused(config) -> None:
    # Of the groups of 1,024 lines, the first, second and fourth are read before the start.
    made = config(*[TEXT] * 2500, LATER, *[TEXT] * 2500, streaming=True)
    train = load_data(made).train
    assert not train.has_images
    with pytest.raises(DataError, match=r"line 2501: .*images"):
        train.prompts[2500]
    train.prompts.shards.close()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"images": ["gone.png", "red.png"]}, "'gone.png'"),
        ({"images": ["red.png"]}, r"2 images.* 1\b"),
        (
            {"messages": turns("a", "<image>"), "images": ["red.png"]},
            "assistant",
        ),
    ],
)
def test_a_bad_image_is_named_with_its_row(config, change, says) -> None:
    with pytest.raises(DataError, match=f"x.jsonl, line 2: .*{says}"):
        load(config(LATER, {**LATER, **change}))


def test_an_image_in_an_answer_of_a_pair_is_refused(config) -> None:
    chosen = turns("b", [{"type": "image", "image": "red.png"}], "c", first="assistant")
    pair = {"prompt": turns("a"), "chosen": chosen, "rejected": chosen[:1]}
    with pytest.raises(DataError, match="line 1: 'chosen' or 'rejected'"):
        load(config(pair, examples="preferences"))
