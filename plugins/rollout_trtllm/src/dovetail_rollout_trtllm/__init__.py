"""Dovetail rollouts by TensorRT-LLM's own server, `trtllm-serve`. Not run on the real engine yet."""
