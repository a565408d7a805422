"""Each parser agrees with vLLM's on 500 generated turns, apart from differences that are listed with their reason.

A turn has text, zero to four calls with nested arguments, varied white space, and sometimes a fault: it is cut off, a character is
removed or inserted, or text follows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from dovetail.interfaces import ParsedTurn, PluginContext
from dovetail_tools.parsers.deepseek import DeepSeekV3
from dovetail_tools.parsers.harmony import Harmony
from dovetail_tools.parsers.hermes import Hermes
from dovetail_tools.parsers.mistral import Mistral
from dovetail_tools.parsers.plain_json import Llama3Json
from dovetail_tools.parsers.tagged import Qwen3Coder, Xml

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "hourly": {"type": "boolean"},
        "where": {"type": "object"},
        "stops": {"type": "array"},
    },
}
NAMES = ("weather", "get_time", "a", "search.web")
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES
]
TEXT = st.text(
    st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp"), exclude_characters="[]{}<>｜|\x85"),
    max_size=12,
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | TEXT
    | st.sampled_from("{}[]\"'\\\n"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "city": TEXT,
        "days": st.integers(-(10**9), 10**9),
        "hourly": st.booleans(),
        "where": st.dictionaries(TEXT, JSON, max_size=3),
        "stops": st.lists(JSON, max_size=3),
    },
)
CALL = st.tuples(st.sampled_from(NAMES), ARGUMENTS)
Rendered = Callable[[list[tuple[str, dict[str, Any]]], Any], str]


def _json(draw: Any, value: Any) -> str:
    indent = draw(st.sampled_from((None, None, 1)))
    return json.dumps(value, ensure_ascii=draw(st.booleans()), indent=indent)


def _hermes(calls: Any, draw: Any) -> str:
    gap = draw(st.sampled_from(("", "\n", " \n\n")))
    objects = [_json(draw, {"name": name, "arguments": given}) for name, given in calls]
    return gap.join(f"<tool_call>{gap}{one}{gap}</tool_call>" for one in objects)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _qwen(calls: Any, draw: Any) -> str:
    gap = draw(st.sampled_from(("", "\n")))
    return gap.join(
        f"<tool_call>{gap}<function={name}>{gap}"
        + gap.join(f"<parameter={k}>\n{_value(v)}\n</parameter>" for k, v in given.items())
        + f"{gap}</function>{gap}</tool_call>"
        for name, given in calls
    )


def _minimax(calls: Any, draw: Any) -> str:
    quote = draw(st.sampled_from("\"'"))
    return "\n".join(
        f"<minimax:tool_call><invoke name={quote}{name}{quote}>\n"
        + "\n".join(
            f"<parameter name={quote}{k}{quote}>{_value(v)}</parameter>" for k, v in given.items()
        )
        + "\n</invoke></minimax:tool_call>"
        for name, given in calls
    )


def _llama(calls: Any, draw: Any) -> str:
    key = draw(st.sampled_from(("parameters", "arguments")))
    tag = draw(st.sampled_from(("", "<|python_tag|>"))) if calls else ""
    return tag + "; ".join(_json(draw, {"name": name, key: given}) for name, given in calls)


def _mistral_array(calls: Any, draw: Any) -> str:
    array = [{"name": name, "arguments": given} for name, given in calls]
    return f"[TOOL_CALLS]{draw(st.sampled_from(('', ' ')))}{_json(draw, array)}" if calls else ""


def _mistral_names(calls: Any, draw: Any) -> str:
    mark = draw(st.sampled_from(("", "[ARGS]")))
    return "".join(f"[TOOL_CALLS]{name}{mark}{_json(draw, given)}" for name, given in calls)


def _deepseek(calls: Any, one: str) -> str:
    if not calls:
        return ""
    inside = "\n".join(one.format(name, json.dumps(given)) for name, given in calls)
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def _deepseek_v3(calls: Any, draw: Any) -> str:
    return _deepseek(
        calls,
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>",
    )


def _deepseek_v31(calls: Any, draw: Any) -> str:
    return _deepseek(calls, "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>")


def _harmony(calls: Any, draw: Any) -> str:
    kind = draw(st.sampled_from(("", " <|constrain|>json", " json")))
    channel = draw(st.sampled_from(("commentary", "analysis")))
    if not calls:
        return "<|channel|>final<|message|>So be it.<|return|>"
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    return draw(st.sampled_from(("", thought))) + "<|start|>assistant".join(
        f"<|channel|>{channel} to=functions.{name}{kind}<|message|>{_json(draw, given)}<|call|>"
        for name, given in calls
    )


@attrs.frozen
class Pair:
    """A parser of this package, and vLLM's parser of the same format."""

    ours: type
    theirs: str
    tokens: tuple[str, ...]
    render: Rendered
    text: st.SearchStrategy[str] = TEXT
    """Strategy of the text before calls."""


PAIRS = (
    Pair(Hermes, "hermes", (), _hermes),
    Pair(Qwen3Coder, "qwen3_coder", ("<think>", "</think>", "<tool_call>", "</tool_call>"), _qwen),
    Pair(Xml, "minimax_m2", ("<minimax:tool_call>", "</minimax:tool_call>"), _minimax),
    Pair(Llama3Json, "llama3_json", ("<|python_tag|>",), _llama),
    Pair(Mistral, "mistral", ("[TOOL_CALLS]",), _mistral_array),
    Pair(Mistral, "mistral", ("[TOOL_CALLS]", "[ARGS]"), _mistral_names),
    Pair(
        DeepSeekV3, "deepseek_v3", ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), _deepseek_v3
    ),
    Pair(
        DeepSeekV3,
        "deepseek_v31",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        _deepseek_v31,
    ),
    # Text outside of messages is not harmony, and vLLM's parser does not recover from it.
    Pair(Harmony, "openai", (), _harmony, st.just("")),
)


@st.composite
def turns(draw: Any, pair: Pair) -> tuple[str, str]:
    calls = draw(st.lists(CALL, max_size=4))
    text = draw(pair.text) + pair.render(calls, draw)
    place = draw(st.integers(0, len(text)))
    fault = draw(st.sampled_from(("none", "none", "cut", "less", "more", "after")))
    if fault == "cut":
        text = text[:place]
    elif fault == "less":
        text = text[:place] + text[place + 1 :]
    elif fault == "more":
        text = text[:place] + draw(st.sampled_from('{}[]",:<>x \n')) + text[place:]
    elif fault == "after":
        text += draw(TEXT)
    return text, fault


def vllm_parser(pair: Pair) -> Callable[[str], tuple[list[tuple[str, Any]], str]]:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    words = models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
    tokenizer.add_special_tokens({"additional_special_tokens": list(pair.tokens)})
    request = ChatCompletionRequest(
        messages=[{"role": "user", "content": "?"}], model="m", tools=TOOLS
    )
    if pair.theirs == "openai":
        return _harmony_parser(tokenizer, request)
    make = ToolParserManager.get_tool_parser(pair.theirs)

    def parse(text: str) -> tuple[list[tuple[str, Any]], str]:
        # vLLM's parsers keep state, so each turn gets a new one.
        found = make(tokenizer, request.tools).extract_tool_calls(text, request)
        calls = [(call.function.name, call.function.arguments) for call in found.tool_calls]
        return calls, found.content or ""

    return parse


def _harmony_parser(
    tokenizer: Any, request: Any
) -> Callable[[str], tuple[list[tuple[str, Any]], str]]:
    """Return vLLM's parser of harmony, which reads tokens."""
    import openai_harmony
    from vllm.parser.harmony import HarmonyParser
    from vllm.reasoning.gptoss_reasoning_parser import GptOssReasoningParser
    from vllm.tool_parsers.gptoss_tool_parser import GptOssToolParser

    try:
        encoding = openai_harmony.load_harmony_encoding("HarmonyGptOss")
    except Exception as error:
        pytest.skip(f"the vocabulary of harmony is not to be had here: {error}")
    tokenizer.decode = encoding.decode_utf8
    parts = {"tool_parser_cls": GptOssToolParser, "reasoning_parser_cls": GptOssReasoningParser}
    make: Any = type("Parser", (HarmonyParser,), parts)

    def parse(text: str) -> tuple[list[tuple[str, Any]], str]:
        ids = encoding.encode(text, allowed_special="all")
        _, content, calls = make(tokenizer, None).parse(text, request, True, ids)
        return [(call.name, call.arguments) for call in calls or ()], content or ""

    return parse


def readable(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    """Return vLLM's calls that have a name and an object as arguments; others could not be run."""
    found = []
    for name, arguments in calls:
        try:
            value = json.loads(arguments)
        except ValueError:
            continue
        if name and isinstance(value, dict):
            found.append((name, value))
    return found


def explained(pair: Pair, ours: ParsedTurn, theirs: list[tuple[str, Any]]) -> str | None:
    """Return why the two parsers differ on this turn; None if unknown."""
    mine = [(call.name, call.arguments) for call in ours.calls]
    if not theirs and pair.theirs in ("hermes", "llama3_json", "mistral", "deepseek_v3"):
        return "vLLM drops all calls of a turn where one can't be read"
    if mine == [call for call in theirs if encodable(call)]:
        return "vLLM hands on half of a surrogate pair, which is not a text that a tool could send or store"
    if theirs == [call for call in mine if call[0] in NAMES] and pair.theirs == "minimax_m2":
        return "vLLM drops a call of a function that there is not; ours is told to the policy"
    if pair.theirs == "openai" and subsequence([one for one in theirs if one[0] in NAMES], mine):
        return "vLLM loses messages beside a header that it can't read, and takes any word of one for a recipient"
    if any({*key[:1], *key[-1:]} & {'"', "'"} for _, given in theirs for key in given):
        return "vLLM keeps one of two quotes, whose other is missing, in a parameter's name"
    ends = ("qwen3_coder", "minimax_m2", "mistral")
    if ours.errors and pair.theirs in ends and subsequence(mine, theirs):
        return "vLLM runs a call that was cut off or has a parameter that is not closed, with what it has got"
    return None


def subsequence(some: list[Any], of: list[Any]) -> bool:
    left = iter(of)
    return all(one in left for one in some)


def encodable(call: tuple[str, Any]) -> bool:
    try:
        json.dumps(call, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.theirs}-{pair.render.__name__}")
def test_calls_are_those_that_vllm_finds(pair: Pair) -> None:
    theirs_of = vllm_parser(pair)
    ours_of = pair.ours(pair.ours.Config(name=pair.ours.name), PluginContext())
    seen = {"equal": 0, "with calls": 0, "explained": 0, "broken tags": 0}

    @settings(max_examples=500, suppress_health_check=list(HealthCheck))
    @given(turn=turns(pair))
    def agree(turn: tuple[str, str]) -> None:
        text, fault = turn
        ours = ours_of.parse(text, TOOLS)
        raw, content = theirs_of(text)
        theirs = readable(raw)
        mine = [(call.name, call.arguments) for call in ours.calls]
        if mine == theirs:
            seen["equal"] += 1
            seen["with calls"] += bool(mine)
            if fault == "none" and not (pair.theirs == "llama3_json" and mine):
                # vLLM drops the text beside the calls of Llama.
                for token in pair.tokens:
                    content = content.replace(token, "")
                assert ours.content == content.strip()
                assert not ours.errors
        elif explained(pair, ours, theirs):
            seen["explained"] += 1
        else:
            # An inserted or missing character in a tag makes it another tag or no tag; neither result is right.
            assert fault in ("less", "more"), (text, ours, raw)
            seen["broken tags"] += 1

    agree()
    assert seen["equal"] > 350, seen
    assert seen["broken tags"] <= 25, seen  # of 500 turns, most without a fault
    assert seen["with calls"] > 200, seen


@pytest.mark.parametrize(
    "parser", [DeepSeekV3, Harmony, Hermes, Llama3Json, Mistral, Qwen3Coder, Xml]
)
def test_vllm_has_the_parsers_that_an_exported_models_card_names(parser: Any) -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert ToolParserManager.get_tool_parser(parser.served_as["vllm"])
    if "vllm" in parser.reasoning_as:
        assert ReasoningParserManager.get_reasoning_parser(parser.reasoning_as["vllm"])
