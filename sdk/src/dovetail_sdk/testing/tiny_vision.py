"""Tiny vision-language models with random weights, and pictures for them: no download, and no torchvision."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from dovetail.errors import ModelError
from dovetail.interfaces import Tokenizer
from dovetail_sdk.testing.tiny import tiny_tokenizer

_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<image>")
_MARKS = {"qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>", "llava": "<image>"}
"""Model family → the text that stands for one image in a prompt."""
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}MARK{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "out_hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 1,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 56,
    "fullatt_block_indexes": [1],
    "in_channels": 3,
}
_CLIP_VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "image_size": 28,
    "patch_size": 14,
    "projection_dim": 32,
}


def tiny_vision_model(directory: Path, *, family: str = "qwen2_5_vl", seed: int = 0) -> Path:
    """Write a vision-language model with its tokenizer and processors into a directory, and return the directory.

    Args:
        directory: the directory to write to; created if missing.
        family: `qwen2_5_vl`, in which the number of an image's tokens depends on its size and positions are rows and columns; or
            `llava`, in which every image has four tokens with the positions of text.
        seed: the seed of the weights; torch's own random state is left as it was.

    Raises:
        ModelError: the family is unknown.
    """
    import torch
    from transformers import AutoModelForImageTextToText

    if family not in _MARKS:
        raise ModelError(
            f"unknown tiny vision family {family!r}; expected one of {', '.join(sorted(_MARKS))}"
        )
    tokenizer = tiny_tokenizer(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_TOKENS)})
    tokenizer.chat_template = _TEMPLATE.replace("MARK", _MARKS[family])
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in _TOKENS}
    text = {
        **_TEXT,
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config, processor = (_qwen if family == "qwen2_5_vl" else _llava)(text, ids, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            # With random weights of the usual size, images would hardly change the output, so noise is added.
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(str(directory))
    processor.save_pretrained(str(directory))
    tokenizer.save_pretrained(str(directory))
    return directory


def square(colour: tuple[int, int, int], width: int = 56, height: int = 56) -> bytes:
    """Return a picture of one colour, as the bytes of a PNG file.

    Args:
        colour: red, green and blue, 0 to 255.
        width: width in pixels.
        height: height in pixels.
    """
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(buffer, format="PNG")
    return buffer.getvalue()


def _qwen(text: dict[str, Any], ids: dict[str, int], _tokenizer: object) -> tuple[Any, Any]:
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    rotary = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    config = Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rotary},
        vision_config=_QWEN_VISION,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    return config, Qwen2VLImageProcessorPil(
        size={"shortest_edge": 28 * 28, "longest_edge": 16 * 28 * 28}
    )


def _llava(text: dict[str, Any], ids: dict[str, int], tokenizer: Tokenizer) -> tuple[Any, Any]:
    from transformers import LlavaConfig, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    config = LlavaConfig(
        text_config={**text, "model_type": "llama", "head_dim": 32},
        vision_config=_CLIP_VISION,
        image_token_index=ids["<image>"],
        image_seq_length=4,
        vision_feature_layer=-2,
    )
    pictures = CLIPImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    )
    return config, LlavaProcessor(
        image_processor=pictures,
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=tokenizer.chat_template,
        num_additional_image_tokens=1,
    )
