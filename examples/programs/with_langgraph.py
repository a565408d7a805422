"""A ReAct agent of LangGraph, on LangChain's model of OpenAI's API."""

import json
import os
from pathlib import Path

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def multiply(a: float, b: float) -> str:
    """Multiply two numbers."""
    return str(a * b)


agent = create_react_agent(ChatOpenAI(model="gpt-4o-mini"), [multiply], prompt="Use the tool.")
question = json.loads(os.environ["DOVETAIL_ROW"])["prompt"][-1]["content"]
found = agent.invoke({"messages": [("user", question)]}, {"recursion_limit": 60})
Path(os.environ["DOVETAIL_OUTPUT_FILE"]).write_text(
    json.dumps({"answer": found["messages"][-1].content})
)
