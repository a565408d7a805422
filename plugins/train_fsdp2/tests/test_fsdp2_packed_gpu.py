"""Packed attention on CUDA: the kernels in half precision against a dense float32 reference, alone and in a model.

This file needs no conftest, so that it also runs if only torch, transformers and these packages are installed:
`python -m pytest -c /dev/null --noconftest -q plugins/train_fsdp2/tests/test_fsdp2_packed_gpu.py`
"""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import PluginContext
from dovetail.sections import ModelSection, TrainingSection
from dovetail_torch_engines import Sequences, varlen
from dovetail_train_fsdp2.config import Fsdp2Config
from dovetail_train_fsdp2.engine import Fsdp2Engine
from dovetail_train_fsdp2.shared_prompts import attend_shared

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
HALF = 0.02
"""Relative error, in the 2-norm, of attention in bfloat16."""
LOG_PROBS = frozenset({"log_probs"})


def dense(query, key, value, seen, scale):
    """Attention with a mask over the whole pack, in float32."""
    share = query.shape[1] // key.shape[1]
    q, k, v = (x.float().transpose(0, 1) for x in (query, key, value))
    k, v = k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -math.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def own_sequence(lengths, window=None):
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).cuda()
    seen = (number[:, None] == number).tril()
    return seen if window is None else seen.triu(1 - window)


def states_of(total, heads, size, value_size=None, dtype=torch.bfloat16):
    torch.manual_seed(total)
    shapes = [(heads[0], size), (heads[1], size), (heads[1], value_size or size)]
    return [torch.randn(total, *shape, device="cuda", dtype=dtype) for shape in shapes]


def assert_close(mine, theirs, what):
    # A gradient may be 0 everywhere, as that of a query that sees only its own key.
    size = max(float(theirs.detach().float().norm()), 0.1 * theirs.numel() ** 0.5)
    error = float((mine.detach().float() - theirs.detach().float()).norm()) / size
    assert error < HALF, f"{what}: relative error {error:.4f}"


def assert_same_attention(states, attend, reference):
    """Values and gradients agree."""
    mine, theirs = ([x.clone().requires_grad_() for x in states] for _ in range(2))
    attended, expected = attend(*mine), reference(*theirs)
    assert_close(attended, expected, "output")
    given = torch.randn_like(expected)
    attended.backward(given.to(attended.dtype))
    expected.backward(given)
    for name, one, other in zip(("query", "key", "value"), mine, theirs, strict=True):
        assert_close(one.grad, other.grad, name)


@pytest.mark.parametrize("lengths", [[640] * 4, [1, 1000, 3, 70, 257], [900]], ids=str)
@pytest.mark.parametrize(("heads", "size"), [((14, 2), 64), ((12, 2), 128), ((4, 4), 256)])
@pytest.mark.parametrize("window", [None, 1, 100])
def test_packs_of_many_lengths(lengths, heads, size, window):
    states, scale = states_of(sum(lengths), heads, size), size**-0.5
    sequences = Sequences(lengths, torch.device("cuda"))
    seen = own_sequence(lengths, window)
    assert_same_attention(
        states,
        lambda q, k, v: varlen.attend(q, k, v, sequences, scale=scale, window=window),
        lambda q, k, v: dense(q, k, v, seen, scale),
    )


def test_values_may_be_narrower_than_keys():
    lengths = [300, 20]
    sequences, seen = Sequences(lengths, torch.device("cuda")), own_sequence(lengths)
    assert_same_attention(
        states_of(320, (4, 4), 96, 64),
        lambda q, k, v: varlen.attend(q, k, v, sequences, scale=0.1),
        lambda q, k, v: dense(q, k, v, seen, 0.1),
    )


@pytest.mark.parametrize("window", [None, 7])
def test_float32_has_no_flash_kernel_and_is_exact(window):
    lengths = [50, 200, 3]
    states = states_of(253, (4, 2), 32, dtype=torch.float32)
    sequences = Sequences(lengths, torch.device("cuda"))
    attended = varlen.attend(*states, sequences, scale=0.2, window=window)
    torch.testing.assert_close(
        attended, dense(*states, own_sequence(lengths, window), 0.2), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("lengths", [[16384], [4096, 5000, 4500]], ids=str)
def test_long_sequences_go_alone(monkeypatch, lengths):
    monkeypatch.setattr(varlen, "_flash", None)
    sequences = Sequences(lengths, torch.device("cuda"))
    ends = np.cumsum([0, *lengths]).tolist()

    def one_by_one(query, key, value):
        rows = []
        for start, end in pairwise(ends):
            q, k, v = (x[start:end].float().transpose(0, 1)[None] for x in (query, key, value))
            k, v = k.repeat_interleave(7, 1), v.repeat_interleave(7, 1)
            rows.append(scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1))
        return torch.cat(rows)

    assert_same_attention(
        states_of(sum(lengths), (14, 2), 64),
        lambda q, k, v: varlen.attend(q, k, v, sequences, scale=64**-0.5),
        one_by_one,
    )


@pytest.mark.parametrize(
    "groups",
    [[(128, [200] * 4)], [(30, [1, 90, 256]), (1, [5]), (300, [40, 0, 3])], [(17, [0, 0])]],
    ids=str,
)
@pytest.mark.parametrize(("heads", "size"), [((14, 2), 64), ((12, 2), 128)])
def test_prompts_that_are_there_once(groups, heads, size):
    prompts = [prompt for prompt, _ in groups]
    responses = [length for _, lengths in groups for length in lengths if length]
    sequences = prompts + responses
    prompt_of = [*range(len(groups))] + [i for i, (_, ns) in enumerate(groups) for n in ns if n]
    number = torch.repeat_interleave(torch.tensor(prompt_of), torch.tensor(sequences)).cuda()
    of_prompt = (number[:, None] == number).tril() & (
        torch.arange(len(number), device="cuda") < sum(prompts)
    )
    seen = own_sequence(sequences) | of_prompt
    scale, device = size**-0.5, torch.device("cuda")
    parts = (
        Sequences(sequences, device),
        Sequences(prompts, device),
        Sequences([sum(lengths) for _, lengths in groups], device),
    )
    assert_same_attention(
        states_of(len(number), heads, size),
        lambda q, k, v: attend_shared(q, k, v, *parts, scale=scale),
        lambda q, k, v: dense(q, k, v, seen, scale),
    )


def model_of(kind, directory):
    from transformers import AutoModelForCausalLM, MistralConfig, Qwen2Config, Qwen3Config

    size = {
        "vocab_size": 300, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.08,
    }  # fmt: skip
    config = {
        "qwen2": lambda: Qwen2Config(**size),
        "qwen3": lambda: Qwen3Config(**size, head_dim=64),
        "mistral": lambda: MistralConfig(**size, sliding_window=20),
    }[kind]()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def samples():
    rng = np.random.default_rng(0)
    prompts, responses = [], []
    for _ in range(6):
        prompt = rng.integers(0, 300, rng.integers(1, 60))
        for _ in range(4):
            prompts.append(prompt)
            responses.append(rng.integers(0, 300, rng.integers(1, 200)))
    mask = Ragged.from_list([np.ones(len(row), bool) for row in responses], dtype=bool)
    return Batch(
        {
            "prompt_ids": Ragged.from_list(prompts, dtype=np.int64),
            "response_ids": Ragged.from_list(responses, dtype=np.int64),
            "response_mask": mask,
            "temperature": np.ones(24, np.float32),
        }
    )


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral"])
def test_a_model_fed_packs_scores_as_one_fed_rows(kind, tmp_path):
    model_of(kind, tmp_path)
    batch = samples()

    def scored(dtype, packing, share):
        config = Fsdp2Config(packing=packing, share_prompts=share)
        context = PluginContext(
            role="actor",
            device="cuda:0",
            model=ModelSection(path=str(tmp_path), dtype=dtype),
            training=TrainingSection(max_tokens_per_micro_batch=2000),
        )
        engine = Fsdp2Engine(config, context)
        engine.start()
        assert engine._runner.packs.why_not is None
        values = engine.forward(batch, LOG_PROBS)["log_probs"].values
        engine.close()
        return values

    exact = scored("float32", "never", "never")
    # The error of the padded layout in bfloat16; packing may exceed it only slightly.
    noise = np.abs(scored("bfloat16", "never", "never") - exact).mean()
    for dtype, packing, share in (
        ("float32", "always", "never"),
        ("float32", "always", "always"),
        ("bfloat16", "always", "never"),
        ("bfloat16", "always", "always"),
    ):
        error = np.abs(scored(dtype, packing, share) - exact).mean()
        assert error < (1e-4 if dtype == "float32" else 1.5 * noise), (dtype, share, error, noise)


def test_what_a_pass_leaves_in_the_allocator_is_given_back(tmp_path):
    model_of("qwen2", tmp_path)
    model = ModelSection(path=str(tmp_path), dtype="bfloat16")
    engine = Fsdp2Engine(Fsdp2Config(), PluginContext(role="actor", device="cuda:0", model=model))
    engine.start()
    engine.forward(samples(), LOG_PROBS)
    held = torch.cuda.memory_reserved()
    engine.free_cache()
    assert torch.cuda.memory_allocated() <= torch.cuda.memory_reserved() < held
    engine.close()
