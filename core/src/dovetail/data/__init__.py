"""The order of prompts and examples, and the record of what became of each."""
