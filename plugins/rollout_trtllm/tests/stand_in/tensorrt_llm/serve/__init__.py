"""Part of the stand-in."""

from tensorrt_llm.serve.openai_server import OpenAIServer

__all__ = ["OpenAIServer"]
