"""Stand-in for SGLang's CUDA kernels without an accelerator: SGLang then computes by its plain PyTorch code."""

import plain_memory
from anything import stand_in

__version__ = "0.0.0"
stand_in(__name__)
plain_memory.install()
