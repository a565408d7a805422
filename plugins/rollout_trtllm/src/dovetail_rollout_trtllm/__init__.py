"""Dovetail rollouts by TensorRT-LLM: built against its source, not run on the real engine yet."""
