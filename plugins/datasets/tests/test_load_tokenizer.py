"""Tokenizers: the places from which they are loaded, and the error of each failure."""

from __future__ import annotations

import re
import shutil

import pytest
from transformers.utils import logging

from dovetail.config import config_from_mapping
from dovetail.errors import ModelError
from dovetail.sections import ModelSection
from dovetail.telemetry import RunDirectory, read_rows
from dovetail.telemetry.logging import close_logging, setup_logging
from dovetail_datasets.loading import read_tokenizer
from dovetail_datasets.tokenizer import load_tokenizer


def test_the_models_own_tokenizer_or_another(tokenizer_directory, tmp_path) -> None:
    own = load_tokenizer(ModelSection(path=str(tokenizer_directory)))
    assert own.decode(own("2 + 2")["input_ids"]) == "2 + 2"
    section = ModelSection(path=str(tmp_path), tokenizer_path=str(tokenizer_directory))
    assert load_tokenizer(section).get_vocab() == own.get_vocab()


def test_a_chat_template_as_text_or_file(tokenizer_directory, tmp_path) -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    file = tmp_path / "chat.jinja"
    file.write_text(template)
    for given in (template, str(file)):
        section = ModelSection(path=str(tokenizer_directory), chat_template=given)
        tokenizer = load_tokenizer(section)
        messages = [{"role": "user", "content": "hi"}]
        assert tokenizer.apply_chat_template(messages, tokenize=False) == "[hi]"


@pytest.mark.parametrize("given", ["missing.jinja", "chatml", ""])
def test_what_is_neither_template_nor_file_is_refused(tokenizer_directory, given) -> None:
    section = ModelSection(path=str(tokenizer_directory), chat_template=given)
    with pytest.raises(ModelError, match=r"model\.chat_template="):
        load_tokenizer(section)


def test_a_file_of_a_chat_template_that_is_no_text_is_named(tokenizer_directory, tmp_path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_bytes(b"\xff{% x %}")
    section = ModelSection(path=str(tokenizer_directory), chat_template=str(file))
    with pytest.raises(ModelError) as error:
        load_tokenizer(section)
    assert str(file) in error.value.message


def test_a_tokenizer_that_does_not_tell_what_was_added_is_taken(
    tokenizer_directory, monkeypatch
) -> None:
    """The tokenizer of mistral-common is such a tokenizer."""

    class Silent:
        def get_vocab(self) -> dict[str, int]:
            return {"one": 0}

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: Silent())
    loaded = load_tokenizer(ModelSection(path=str(tokenizer_directory)))
    assert isinstance(loaded, Silent)


def test_a_missing_directory_names_the_nearest(tokenizer_directory) -> None:
    wrong = tokenizer_directory.parent / f"{tokenizer_directory.name[:-1]}x"
    with pytest.raises(ModelError, match=r"directory model\.path=.* does not exist") as error:
        load_tokenizer(ModelSection(path=str(wrong)))
    assert f"did you mean {str(tokenizer_directory)!r}?" in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "facts"),
    [
        (
            "config.json",
            "{}",
            ["tokenizer.json, tokenizer_config.json", "holds: config.json", "model.tokenizer_path"],
        ),
        ("tokenizer.json", "{}", ["can't be loaded"]),
        ("tokenizer.json", '{"version": "1.0"}', ["can't be loaded"]),
        ("tokenizer_config.json", '{"tokenizer_class": "Qwen2TokenizerFast"}', ["no vocabulary"]),
    ],
)
def test_a_directory_without_a_whole_tokenizer_is_refused(tmp_path, name, content, facts) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=re.escape(str(tmp_path))) as error:
        load_tokenizer(ModelSection(path=str(tmp_path)))
    assert all(fact in str(error.value) for fact in facts)


def test_a_run_given_for_its_model_names_the_model_in_it(tokenizer_directory, tmp_path) -> None:
    shutil.copytree(tokenizer_directory, tmp_path / "run" / "final")
    (tmp_path / "run" / "logs").mkdir()
    with pytest.raises(ModelError) as caught:
        load_tokenizer(ModelSection(path=str(tmp_path / "run")))
    assert caught.value.hint == f"did you mean {str(tmp_path / 'run' / 'final')!r}?"


def test_a_hub_id_that_cannot_be_reached(monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError) as error:
        load_tokenizer(ModelSection(path="nobody/no-such-model"))
    text = str(error.value)
    assert "model.path='nobody/no-such-model'" in text
    assert "network" in text


def test_code_of_a_repository_is_not_run_unasked(tokenizer_directory, tmp_path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["evil.T", null]}, "tokenizer_class": "T"}'
    )
    with pytest.raises(ModelError, match=r"model\.path="):
        load_tokenizer(ModelSection(path=str(tmp_path)))
    assert not marker.exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_a_file_that_is_not_valid_json_is_named(tokenizer_directory, tmp_path, file) -> None:
    model = tmp_path / "model"
    shutil.copytree(tokenizer_directory, model)
    (model / file).write_text("{")
    with pytest.raises(ModelError) as caught:
        load_tokenizer(ModelSection(path=str(model)))
    assert caught.value.message.startswith(f"the file {model / file} in model.path=")
    assert "JSON" in caught.value.message


def test_a_file_in_place_of_a_directory_is_no_hub_id(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").write_text("{}")
    with pytest.raises(ModelError, match=r"model\.path='rows' is a file"):
        load_tokenizer(ModelSection(path="rows"))


def test_transformers_warns_once_and_through_the_logging_of_a_run(
    tokenizer_directory, tmp_path, capsys
) -> None:
    run = RunDirectory.create(tmp_path / "runs" / "arithmetic" / "first")
    read_tokenizer(config_from_mapping({"model": {"path": str(tokenizer_directory)}}).config)
    setup_logging(run)
    logging.get_logger("transformers.models.qwen2").warning("odd config")
    close_logging()
    assert capsys.readouterr().err == "warning: odd config\n"
    assert [row["event"] for row in read_rows(run.events)] == ["odd config"]
