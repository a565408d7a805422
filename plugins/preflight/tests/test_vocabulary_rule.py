"""Models whose token ids stand for other tokens than the run's tokenizer's ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config

RULE = "vocabulary_differs"
KL = "algorithm.kl.in_loss={coef: 0.1}"
GAE = "algorithm.advantage=gae"
END = "<|endoftext|>"
WORDS = (END, "one", "two", "three", "four")

Build = Callable[..., str]


class Silent:
    """A tokenizer of another library, which does not list its added tokens."""

    eos_token = END
    chat_template = None

    def get_vocab(self) -> dict[str, int]:
        return {END: 0, "one": 1}


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """A function that writes a model's config, and a tokenizer if words are given, into a directory."""

    def build(
        name: str,
        words: Sequence[str] | None = WORDS,
        *,
        added: Sequence[str] = (),
        special: Mapping[str, str] = MappingProxyType({}),
        rows: int = 16,
    ) -> str:
        path = tmp_path / name
        sizes = {"hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
        config = Qwen2Config(
            vocab_size=rows, intermediate_size=8, num_hidden_layers=1, eos_token_id=0, **sizes
        )
        config.save_pretrained(path)
        if words is not None:
            ids = {word: number for number, word in enumerate(words)}
            backend = Tokenizer(WordLevel(ids, words[0]))
            backend.add_special_tokens(list(added))
            PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(path)
        return str(path)

    return build


def sections(policy: str, **model: Any) -> dict[str, Any]:
    return {"model": {"path": policy, **model}}


def test_another_tokenizer_is_an_error_for_references_and_critics(judge: Any, build: Build) -> None:
    policy, other = build("policy"), build("other", (END, "two", "one", "three"))
    (finding,) = judge(RULE, sections(policy), KL, f"ref.path={other}")
    assert finding.severity == "error"
    assert finding.message == (
        f"ref.path = {other} has another tokenizer than the run (model.path = {policy}): 3 of the run's 5 tokens have "
        "another id or no id in the model, such as 'one' (1, in the model 2), 'two' (2, in the model 1), 'four' (4, in the model none)"
    )
    assert finding.hint == (
        "set ref.path to a model with the policy's tokenizer, or leave it out to use model.path"
    )
    both = judge(RULE, sections(policy), KL, f"ref.path={other}", GAE, f"critic.path={other}")
    assert sorted(f.message.partition(" ")[0] for f in both) == ["critic.path", "ref.path"]


def test_fewer_embeddings_than_the_tokenizer_has_ids_are_an_error(judge: Any, build: Build) -> None:
    policy, small = build("policy"), build("small", None, rows=4)
    (finding,) = judge(RULE, sections(policy), KL, f"ref.path={small}")
    assert finding.severity == "error"
    assert f"ref.path = {small} has embeddings for 4 token ids" in finding.message
    assert "larger ids to 1 token, such as 'four' (4): the model can't read" in finding.message


def test_tokens_that_were_only_added_are_a_warning(judge: Any, build: Build) -> None:
    policy = build("policy", added=["<think>", "<end>"])
    base = build("base", added=["<reserved>", "<end>"])
    (finding,) = judge(RULE, sections(policy), KL, f"ref.path={base}")
    assert finding.severity == "warning"
    assert "such as '<think>' (5, in the model none)" in (finding.message)
    (finding,) = judge(RULE, sections(policy), KL, f"ref.path={build('tight', rows=5)}")
    assert finding.severity == "warning"
    assert "larger ids to 2 tokens, such as '<think>' (5), '<end>' (6)" in finding.message


@pytest.mark.parametrize(
    ("special", "template", "severity"),
    [
        ({"eos_token": "<end>"}, None, "error"),
        ({"pad_token": "<end>"}, None, "warning"),
        ({}, "{% for m in messages %}{{ m.content }}<end>{% endfor %}", "error"),
        ({"bos_token": "<end>"}, "{{ bos_token }}{{ messages }}", "error"),
        ({"bos_token": "<end>"}, "{{ messages }}", "warning"),
    ],
)
def test_an_added_token_beyond_the_embeddings_is_an_error_where_samples_hold_it(
    judge: Any, build: Build, special: dict[str, str], template: str | None, severity: str
) -> None:
    policy = build("policy", added=["<end>"], special=special)
    small = build("small", None, rows=5)
    model = {"chat_template": template} if template else {}
    (finding,) = judge(RULE, sections(policy, **model), KL, f"ref.path={small}")
    assert finding.severity == severity
    assert "larger ids to 1 token, such as '<end>' (5): the model can't read" in finding.message


def test_a_policy_may_have_fewer_embeddings_than_tokens_were_added(
    judge: Any, build: Build
) -> None:
    """With the tokenizer in the policy's directory or in another."""
    ends = {"eos_token": "<image>"}
    for number, special in enumerate(({}, ends)):
        policy = build(f"policy{number}", added=["<image>"], special=special, rows=5)
        copy = build(f"copy{number}", added=["<image>"], special=special)
        assert judge(RULE, sections(policy), GAE) == []
        assert judge(RULE, sections(policy, tokenizer_path=copy), GAE) == []
    bare = build("bare", None, rows=5)
    padded = build("padded", added=["<pad>"], special={"pad_token": "<pad>"})
    assert judge(RULE, sections(bare, tokenizer_path=padded)) == []
    (finding,) = judge(
        RULE, sections(bare, tokenizer_path=build("ends", added=["<image>"], special=ends))
    )
    assert finding.severity == "error"


def test_tokenizers_that_do_not_tell_what_was_added_are_not_compared(
    judge: Any, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, other = build("policy"), build("other", (END, "two", "one", "three"))
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: Silent())
    assert judge(RULE, sections(policy), KL, f"ref.path={other}") == []


def test_padding_and_tokens_that_no_sample_holds_are_not_spoken_of(
    judge: Any, build: Build
) -> None:
    policy = build("policy", added=["<image>"], rows=5)
    for other in (
        build("padded", added=["<image>"], rows=64),
        build("unpadded", rows=5),
        build("more", added=["<image>", "<video>"]),
        build("bare", None),
        build("same"),
    ):
        assert judge(RULE, sections(policy), KL, f"ref.path={other}") == []


def test_a_tokenizer_that_is_not_the_policys_own(judge: Any, build: Build) -> None:
    policy, other = build("policy"), build("other", (END, "two", "one"))
    (finding,) = judge(RULE, sections(policy, tokenizer_path=other))
    assert finding.severity == "error"
    assert finding.message.startswith(f"model.path = {policy} has another tokenizer")
    assert f"(model.tokenizer_path = {other})" in finding.message
    assert finding.hint is not None
    assert finding.hint.startswith("leave model.tokenizer_path out")
    larger = build("larger", (*WORDS, *"abcdefghijkl"))
    bare = build("bare", None)
    (finding,) = judge(RULE, sections(bare, tokenizer_path=larger))
    assert "has embeddings for 16 token ids" in finding.message
    # A critic that shares the policy's model gets no second finding.
    assert len(judge(RULE, sections(policy, tokenizer_path=other), GAE)) == 1
    assert judge(RULE, sections(policy, tokenizer_path=build("same"))) == []


def test_a_model_in_the_hubs_cache_is_looked_at(
    judge: Any, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    build("models--some--other/snapshots/abc", (END, "two", "one"))
    refs = tmp_path / "models--some--other" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    (finding,) = judge(RULE, sections(build("policy")), KL, "ref.path=some/other")
    assert finding.message.startswith("ref.path = some/other has another tokenizer")


@pytest.mark.parametrize("elsewhere", ["some/hub-id", "/no/such/model", "~nobody/at/home", "a/b/c"])
def test_what_is_not_here_is_left_to_others(judge: Any, build: Build, elsewhere: str) -> None:
    assert judge(RULE, sections(build("policy")), KL, f"ref.path={elsewhere}") == []
    assert judge(RULE, sections(elsewhere), KL, f"ref.path={build('ref')}") == []


def test_models_that_no_stage_of_the_run_has_are_not_spoken_of(judge: Any, build: Build) -> None:
    """A reward model reads text with its own tokenizer, and without KL there is no reference model."""
    policy, other = build("policy"), build("other", (END, "two", "one"))
    reads = {"name": "reward_model", "model": other}
    assert judge(RULE, {**sections(policy), "reward": {"manager": reads}}) == []
    assert judge(RULE, sections(policy), f"ref.path={other}") == []
