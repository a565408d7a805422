"""A rollout engine on TensorRT-LLM's server, `trtllm-serve`. Not run on the real engine yet."""
