"""An agent on OpenAI's client: it multiplies with a tool until it calls none, and writes what it answers."""

import json
import os
from pathlib import Path

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}

client = OpenAI()
messages = [
    {"role": "system", "content": "Use the tool."},
    *json.loads(os.environ["DOVETAIL_ROW"])["prompt"],
]
while True:
    message = (
        client.chat.completions.create(model="gpt-4o-mini", messages=messages, tools=[TOOL])
        .choices[0]
        .message
    )
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        try:
            numbers = json.loads(call.function.arguments)
            result = str(numbers["a"] * numbers["b"])
        except (KeyError, TypeError) as error:
            result = f"error: {error!r}"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
Path(os.environ["DOVETAIL_OUTPUT_FILE"]).write_text(json.dumps({"answer": message.content}))
