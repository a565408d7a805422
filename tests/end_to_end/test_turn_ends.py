"""The token that ends a turn: `check` warns exactly where no engine stops at it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

from dovetail.config import load_config
from dovetail_datasets import ModelFacts
from dovetail_datasets.tokenizer import load_tokenizer
from dovetail_rollout_hf.stops import StopRules, eos_token_ids
from dovetail_rollouts import training_sampling
from dovetail_serving.requests import with_ends

RULE = "turn_end_not_stopped"
PAD, BOS, END = 0, 1, 2  # of the tiny tokenizer, whose template ends a turn with <|im_end|>
NAMES = {PAD: "<|pad|>", BOS: "<|bos|>", END: "<|im_end|>"}


@pytest.fixture
def with_model(config: Path, tiny: Path, tmp_path: Path):
    """Make the config's model name these end tokens."""

    def write(tokenizer: int, model: int, generation: int | list[int]) -> Path:
        home = shutil.copytree(tiny, tmp_path / "model")
        for file, value in (
            ("tokenizer_config.json", {"eos_token": NAMES[tokenizer]}),
            ("config.json", {"eos_token_id": model}),
            ("generation_config.json", {"eos_token_id": generation}),
        ):
            document = json.loads((home / file).read_text())
            (home / file).write_text(json.dumps(document | value))
        document = yaml.safe_load(config.read_text())
        document["model"]["path"] = str(home)
        config.write_text(yaml.safe_dump(document))
        return config

    return write


@pytest.mark.parametrize(
    ("ends", "overrides", "stops"),
    [
        ((END, END, END), [], True),
        ((BOS, BOS, BOS), [], False),
        ((BOS, BOS, END), [], True),
        ((BOS, END, BOS), [], True),
        ((END, BOS, BOS), [], True),
        ((PAD, BOS, [PAD, BOS]), [], False),
        ((PAD, BOS, [PAD, END]), [], True),
        ((BOS, BOS, BOS), [f"rollout.stop_token_ids=[{END}]"], True),
        ((BOS, BOS, BOS), ["rollout.stop_token_ids=[7]"], False),
    ],
)
def test_check_warns_where_no_engine_stops_at_the_end_of_a_turn(
    with_model, inside, ends, overrides, stops
):
    path = with_model(*ends)
    run = load_config(path, overrides).config
    sampling, tokenizer = training_sampling(run), load_tokenizer(run.model)
    model = AutoModelForCausalLM.from_pretrained(run.model.path)
    hf = StopRules(tokenizer, eos_token_ids(model, tokenizer)).of(sampling)
    served = with_ends(sampling, ModelFacts.read(run.model, tokenizer, None))
    assert (END in hf.token_ids) == (END in served.stop_token_ids) == stops
    printed = inside("check", str(path), *overrides).output
    assert (RULE in printed) != stops
    if not stops:
        assert "'<|im_end|>' (2), at which generation does not stop" in " ".join(printed.split())
        assert f"rollout.stop_token_ids=[{END}]" in printed


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.stop=['<|im_end|>']"],
        ["rollout.ignore_eos=true"],
        ["data.plain_prompts=raw"],
        ["model.chat_template='{% for m in messages %}{{ m.content }}\n{% endfor %}'"],
        ["model.chat_template='{% for m in messages %}{{ m.content }}<|bos|>{% endfor %}'"],
        ["model.chat_template='{% for m in messages %}{{ m.role }}{% endfor %}'"],
    ],
)
def test_it_is_silent_where_nothing_runs_on(with_model, inside, overrides):
    path = with_model(BOS, BOS, BOS)
    assert RULE not in inside("check", str(path), *overrides, check=False).output
