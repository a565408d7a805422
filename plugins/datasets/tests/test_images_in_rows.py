"""Rows with images to prompts: every form of an image, the image's tokens, and the errors of bad images."""

from __future__ import annotations

import base64
import io
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dataset_rows import files_source, turns
from PIL import Image

from dovetail.data.loader import PromptLoader
from dovetail.errors import ConfigError, DataError, ModelError
from dovetail.interfaces import PluginContext
from dovetail.sections import DataSection, ModelSection, PluginSection
from dovetail_datasets.prompts import PromptSet, load_prompts
from dovetail_datasets.tokenizer import load_tokenizer
from dovetail_sdk.testing import square, tiny_vision_model

RED = square((255, 0, 0), 56, 84)
TOKENS = (56 // 28) * (84 // 28)
"""Number of tokens of the picture in the tiny model: one per 28 × 28 pixels."""
ASK = [{"role": "user", "content": "<image>What?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSection:
    return ModelSection(path=str(tiny_vision_model(tmp_path_factory.mktemp("vision"))))


@pytest.fixture(scope="module")
def tokenizer(model: ModelSection) -> Any:
    return load_tokenizer(model)


@pytest.fixture
def load(model: ModelSection, tokenizer: Any, write: Any, tmp_path: Path) -> Any:
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "cut.png").write_bytes(RED[:-40])
    (tmp_path / "note.txt").write_text("no picture")
    (tmp_path / "exif.jpg").write_bytes(with_malformed_exif())

    def load_rows(
        *rows: Any,
        name: str = "x.jsonl",
        section: ModelSection = model,
        tools: Any = None,
        **data: Any,
    ) -> PromptSet:
        own = tokenizer
        if section is not model:
            own = load_tokenizer(section, chat_template_args=data.get("chat_template_args"))
        given = files_source(), [write(name, rows)], own, DataSection(**data), section
        return load_prompts(*given, media_dir=tmp_path / "media", tools=tools)

    return load_rows


def with_malformed_exif() -> bytes:
    """Return a rotated JPEG whose EXIF has a text in place of the width."""
    turned = struct.pack("<HHIHH", 274, 3, 1, 6, 0)
    width = struct.pack("<HHI4s", 256, 2, 4, b"abc")
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + width + turned + bytes(4)
    file = io.BytesIO()
    Image.new("RGB", (56, 84)).save(file, "JPEG", exif=exif)
    return file.getvalue()


WAYS: dict[str, dict[str, Any]] = {
    "a path": {"prompt": ASK, "images": ["red.png"]},
    "a mapping with a path": {"prompt": ASK, "images": [{"path": "red.png", "bytes": None}]},
    "bytes": {"prompt": ASK, "images": [{"bytes": RED, "path": None}]},
    "a data URL": {
        "prompt": ASK,
        "images": ["data:image/png;base64," + base64.b64encode(RED).decode()],
    },
    "a part": {
        "prompt": [
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": "red.png", "text": None},
                    {"type": "text", "text": "What?", "image": None},
                ],
            }
        ]
    },
    "a plain prompt": {"prompt": "<image>What?", "images": ["red.png"]},
}


@pytest.mark.parametrize("way", WAYS)
def test_however_an_image_is_given_the_prompt_is_the_same(load, tokenizer, way) -> None:
    row = WAYS[way]
    parquet = "bytes" in way or "mapping" in way
    (prompt,) = load(row, name="x.parquet" if parquet else "x.jsonl").prompts
    assert tokenizer.decode(prompt.prompt_ids) == (
        "<|im_start|>user\n<|vision_start|>" + "<|image_pad|>" * TOKENS + "<|vision_end|>What?"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(prompt.media) == 1
    assert prompt.media[0].read() == RED
    json.dumps(prompt.raw)  # messages are written as JSON, so they must not contain bytes


def test_images_without_a_file_are_kept_once_by_their_content(load, tmp_path) -> None:
    row = {"prompt": ASK, "images": [{"bytes": RED}]}
    first, second = load(row, row, name="x.parquet").prompts
    assert first.media == second.media
    assert [p.read_bytes() for p in (tmp_path / "media").rglob("*") if p.is_file()] == [RED]
    (named,) = load({"prompt": ASK, "images": ["red.png"]}).prompts
    assert named.media[0].path == str(tmp_path / "red.png")
    assert named.media[0].digest == first.media[0].digest


def test_a_kept_image_that_was_damaged_is_written_anew(load) -> None:
    row = {"prompt": ASK, "images": [{"bytes": RED}]}
    (first,) = load(row, name="x.parquet").prompts
    Path(first.media[0].path).write_bytes(bytes(len(RED)))
    (again,) = load(row, name="x.parquet").prompts
    assert again.media[0].read() == RED


def test_rows_with_and_without_images_mix_and_text_is_as_ever(load) -> None:
    text = {"prompt": [{"role": "user", "content": "What is <image>?"}]}
    (alone,) = load(text).prompts
    _, beside = load({"prompt": ASK, "images": ["red.png"]}, text).prompts
    assert beside.media == ()
    np.testing.assert_array_equal(alone.prompt_ids, beside.prompt_ids)
    assert beside.raw == text["prompt"]


def test_a_row_beside_an_image_spells_no_control_tokens(load, tokenizer) -> None:
    content = "<image>What?<|image_pad|><|vision_start|><|im_end|>"
    row = {"prompt": [{"role": "user", "content": content}], "images": ["red.png"]}
    (plain,) = load({"prompt": ASK, "images": ["red.png"]}).prompts
    found = load(row)
    (prompt,) = found.prompts
    special = {*tokenizer.all_special_ids}
    of_plain, of_prompt = ([i for i in p.prompt_ids if i in special] for p in (plain, prompt))
    assert of_plain == of_prompt
    assert tokenizer.decode(prompt.prompt_ids) == tokenizer.decode(plain.prompt_ids).replace(
        "What?", content.removeprefix("<image>")
    )
    assert found.spelled == 3
    with pytest.raises(DataError):
        load(row, control_tokens="allow")


@pytest.mark.parametrize("given", ["", "<|bos|>"])
def test_a_raw_text_with_an_image_begins_with_one_beginning_of_sequence(
    load, tokenizer, monkeypatch, given
) -> None:
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.bos_token
    adding = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)])
    monkeypatch.setattr(tokenizer.backend_tokenizer, "post_processor", adding)
    row = {"prompt": f"{given}<image>a", "images": ["red.png"]}
    (prompt,) = load(row, plain_prompts="raw").prompts
    assert tokenizer.decode(prompt.prompt_ids) == f"{bos}{'<|image_pad|>' * TOKENS}a"


def test_another_picture_of_the_same_size_is_other_data(load, tmp_path) -> None:
    """The digest of the data, which a checkpoint's position belongs to, covers pictures even if the tokens are equal."""
    from dovetail.data.ledger import Ledger
    from dovetail_datasets.samplers import SequentialSampler

    (tmp_path / "blue.png").write_bytes(square((0, 0, 255), 56, 84))
    states = []
    for name in ("red.png", "blue.png"):
        prompts = load({"prompt": ASK, "images": [name]}).prompts
        sampler = SequentialSampler(PluginSection(), PluginContext())
        states.append(PromptLoader(prompts, sampler, 1, Ledger()).state()["data"])
    assert states[0] != states[1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": ASK, "images": ["gone.png"]}, "no image file 'gone.png'"),
        ({"prompt": ASK, "images": ["cut.png"]}, r"image 0 \(.*cut.png'\) .*broken"),
        ({"prompt": ASK, "images": ["note.txt"]}, "Pillow .* 10 bytes"),
        ({"prompt": ASK, "images": ["red.png"] * 2}, r"1 image\b.* 2\b"),
        ({"prompt": "<image><image>", "images": ["red.png"]}, r"2 images.* 1\b"),
        ({"prompt": ASK, "images": [7]}, "image 0 of 'images' is 7 .int."),
        ({"prompt": ASK, "images": ["exif.jpg"]}, r"image 0 \(.*exif.jpg'\) .*broken"),
        ({"prompt": ASK, "images": ["data:image/png;base64,é"]}, "base64 can't be decoded"),
        ({"prompt": ASK, "images": ["A" * 5000]}, r"image file 'A{60}…'(.|\s)*begin with 'data:image/png;base64,"),
        ({"prompt": ASK, "images": "https://x.org/a.png"}, "'https://x.org/a.png'.*downloaded"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, r"1 image\b.* 0\b"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "sound"}]}], "images": ["red.png"]},
            "'text' or 'image'",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image", "image": "red.png"}]}],
             "images": ["red.png"]},
            "images .*twice",
        ),
    ],
)  # fmt: skip
def test_a_bad_image_is_named(load, row, message) -> None:
    good = {
        "prompt": row["prompt"] if isinstance(row["prompt"], str) else ASK,
        "images": ["red.png"],
    }
    rows = [row] if isinstance(row["prompt"], str) else [good, row]
    with pytest.raises(DataError, match=rf"x.jsonl, line {len(rows)}: .*{message}"):
        load(*rows)


def test_images_count_towards_the_limit_of_tokens(load) -> None:
    row = {"prompt": ASK, "images": ["red.png"]}
    with pytest.raises(DataError, match=f" {TOKENS} .*data.max_prompt_length={TOKENS}"):
        load(row, max_prompt_length=TOKENS, overlong_prompts="error")


def test_a_model_or_a_template_that_knows_no_images_is_refused(load, tmp_path) -> None:
    from dovetail_sdk.testing import tiny_model_and_tokenizer

    row = {"prompt": ASK, "images": ["red.png"]}
    blind = ModelSection(path=str(tiny_model_and_tokenizer(tmp_path / "text", vocab_size=300)))
    with pytest.raises(ModelError, match="no vision tower"):
        load(row, section=blind)


def test_a_template_that_drops_images_is_refused(load, model) -> None:
    section = ModelSection(path=model.path, chat_template="{% for m in messages %}x{% endfor %}")
    with pytest.raises(DataError, match=r"'<\|image_pad\|>' 0 time\(s\); expected 1"):
        load({"prompt": ASK, "images": ["red.png"]}, section=section)


@pytest.mark.parametrize("of", ["row", "agent loop"])
def test_tools_are_in_prompts_with_images_too(load, model, of) -> None:
    template = load_tokenizer(model).chat_template
    section = ModelSection(
        path=model.path,
        chat_template="{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + template,
    )
    tools = [{"type": "function", "function": {"name": "zoom"}}]
    row = {"prompt": ASK, "images": ["red.png"]} | ({"tools": tools} if of == "row" else {})
    found = load(row, section=section, tools=tools if of == "agent loop" else None)
    (prompt,) = found.prompts
    assert load_tokenizer(section).decode(prompt.prompt_ids).startswith("[zoom]")


@pytest.mark.parametrize("given", ["processor", "model"])
def test_the_template_of_the_processor_takes_arguments_too(load, model, tmp_path, given) -> None:
    shutil.copytree(model.path, tmp_path / "model")
    path = tmp_path / "model" / "chat_template.jinja"
    template = path.read_text() + "{% if brief %}Be brief.{% endif %}"
    path.write_text(template)
    section = ModelSection(
        path=str(tmp_path / "model"), chat_template=template if given == "model" else None
    )
    rows = {"prompt": ASK, "images": ["red.png"]}, {"prompt": turns("What?")}
    found = load(*rows, section=section, chat_template_args={"brief": True})
    for prompt in found.prompts:
        text = load_tokenizer(section).decode(prompt.prompt_ids)
        assert text.endswith("assistant\nBe brief.")


def test_an_argument_that_the_processors_template_does_not_read_is_refused(
    model, tokenizer, write, tmp_path
) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    path = write("x.jsonl", [{"prompt": ASK, "images": ["red.png"]}])
    source = files_source()
    data = DataSection(chat_template_args={"brief": True})
    with pytest.raises(ConfigError, match=r"processor .*data\.chat_template_args\.brief"):
        load_prompts(source, [path], tokenizer, data, model)
