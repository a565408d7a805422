"""The order of prompts and examples: which comes next, and what became of each."""
