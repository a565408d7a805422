"""Agent programs that talk to the APIs of OpenAI or Anthropic, trained as they are."""
