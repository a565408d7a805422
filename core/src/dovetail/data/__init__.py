"""Prompts and examples: read from files, tokenised, put in order, and accounted for one by one."""
