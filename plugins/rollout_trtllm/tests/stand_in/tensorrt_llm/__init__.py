"""Not TensorRT-LLM: a stand-in that speaks what `contract/tensorrt_llm.json` describes, and generates with transformers.

Names, parameters and defaults are held against the description by a test. What the description can't say is as the source
has it: samples that come back when they are aborted, memory that is lost in sleep, prefixes that stay known until they
are forgotten, names of tensors that nobody knows and nobody minds.
"""

from tensorrt_llm._torch.async_llm import AsyncLLM
from tensorrt_llm.sampling_params import SamplingParams

__all__ = ["AsyncLLM", "SamplingParams"]
