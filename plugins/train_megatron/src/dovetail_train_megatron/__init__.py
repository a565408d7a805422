"""Training for Dovetail on Megatron-Core."""
