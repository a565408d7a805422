"""The stand-in's model: one of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tensorrt_llm._torch.pyexecutor.model_loader import ModelLoader

torch.set_num_threads(1)


class PyTorchModelEngine:
    """A model that notes which hooks of its modules were called."""

    def __init__(self, llm_args: Any) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        if llm_args.load_format == "dummy":
            config = AutoConfig.from_pretrained(llm_args.model)
            model: Any = AutoModelForCausalLM.from_config(config)
        else:
            model = AutoModelForCausalLM.from_pretrained(llm_args.model)
        self.model: nn.Module = model.to(getattr(torch, llm_args.dtype)).eval()
        self.model_loader = ModelLoader()
        self.model_loader.attach(self.model)
