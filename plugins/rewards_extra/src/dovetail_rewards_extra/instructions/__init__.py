"""A registry of checkable instructions, with 24 under IFEval's names (arXiv:2311.07911)."""

from dovetail_rewards_extra.instructions import formats, length, words
from dovetail_rewards_extra.instructions.registry import INSTRUCTIONS, Instruction, instruction

__all__ = ["INSTRUCTIONS", "Instruction", "formats", "instruction", "length", "words"]
