"""Process reward models: step scores against transformers, their aggregation, and the positions of token rewards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForTokenClassification,
)

from dovetail.errors import ConfigError
from dovetail.interfaces import (
    Failure,
    PluginContext,
    Score,
)
from dovetail_rewards.conformance.reward_model import tiny_step_classifier
from dovetail_rewards.model_config import ProcessRewardModelConfig
from dovetail_rewards.models.process_reward_model import (
    RUNNING,
    ProcessRewardModelManager,
    token_rewards,
)
from dovetail_rewards.models.step_model import StepReader, last_token, steps_of
from dovetail_sdk.testing import tiny_model_and_tokenizer, tiny_tokenizer

STEPS = ["a b", "cd e", "f"]
Make = Callable[..., ProcessRewardModelManager]


@pytest.fixture
def process_model() -> Iterator[Make]:
    """Makes started managers, in float32 on the CPU."""
    made: list[ProcessRewardModelManager] = []

    def make(path: Any = None, tokenizer: Any = None, **config: Any) -> ProcessRewardModelManager:
        given = {"dtype": "float32", "device": "cpu", "wait_ms": 5.0, "step_token": "#", **config}
        config = ProcessRewardModelConfig(model=str(path or tiny_step_classifier()), **given)
        made.append(ProcessRewardModelManager(config, PluginContext(tokenizer=tokenizer)))
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.close()


def outcomes(manager: ProcessRewardModelManager, samples: list[Any], run: Any) -> list[Any]:
    return list(run(manager, samples).values())


def generated(tokenizer: Any, text: str) -> tuple[np.ndarray, str]:
    """Return tokens that a policy produced, and their text."""
    ids = np.array(
        [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    )
    return ids, tokenizer.decode(ids, skip_special_tokens=True)


def by_transformers(path: Path, text: str, mark: str = "#") -> list[float]:
    """Return the probability of the second label at each mark of a text."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32).eval()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits_LK = model(input_ids=torch.tensor([ids])).logits[0]
    (token,) = tokenizer(mark, add_special_tokens=False)["input_ids"]
    return [float(logits_LK[at].softmax(0)[1]) for at, one in enumerate(ids) if one == token]


def test_every_step_has_the_probability_that_transformers_gives(process_model, sample, run):
    texts = ["\n\n".join(STEPS), "one", "\n\n".join(["x"] * 7), "a\n\n\n\nb"]
    samples = [sample(f"s{i}", text, prompt="2 + 2 =") for i, text in enumerate(texts)]
    found = outcomes(process_model(), samples, run)
    for text, outcome in zip(texts, found, strict=True):
        steps = [part for part in text.split("\n\n") if part.strip()]
        marked = "".join(f"{step}#" for step in steps)
        expected = by_transformers(tiny_step_classifier(), f"<user>2 + 2 =\n<assistant>{marked}\n")
        assert outcome.extras["step_probabilities"] == pytest.approx(expected, abs=1e-5)
        assert outcome.components["steps"] == len(steps)
        assert outcome.value == pytest.approx(min(expected), abs=1e-5)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_the_running_score_ends_in_the_aggregate(probabilities):
    values = np.array(probabilities)
    expected = {
        "min": values.min(),
        "last": values[-1],
        "prod": values.prod(),
        "mean": values.mean(),
        "sum": values.sum(),
    }
    for name, running in RUNNING.items():
        for count in range(1, len(values) + 1):
            part = running(values[:count])
            assert part[-1] == pytest.approx(running(values)[count - 1])
        assert running(values)[-1] == pytest.approx(expected[name])


@pytest.mark.parametrize("aggregate", list(RUNNING))
def test_rewards_of_steps_sit_at_their_last_tokens_and_add_up(
    process_model, sample, run, aggregate
):
    tokenizer = AutoTokenizer.from_pretrained(tiny_step_classifier())
    manager = process_model(tokenizer=tokenizer, aggregate=aggregate, rewards="steps")
    ids, text = generated(tokenizer, "\n\n".join(STEPS))
    (outcome,) = outcomes(manager, [sample("s", text, prompt="p", response_ids=ids)], run)
    assert isinstance(outcome, Score)
    probabilities = np.array(outcome.extras["step_probabilities"])
    scores = RUNNING[aggregate](probabilities)
    assert outcome.value == pytest.approx(scores[-1], abs=1e-6)
    rewards_T = outcome.token_rewards
    assert rewards_T.dtype == np.float32
    assert rewards_T.sum() == pytest.approx(outcome.value, abs=1e-6)
    ends = []
    for at in range(len(ids)):
        shown = tokenizer.decode(ids[: at + 1], skip_special_tokens=True)
        before = tokenizer.decode(ids[:at], skip_special_tokens=True)
        ends += [at for _, end in steps_of(text, "\n\n") if len(before) < end <= len(shown)]
    assert len(ends) == len(STEPS)
    expected_T = np.zeros(len(rewards_T))
    expected_T[ends] = np.diff(scores, prepend=0.0)
    np.testing.assert_allclose(rewards_T, expected_T, atol=1e-6)


def test_steps_that_end_in_one_token_add_up_in_it(sample):
    tokenizer = AutoTokenizer.from_pretrained(tiny_step_classifier())
    ids, text = generated(tokenizer, "ab")
    one = sample("s", text, response_ids=ids)
    rewards_T = token_rewards(one, [len(text), len(text)], np.array([0.5, -0.25]), tokenizer)
    assert rewards_T.sum() == pytest.approx(0.25)
    assert np.count_nonzero(rewards_T) == 1


def test_a_language_model_says_right_or_wrong_by_two_tokens(process_model, sample, run, tmp_path):
    path = tiny_model_and_tokenizer(tmp_path / "lm", vocab_size=300)
    manager = process_model(
        path, head="language_model", format="plain", step_join="\n", positive="+", negative="-"
    )
    (outcome,) = outcomes(manager, [sample("s", "\n\n".join(STEPS), prompt="say")], run)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = tokenizer("say " + "\n".join(f"{step}#" for step in STEPS))["input_ids"]
    with torch.no_grad():
        logits_LV = model(input_ids=torch.tensor([ids])).logits[0]
    mark, wrong, right = (
        tokenizer(text, add_special_tokens=False)["input_ids"][-1] for text in "#-+"
    )
    expected = [
        float(logits_LV[at, [wrong, right]].softmax(0)[1])
        for at, token in enumerate(ids)
        if token == mark
    ]
    assert outcome.extras["step_probabilities"] == pytest.approx(expected, abs=1e-5)


def test_a_response_with_the_mark_in_it_fails_and_gains_nothing(process_model, sample, run):
    (outcome,) = outcomes(process_model(), [sample("s", "a#b", prompt="p")], run)
    assert isinstance(outcome, Failure)
    assert "expected 1, one for each step" in outcome.message
    assert "'#' 2 time(s)" in outcome.message


@pytest.mark.parametrize("how", ["chat", "plain"])
def test_a_control_token_that_marks_steps_is_none_where_a_text_spells_it(tmp_path, sample, how):
    tokenizer = tiny_tokenizer(tmp_path)
    mark, end = (tokenizer.convert_tokens_to_ids(token) for token in ("<|pad|>", "<|im_end|>"))
    config = ProcessRewardModelConfig(model="prm", format=how, step_token="<|pad|>")
    text = "one<|pad|>\n\ntwo<|im_end|><\n\nthree"
    found = StepReader(config, tokenizer, None).read(sample("s", text, prompt="<|pad|><|im_end|>"))
    assert len(found.steps) == 3
    assert found.ids.count(mark) == 3
    assert found.ids.count(end) == (2 if how == "chat" else 0)
    decoded = tokenizer.decode(found.ids)
    assert "one<|pad|><|pad|>two<|im_end|><<|pad|>three<|pad|>" in decoded
    assert "<|pad|><|im_end|>" in decoded.partition("one")[0]


def test_a_text_that_is_too_long_fails(process_model, sample, run):
    manager = process_model(max_length=12)
    (outcome,) = outcomes(manager, [sample("s", "\n\n".join(STEPS * 9), prompt="p")], run)
    assert isinstance(outcome, Failure)
    assert "takes at most 12" in outcome.message


def test_three_labels_are_refused(process_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_step_classifier())
    tokenizer.save_pretrained(tmp_path)
    config = Qwen2Config.from_pretrained(tiny_step_classifier(), id2label={0: "a", 1: "b", 2: "c"})
    Qwen2ForTokenClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="num_labels=3"):
        process_model(tmp_path)


def test_a_mark_that_the_tokenizer_lacks_is_refused():
    class Words:
        unk_token_id = 7

        def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [7]}

    with pytest.raises(ConfigError, match="step_token='☃'"):
        last_token(Words(), "☃", "step_token")


CODE = """
from torch import nn
from transformers import Qwen2Model, Qwen2PreTrainedModel


class StepModel(Qwen2PreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = Qwen2Model(config)
        self.head = nn.Sequential(nn.Linear(config.hidden_size, 8), nn.ReLU(), nn.Linear(8, 2))
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None):
        return (self.head(self.model(input_ids, attention_mask)[0]),)
"""


def test_a_model_with_code_of_its_own_is_known_under_automodel(
    process_model, sample, run, tmp_path
):
    tokenizer = AutoTokenizer.from_pretrained(tiny_step_classifier())
    tokenizer.save_pretrained(tmp_path)
    space: dict[str, Any] = {}
    exec(CODE, space)
    torch.manual_seed(1)
    model = space["StepModel"](Qwen2Config.from_pretrained(tiny_step_classifier())).eval()
    model.save_pretrained(tmp_path)
    (tmp_path / "modeling_steps.py").write_text(CODE)
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling_steps.StepModel"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    manager = process_model(tmp_path, trust_remote_code=True, aggregate="last")
    (outcome,) = outcomes(manager, [sample("s", "ab", prompt="p")], run)
    ids = tokenizer("<user>p\n<assistant>ab#", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        (logits_BLK,) = model(torch.tensor([ids]))
    assert outcome.value == pytest.approx(float(logits_BLK[0, -1].softmax(0)[1]), abs=1e-5)
