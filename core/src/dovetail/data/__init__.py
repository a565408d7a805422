"""The order of prompts and examples, and the ledger that records whether each was used or dropped."""
