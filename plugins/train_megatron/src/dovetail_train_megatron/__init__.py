"""A training engine for Dovetail on Megatron-Core."""
