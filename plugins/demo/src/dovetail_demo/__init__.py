"""`dovetail demo`: GRPO on sums of two numbers, with a model of half a million parameters."""

from pathlib import Path

CONFIG = Path(__file__).with_name("config.yaml")
"""The GRPO run's config. Its paths are those of `dovetail demo` with seed 1 in the folder `demo`."""

SFT_CONFIG = CONFIG.with_name("sft.yaml")
"""The config of the supervised run before the GRPO run, with paths for the same folder and seed."""
