"""Decoders: both reproduce the model's own logits, with and without padding, and a wrong decoder is detected."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
)

from dovetail.errors import ModelError
from dovetail_rollout_hf.cache import Arrival, KvCache, empty_index
from dovetail_rollout_hf.choice import choose_decoder, prove
from dovetail_rollout_hf.fused_decoder import FusedDecoder, why_not_fused
from dovetail_rollout_hf.transformers_decoder import TransformersDecoder
from dovetail_sdk.testing.tiny import tiny_model, tiny_tokenizer

LOGGER = logging.getLogger("test")


def small(config) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(params=["qwen2", "qwen3", "llama"])
def family(request, tmp_path: Path):
    tokenizer = tiny_tokenizer(tmp_path, vocab_size=300)
    model = tiny_model(
        tmp_path,
        tokenizer,
        architecture=request.param,
        tie_word_embeddings=request.param != "llama",
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def decode(decoder, sequences: list[torch.Tensor], lengths: list[int], steps: int) -> torch.Tensor:
    """Logits [N, steps + 1, V] of forced continuations."""
    longest = max(lengths)
    ids = torch.zeros((len(lengths), longest), dtype=torch.int64)
    for i, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        ids[i, longest - length :] = sequence[:length]
    pad = torch.tensor([longest - length for length in lengths])
    pad = pad if pad.any() else None
    with torch.inference_mode():
        prefill = decoder.prefill(ids, pad)
        cache = KvCache()
        cache.rebuild(
            kept_N=empty_index(torch.device("cpu")),
            span=(0, 0),
            end=longest,
            capacity=longest + steps,
            arrivals=[Arrival(prefill, torch.arange(len(lengths)))],
        )
        decoder.begin(cache, pad)
        logits = [prefill.logits_PV]
        for step in range(steps):
            tokens = torch.stack([s[n + step] for s, n in zip(sequences, lengths, strict=True)])
            logits.append(decoder.step(tokens, longest + step))
    return torch.stack(logits, 1)


@pytest.mark.parametrize("make", [FusedDecoder, TransformersDecoder])
@pytest.mark.parametrize("lengths", [[6, 6, 6], [9, 2, 5], [1, 7, 3]], ids=str)
def test_logits_equal_a_plain_forward_pass(family, make, lengths) -> None:
    steps = 4
    generator = torch.manual_seed(2)
    sequences = [torch.randint(5, 64, (n + steps,), generator=generator) for n in lengths]
    ours = decode(make(family), sequences, lengths, steps)
    for i, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        with torch.inference_mode():
            plain = family(sequence[None]).logits[0, length - 1 :]
        torch.testing.assert_close(
            ours[i].log_softmax(-1), plain.log_softmax(-1), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPT2Config(vocab_size=80, n_embd=32, n_layer=2, n_head=2, n_positions=64), "not one of"),
        (
            MistralConfig(
                vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, sliding_window=6,
            ),
            "not one of",
        ),
        (
            Qwen2Config(
                vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, use_sliding_window=True,
                sliding_window=6, max_window_layers=1,
            ),
            "full attention",
        ),
    ],
    ids=["gpt2", "mistral", "qwen2-window"],
)  # fmt: skip
def test_other_architectures_take_the_transformers_decoder(config, reason) -> None:
    model = small(config)
    assert reason in why_not_fused(model)
    decoder = choose_decoder(model, "auto", LOGGER)
    assert decoder.name == "transformers"
    assert prove(decoder, model) < 1
    with pytest.raises(ModelError, match="fused does not support"):
        choose_decoder(model, "fused", LOGGER)


def test_a_model_with_another_state_is_refused_in_words() -> None:
    model = small(MambaConfig(vocab_size=80, hidden_size=32, num_hidden_layers=2, state_size=8))
    with pytest.raises(ModelError, match="MambaForCausalLM can't"):
        choose_decoder(model, "auto", LOGGER)


def test_auto_is_fused_where_it_fits(family) -> None:
    assert choose_decoder(family, "auto", LOGGER).name == "fused"
    assert choose_decoder(family, "transformers", LOGGER).name == "transformers"


def test_a_fused_decoder_that_is_wrong_is_found_out(family, monkeypatch, caplog) -> None:
    monkeypatch.setattr(FusedDecoder, "_rotate", lambda self, x, cos, sin: x)
    with caplog.at_level(logging.WARNING):
        assert choose_decoder(family, "auto", LOGGER).name == "transformers"
    assert "times the tolerance" in caplog.text
    with pytest.raises(ModelError, match="does not reproduce"):
        choose_decoder(family, "fused", LOGGER)


def test_fused_weights_are_the_models_own(family) -> None:
    """New weights for the model are new weights for the decoder, without another copy."""
    decoder = FusedDecoder(family)
    with torch.no_grad():
        for parameter in family.parameters():
            parameter.copy_(parameter + 0.05 * torch.randn_like(parameter))
    assert prove(decoder, family) < 1


def test_bfloat16_is_proven_within_its_own_bound(family) -> None:
    assert choose_decoder(family.bfloat16(), "auto", LOGGER).name == "fused"
