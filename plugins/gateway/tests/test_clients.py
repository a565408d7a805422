"""The official clients of OpenAI and Anthropic read the gateway's answers, and training uses exactly the served tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from gateway_episodes import Drawn, config_of, run_client, said

openai = pytest.importorskip(
    "openai", reason="the clients are not installed here; `make proofs` has them"
)
anthropic = pytest.importorskip("anthropic", reason="as above")
pytestmark = pytest.mark.proofs

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": [3]}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}}
THOUGHT = "<think>\nlet me see\n</think>\n\n"
ASKED = [{"role": "user", "content": "how many?"}]


def opened(url: str, key: str) -> Any:
    return openai.OpenAI(
        base_url=f"{url}/v1", api_key=key, max_retries=0, _strict_response_validation=True
    )


def opened_anthropic(url: str, key: str) -> Any:
    return anthropic.Anthropic(
        base_url=url, api_key=key, max_retries=0, _strict_response_validation=True
    )


def as_served(drawn: Drawn, sequences: int = 1) -> Mapping[str, float]:
    """Audit an episode, check its number of sequences, and return its figures."""
    drawn.audit()
    assert len(drawn.sample.sequences) == sequences
    return drawn.counts()


CHAT_TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS},
}
RESPONSES_TOOL = {
    "type": "function",
    "name": "add",
    "description": "Add.",
    "parameters": PARAMETERS,
    "strict": False,
}
ANTHROPIC_TOOL = {"name": "add", "description": "Add.", "input_schema": PARAMETERS}


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions_with_reasoning_and_tools_are_one_sequence(stream: bool) -> None:
    def client(url: str, key: str) -> None:
        api, messages = opened(url, key), list(ASKED)

        def ask() -> Any:
            request = {"model": "policy", "messages": messages, "tools": [CHAT_TOOL]}
            if not stream:
                return api.chat.completions.create(**request).choices[0]
            with api.chat.completions.stream(**request) as events:
                for _ in events:
                    pass
                return events.get_final_completion().choices[0]

        choice = ask()
        assert choice.finish_reason == "tool_calls"
        assert choice.message.reasoning_content == "let me see"
        assert choice.message.content == "I add."
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name, call.function.arguments) == (
            "function",
            "add",
            '{"a": 2, "b": [3]}',
        )
        # As programs do, append the returned objects, without fields that the type lacks.
        messages.append(
            {
                "role": "assistant",
                "content": choice.message.content,
                "tool_calls": [call.model_dump()],
            }
        )
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
        choice = ask()
        assert (choice.finish_reason, choice.message.content) == ("stop", "It is 5.")
        messages.append(choice.message.model_dump(exclude_none=True))
        messages.append({"role": "user", "content": "sure?"})
        assert ask().message.content == "yes"

    drawn, _ = run_client(client, said(f"{THOUGHT}I add.\n{CALL}", "It is 5.", "yes"))
    counts = as_served(drawn)
    assert counts["model_calls"] == 3
    assert counts["prompt_tokens"] == counts["unique_prompt_tokens"]
    turns = drawn.sample.trajectory.turns
    assert turns[0].calls[0]["function"] == {"name": "add", "arguments": {"a": 2, "b": [3]}}
    assert [m["role"] for turn in turns for m in turn.observed] == ["tool", "user"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
def test_responses_with_reasoning_and_tools_are_one_sequence(stream: bool, by_id: bool) -> None:
    def client(url: str, key: str) -> None:
        api, items, previous = opened(url, key), list(ASKED), None

        def ask() -> Any:
            request = {
                "model": "policy",
                "input": items,
                "tools": [RESPONSES_TOOL],
                "instructions": "Be brief.",
            }
            request |= {"previous_response_id": previous} if previous else {}
            if not stream:
                return api.responses.create(**request)
            with api.responses.stream(**request) as events:
                kinds = [event.type for event in events]
                assert kinds[0] == "response.created"
                assert kinds[-1] == "response.completed"
                return events.get_final_response()

        response = ask()
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
        assert response.output_text == "I add."
        call = response.output[-1]
        assert (call.name, call.arguments) == ("add", '{"a": 2, "b": [3]}')
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
        if by_id:
            previous, items = response.id, [result]
        else:
            items += [item.to_dict() for item in response.output] + [result]
        response = ask()
        assert (response.status, response.output_text) == ("completed", "It is 5.")
        assert (
            response.usage.total_tokens
            == response.usage.input_tokens + response.usage.output_tokens
        )

    drawn, _ = run_client(client, said(f"{THOUGHT}I add.\n{CALL}", "It is 5."))
    as_served(drawn)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [False, True])
def test_messages_with_thinking_and_tools_are_one_sequence(stream: bool, thinking: bool) -> None:
    def client(url: str, key: str) -> None:
        api, messages = opened_anthropic(url, key), list(ASKED)

        def ask() -> Any:
            request: dict[str, Any] = {
                "model": "policy",
                "max_tokens": 500,
                "messages": messages,
                "tools": [ANTHROPIC_TOOL],
            }
            request["system"] = [{"type": "text", "text": "Be brief."}]
            if thinking:
                request["thinking"] = {"type": "enabled", "budget_tokens": 1024}
            if not stream:
                return api.messages.create(**request)
            with api.messages.stream(**request) as events:
                for _ in events:
                    pass
                return events.get_final_message()

        message = ask()
        assert message.stop_reason == "tool_use"
        assert [block.type for block in message.content] == ["thinking"] * thinking + [
            "text",
            "tool_use",
        ]
        call = message.content[-1]
        assert (call.name, call.input) == ("add", {"a": 2, "b": [3]})
        messages.append(
            {
                "role": "assistant",
                "content": [b.model_dump(exclude_none=True) for b in message.content],
            }
        )
        result = {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": [{"type": "text", "text": "5"}],
        }
        messages.append({"role": "user", "content": [result, {"type": "text", "text": "go on"}]})
        message = ask()
        assert (message.stop_reason, message.content[0].text) == ("end_turn", "It is 5.")
        assert message.usage.output_tokens == len("It is 5.") + 1 or message.usage.output_tokens > 0

    drawn, _ = run_client(client, said(f"{THOUGHT}I add.\n{CALL}", "It is 5."))
    as_served(drawn)
    assert [m["role"] for m in drawn.sample.trajectory.turns[0].observed] == ["tool", "user"]


def test_answers_beside_one_another_are_sequences_that_share_their_tokens() -> None:
    def client(url: str, key: str) -> list[str]:
        api = opened(url, key)
        first = api.chat.completions.create(model="policy", messages=ASKED)
        more = [*ASKED, first.choices[0].message.to_dict(), {"role": "user", "content": "again"}]
        found = api.chat.completions.create(model="policy", messages=more, n=3, logprobs=True)
        assert [len(choice.logprobs.content) > 1 for choice in found.choices] == [True] * 3
        return [choice.message.content for choice in found.choices]

    drawn, texts = run_client(client, said("one", "two"))
    assert texts[0] == "two"
    counts = as_served(drawn, sequences=3)
    assert counts["further_sequences/n"] == 2
    rows = [sequence.prompt_ids for sequence in drawn.sample.sequences]
    assert len({*map(len, rows[1:])}) == 1
    assert counts["unique_prompt_tokens"] < len(rows[1]) + len(rows[0])


def test_limits_of_a_call_are_those_of_its_turn() -> None:
    def client(url: str, key: str) -> list[tuple[str, str]]:
        api, other = opened(url, key), opened_anthropic(url, key)
        cut = api.chat.completions.create(
            model="policy", messages=ASKED, max_completion_tokens=3
        ).choices[0]
        part = api.responses.create(model="policy", input="how many?", max_output_tokens=16)
        ended = other.messages.create(
            model="policy", messages=ASKED, max_tokens=100, stop_sequences=["hello"]
        )
        assert part.status == "completed"
        return [
            (cut.finish_reason, cut.message.content),
            (ended.stop_reason, ended.content[0].text),
        ]

    drawn, (cut, ended) = run_client(client, said("hello"))
    drawn.audit()
    assert cut == ("length", "hel")
    assert ended == ("stop_sequence", "")


def test_log_probabilities_are_the_engines() -> None:
    def client(url: str, key: str) -> Any:
        response = opened(url, key).responses.create(
            model="policy", input="hi", include=["message.output_text.logprobs"]
        )
        return response.output[0].content[0].logprobs

    drawn, found = run_client(client, said("one"))
    texts = "".join(token.token for token in found)
    assert texts.startswith("one")
    assert [token.logprob for token in found] == drawn.sample.completion.log_probs.tolist()


Client = Callable[[str, str], Any]


def errors_of(client: Client, **config: Any) -> tuple[Drawn, Any]:
    def caught(url: str, key: str) -> Any:
        try:
            client(url, key)
        except (openai.APIStatusError, anthropic.APIStatusError) as error:
            return error
        return None

    return run_client(caught, said("one"), config=config_of(**config) if config else None)


@pytest.mark.parametrize(
    ("request_", "kind", "says"),
    [
        ({"messages": []}, openai.BadRequestError, "messages is []; expected"),
        ({"messages": [{"role": "robot", "content": "x"}]}, openai.BadRequestError, 'messages[0].role is "robot"'),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, openai.BadRequestError, "image_url"),
        ({"messages": ASKED, "max_tokens": 0}, openai.BadRequestError, "max_tokens is 0; expected"),
        ({"messages": ASKED, "n": 1000}, openai.BadRequestError, "n is 1000"),
        ({"messages": ASKED, "stop": [3]}, openai.BadRequestError, "stop"),
        ({"messages": [*ASKED, {"role": "assistant", "content": "It"}]}, openai.BadRequestError, "last message"),
        ({"messages": ASKED, "tools": [{"type": "web_search"}]}, openai.BadRequestError, "web_search"),
        ({"messages": ASKED, "model": "gpt-4o"}, openai.NotFoundError, "'gpt-4o'"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_in_the_clients_own_form(
    request_: dict[str, Any], kind: type, says: str
) -> None:
    drawn, error = errors_of(
        lambda url, key: opened(url, key).chat.completions.create(**{"model": "policy", **request_})
    )
    assert type(error) is kind
    assert says in error.message
    assert error.body["message"]
    assert error.body["code"] in ("invalid_request", "model_not_found")
    assert drawn.sample.score is None


def test_errors_for_anthropic_have_its_types() -> None:
    def client(url: str, key: str) -> Any:
        return opened_anthropic(url, key).messages.create(
            model="policy",
            max_tokens=5,
            messages=[{"role": "user", "content": [{"type": "image"}]}],
        )

    _, error = errors_of(client)
    assert type(error) is anthropic.BadRequestError
    assert error.type == "invalid_request_error"
    _, error = errors_of(
        lambda url, _: opened_anthropic(url, "wrong").messages.create(
            model="policy", max_tokens=5, messages=ASKED
        )
    )
    assert type(error) is anthropic.AuthenticationError
    assert "ANTHROPIC_API_KEY" in error.body["error"]["message"]


@pytest.mark.parametrize("open_", [opened, opened_anthropic])
def test_the_models_are_listed(open_: Any) -> None:
    def client(url: str, key: str) -> Any:
        api = open_(url, key)
        api.models.retrieve("b")
        return [model.id for model in api.models.list()]

    _, names = run_client(client, said("one"), config=config_of(models=("a", "b")))
    assert names == ["a", "b"]


def test_a_key_whose_episode_has_ended_is_refused_and_the_error_says_so() -> None:
    kept: list[str] = []

    def client(url: str, key: str) -> Any:
        opened(url, key).chat.completions.create(model="policy", messages=ASKED)
        kept.append(key)

    run_client(client, said("one"))
    _, error = errors_of(
        lambda url, _: opened(url, kept[0]).chat.completions.create(model="policy", messages=ASKED)
    )
    assert type(error) is openai.AuthenticationError
