"""Arguments of the chat template from the config to the exported model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from dovetail.config.load import load_config
from dovetail.errors import ConfigError, DataError
from dovetail.interfaces import PluginContext
from dovetail.interfaces.runtime import PluginRef
from dovetail.plugins.load import make_plugin
from dovetail.run.data import load_data
from dovetail.run.run import resume, train

TEMPLATE = (
    "{%- for m in messages %}{{ m.content }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '#' if short else '?' }}{% endif %}"
)
ASK = [{"role": "user", "content": "1 + 2 ="}]


@pytest.fixture
def short(config: Path) -> Path:
    """The config with a template that reads `short`, which is given."""
    document = yaml.safe_load(config.read_text())
    document["model"]["chat_template"] = TEMPLATE
    document["data"]["chat_template_args"] = {"short": True}
    config.write_text(yaml.safe_dump(document))
    return config


def test_an_exported_model_renders_in_plain_transformers_as_it_was_trained(short, tmp_path):
    loaded = load_config(short).config
    context = PluginContext(
        role="actor",
        tokenizer=load_data(loaded).tokenizer,
        model=loaded.model,
        training=loaded.actor,
    )
    engine: Any = make_plugin(PluginRef(kind="engine", name="fsdp2"), context)
    engine.start()
    engine.export(tmp_path / "exported")
    engine.close()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    ids = tokenizer.apply_chat_template(ASK, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == "1 + 2 =#"


def test_a_resumed_run_refuses_other_arguments(short, tmp_path):
    train(short, ["trainer.total_steps=1"])
    (run,) = (path.parent for path in tmp_path.glob("runs/**/plugins.lock.json"))
    with pytest.raises(DataError, match="the checkpoint") as error:
        resume(run, ["trainer.total_steps=2", "data.chat_template_args.short=false"])
    assert "chat template" in str(error.value.hint)
    assert resume(run, ["trainer.total_steps=2"])["status"] == "completed"


def test_training_and_held_out_prompts_are_rendered_with_them(short):
    data = load_data(load_config(short).config)
    assert data.val is not None
    for prompt in (*data.train.prompts, *data.val.prompts):
        assert data.tokenizer.decode(prompt.prompt_ids).endswith("=#")


def test_the_plan_shows_them(short, planned):
    assert "chat template: short = true" in planned(str(short))
    described = json.loads(planned(str(short), "--json", "data.chat_template_args.short=[1]"))
    assert described["chat_template_args"] == {"short": [1]}


def test_an_argument_that_no_template_reads_stops_the_run_before_it_starts(short, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.chat_template_args\.shrot; it reads 'short'"):
        train(short, ["data.chat_template_args.shrot=true"])
    assert not (tmp_path / "runs").exists()


def test_verls_name_of_them_leads_to_the_importer(short):
    with pytest.raises(ConfigError) as error:
        train(short, ["data.apply_chat_template_kwargs.enable_thinking=false"])
    assert "dovetail import verl" in "\n".join(error.value.problems)
