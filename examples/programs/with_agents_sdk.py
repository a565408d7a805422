"""An agent of OpenAI's Agents SDK, which asks the responses API."""

import json
import os
from pathlib import Path

from agents import Agent, Runner, function_tool


@function_tool
def multiply(a: float, b: float) -> str:
    """Multiply two numbers."""
    return str(a * b)


agent = Agent(name="Calculator", instructions="Use the tool.", model="gpt-4.1", tools=[multiply])
question = json.loads(os.environ["DOVETAIL_ROW"])["prompt"][-1]["content"]
answer = Runner.run_sync(agent, question, max_turns=30).final_output
Path(os.environ["DOVETAIL_OUTPUT_FILE"]).write_text(json.dumps({"answer": answer}))
