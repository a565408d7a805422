"""Chat templates with tool calls, each in the format of a family of models; and TRL's templates, if TRL is installed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

_CHATML = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + (CONTENT or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

CHATML = _CHATML.replace("CONTENT", "message.content")
"""A chat template like Qwen2.5's."""
THINKING = _CHATML.replace(
    "CONTENT",
    "message.content.split('</think>')[-1].lstrip() if message.role == 'assistant' and not loop.last and "
    "messages[-1].role == 'user' else message.content",
)
"""A chat template like Qwen3's: thinking of earlier turns is left out once a user message follows."""
HEADERS = """{{ bos_token }}{% for message in messages %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
{%- if message.tool_calls %}
{%- if message.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{{- message.tool_calls[0].function | tojson }}{% else %}{{ message.content | trim }}{% endif %}{{ '<|eot_id|>' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
"""A chat template like Llama 3.1's: a turn holds either text or a single tool call."""
INSTRUCT = """{{ bos_token }}{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}{% for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and message == users[-1] %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}{{ '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- elif message.tool_calls %}[TOOL_CALLS][
{%- for call in message.tool_calls %}{{ call.function | tojson }}{{ '' if loop.last else ', ' }}{% endfor %}]{{ eos_token }}
{%- else %}{{ message.content + eos_token }}{% endif %}{% endfor %}"""
"""A chat template like Mistral's: the tool descriptions stand before the last user message, so each new user message moves them."""
OBSERVER = """{% for message in messages %}
{%- if message.role == 'tool' %}{{ '<|observation|>\\n' + message.content }}
{%- else %}{{ '<|' + message.role + '|>\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{ '\\n<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{# <|user|> <|observation|> #}"""
"""A chat template like GLM-4's: a turn has no end token of its own and ends with the first token of the next turn."""

TEMPLATES: Mapping[str, str] = {
    "chatml": CHATML,
    "thinking": THINKING,
    "headers": HEADERS,
    "instruct": INSTRUCT,
    "observer": OBSERVER,
}


def trl_templates() -> dict[str, str]:
    """Return the chat templates in TRL's wheel by name, or none if TRL is not installed. TRL is not imported."""
    found = find_spec("trl")
    if found is None or found.origin is None:
        return {}
    files = sorted((Path(found.origin).parent / "chat_templates").glob("*.jinja"))
    return {file.stem: file.read_text(encoding="utf-8") for file in files}
