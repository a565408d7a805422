"""An agent on Anthropic's client, streamed and with thinking: it multiplies with a tool until it calls none."""

import json
import os
from pathlib import Path

import anthropic

TOOL = {
    "name": "multiply",
    "description": "Multiply two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        "required": ["a", "b"],
    },
}

client = anthropic.Anthropic()
messages = json.loads(os.environ["DOVETAIL_ROW"])["prompt"]
while True:
    with client.messages.stream(
        model="claude-haiku-4-5",
        max_tokens=4096,
        system="Use the tool.",
        thinking={"type": "enabled", "budget_tokens": 1024},
        tools=[TOOL],
        messages=messages,
    ) as stream:
        message = stream.get_final_message()
    messages.append({"role": "assistant", "content": message.content})
    results = []
    for block in message.content:
        if block.type == "tool_use":
            try:
                result = str(block.input["a"] * block.input["b"])
            except (KeyError, TypeError) as error:
                result = f"error: {error!r}"
            results.append({"type": "tool_result", "tool_use_id": block.id, "content": result})
    if not results:
        break
    messages.append({"role": "user", "content": results})
Path(os.environ["DOVETAIL_OUTPUT_FILE"]).write_text(
    json.dumps({"answer": message.content[-1].text})
)
