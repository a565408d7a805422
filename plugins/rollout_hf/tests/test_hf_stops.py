"""Stop rules: by tokens if that is exact, else by the decoded end of the response."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from dovetail.errors import RolloutError
from dovetail.interfaces import SamplingParams
from dovetail_rollout_hf.stops import StopRules, eos_token_ids
from dovetail_sdk.testing.tiny import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tok"), vocab_size=400)


@pytest.fixture(scope="module")
def rules(tokenizer):
    return StopRules(tokenizer, {tokenizer.eos_token_id})


def params(*stop: str, **kwargs) -> SamplingParams:
    return SamplingParams(max_new_tokens=8, stop=stop, **kwargs)


def first_end(rule, ids) -> int | None:
    """How many tokens a response has when the rule ends it."""
    return next((i for i in range(1, len(ids) + 1) if rule.ends(ids[:i])), None)


def test_end_of_sequence_stops_unless_it_is_ignored(rules, tokenizer) -> None:
    eos = tokenizer.eos_token_id
    assert rules.of(params()).token_ids == {eos}
    assert not rules.of(params(ignore_eos=True)).watches
    assert rules.of(params(ignore_eos=True, stop_token_ids=(9, 7))).token_ids == {7, 9}


def test_a_single_character_becomes_token_stops_alone(rules, tokenizer) -> None:
    rule = rules.of(params("\n", ignore_eos=True))
    assert not rule.completing
    assert rule.token_ids == {i for i in range(400) if "\n" in tokenizer.decode([i])}


@given(
    text=st.text(alphabet="ab .#\n1é世", max_size=24),
    stop=st.text(alphabet="ab .#\n1é世", min_size=1, max_size=4),
)
def test_a_response_ends_with_the_token_that_completes_the_stop_string(
    rules, tokenizer, text, stop
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = next((i for i in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:i])), None)
    assert first_end(rules.of(params(stop, ignore_eos=True)), ids) == expected


@given(ids=st.lists(st.integers(0, 399), max_size=30))
def test_any_tokens_at_all_stop_where_their_text_does(rules, tokenizer, ids) -> None:
    stops = ("an", "he ", "####", "é")
    expected = next(
        (
            i
            for i in range(1, len(ids) + 1)
            if any(s in tokenizer.decode(ids[:i], skip_special_tokens=False) for s in stops)
        ),
        None,
    )
    assert first_end(rules.of(params(*stops, ignore_eos=True)), ids) == expected


def test_special_tokens_can_be_stop_strings(rules, tokenizer) -> None:
    rule = rules.of(params("<|im_start|>", ignore_eos=True))
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") in rule.token_ids


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(RolloutError, match="need a tokenizer"):
        StopRules(None, ()).of(params("x"))
    with pytest.raises(RolloutError, match="empty"):
        StopRules(None, ()).of(params(""))


def test_end_of_sequence_comes_from_tokenizer_and_both_configs() -> None:
    config = SimpleNamespace(eos_token_id=3)
    model = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: config),
        generation_config=SimpleNamespace(eos_token_id=[4, 5]),
    )
    assert eos_token_ids(model, SimpleNamespace(eos_token_id=2)) == {2, 3, 4, 5}
    assert eos_token_ids(model, None) == {3, 4, 5}
