"""Stands in for SGLang's CUDA kernels where there is no accelerator: what SGLang computes then, its plain PyTorch paths compute."""

import plain_memory
from anything import stand_in

__version__ = "0.0.0"
stand_in(__name__)
plain_memory.install()
