"""Recomputation of layers: gradients stay equal, only as many layers as memory requires recompute, and caches are not written twice."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.errors import ConfigError
from dovetail_train_fsdp2.config import Fsdp2Config
from dovetail_train_fsdp2.layers import how_of, prepare_layers
from dovetail_train_fsdp2.memory import GIB
from dovetail_train_fsdp2.recompute import SLACK, WORKING_LAYERS, Recompute

WIDTH, TOKENS = 8, 16
STATES = TOKENS * WIDTH * 4
A_LAYER = 40 * STATES
"""Bytes that `Memory` reports for each layer."""


class Block(nn.Module):
    """A layer with a product, a cheap part and a residual, which counts how often it runs."""

    def __init__(self, count):
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.count, self.index = count, len(count)
        count.append(0)

    def forward(self, hidden_states, past_key_values=None):
        self.count[self.index] += 1
        return hidden_states + self.narrow(torch.sin(self.wide(hidden_states)))


class Memory:
    """An accelerator's memory of which so much is free; every call to `allocated` finds a layer more."""

    def __init__(self, free):
        self.now, self._free = 0, free

    def allocated(self):
        self.now += A_LAYER
        return self.now

    def free(self):
        return self._free


def make_blocks(count=4):
    torch.manual_seed(0)
    runs = []
    return [Block(runs) for _ in range(count)], runs


def run(blocks, states=None, **kwargs):
    """Forward and backward; gradients by layer."""
    states = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)) if states is None else states  # fmt: skip
    for block in blocks:
        block.zero_grad()
        states = block(states, **kwargs)
    states.square().sum().backward()
    return [p.grad.clone() for block in blocks for p in block.parameters()]


def free_for(keeping, layers=4):
    """Memory in which, after the first layer, just so many more keep their activations."""
    room = keeping * (A_LAYER - STATES) + (layers - 1) * STATES + WORKING_LAYERS * A_LAYER
    return int(room / (1 - SLACK)) + 1


@pytest.mark.parametrize("how", ["cheap", "everything"])
@pytest.mark.parametrize("offload", [False, True])
def test_gradients_are_the_same_bit_for_bit(how, offload):
    plain = run(make_blocks()[0])
    blocks, runs = make_blocks()
    Recompute(blocks, how, offload=offload)
    assert all(torch.equal(a, b) for a, b in zip(plain, run(blocks), strict=True))
    assert runs == [2] * 4


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def test_selective_makes_no_product_twice():
    counts = {}
    for how in ("nothing", "cheap", "everything"):
        blocks, _ = make_blocks()
        Recompute(blocks, how)
        with Products() as products:
            run(blocks)
        counts[how] = products.count
    # Products after the last needed tensor are not recomputed.
    assert counts["nothing"] == counts["cheap"] < counts["everything"]


@pytest.mark.parametrize(("keeping", "runs"), [
    (0, [1, 2, 2, 2]), (1, [1, 2, 2, 1]), (2, [1, 2, 1, 1]), (3, [1, 1, 1, 1]),
])  # fmt: skip
def test_by_memory_the_last_layers_keep_theirs_first(keeping, runs):
    blocks, count = make_blocks()
    recompute = Recompute(blocks, None, memory=Memory(free_for(keeping)))
    run(blocks)
    assert recompute.keeping == keeping
    assert count == runs


def test_every_micro_batch_is_decided_anew():
    blocks, _ = make_blocks(8)
    memory = Memory(free_for(7, layers=8))
    recompute = Recompute(blocks, None, memory=memory)
    run(blocks)
    assert recompute.keeping == 7
    # From now on a layer's memory is known, so that the first layer is included in the decision.
    memory._free = free_for(8, layers=9)
    run(blocks)
    assert recompute.keeping == 8
    # Twice the tokens need twice the memory.
    run(blocks, torch.randn(2, TOKENS, WIDTH))
    assert 0 < recompute.keeping < 4
    memory._free = 0
    run(blocks)
    assert recompute.keeping == 0


def test_what_the_rest_of_the_model_takes_is_left_free():
    blocks, _ = make_blocks()
    recompute = Recompute(blocks, None, memory=Memory(free_for(3)), outside=2 * A_LAYER)
    run(blocks)
    assert recompute.keeping < 3


def test_ranks_that_talk_within_a_layer_agree():
    blocks, count = make_blocks()
    asked = []

    def agreed(keeping):
        asked.append(keeping)
        return 1

    Recompute(blocks, None, memory=Memory(free_for(3)), agreed=agreed)
    run(blocks)
    assert asked == [3]
    assert count == [1, 2, 2, 1]


@pytest.mark.parametrize("how", ["cheap", "everything", None])
def test_nothing_runs_twice_without_a_gradient_or_with_a_cache(how):
    blocks, runs = make_blocks()
    Recompute(blocks, how, memory=Memory(0))
    with torch.no_grad():
        blocks[0](torch.randn(1, TOKENS, WIDTH))
    run(blocks, past_key_values=object())
    assert runs == [2, 1, 1, 1]


@pytest.mark.parametrize(("value", "compiled", "accelerated", "how"), [
    (False, False, True, "nothing"), (True, False, False, "everything"), (True, True, True, "everything"),
    ("selective", False, False, "cheap"), ("selective", True, True, "nothing"),
    ("auto", False, True, None), ("auto", False, False, "nothing"),
])  # fmt: skip
def test_what_the_config_means(value, compiled, accelerated, how):
    config = Fsdp2Config(gradient_checkpointing=value, compile=compiled)
    assert how_of(config, accelerated=accelerated) == how


def test_liger_is_refused_on_a_cpu():
    with pytest.raises(ConfigError, match="CUDA device"):
        prepare_layers(nn.Linear(1, 1), Fsdp2Config(liger=True), torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_offloading_waits_in_host_memory_and_comes_back():
    from dovetail_train_fsdp2.memory import offloading

    given = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    plain = (given.sin() * given.cos()).sum()
    (expected,) = torch.autograd.grad(plain, given)
    before = torch.cuda.memory_allocated()
    with offloading():
        result = (given.sin() * given.cos()).sum()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < given.numel() * 4
    (found,) = torch.autograd.grad(result, given)
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_free_memory_heeds_the_limit():
    from dovetail_train_fsdp2.memory import MemoryBudget

    device = torch.device("cuda", torch.cuda.current_device())
    held = torch.empty(2**28, dtype=torch.uint8, device=device)
    limited = MemoryBudget(device, limit_gib=1.0)
    assert limited.free() == GIB - limited.allocated()
    assert limited.allocated() >= held.numel()
    assert MemoryBudget(device).free() > limited.free()


@pytest.fixture
def segments_of_their_own():
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    torch.cuda.empty_cache()
    yield
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_rest_of_a_block_in_use_is_not_free(segments_of_their_own):
    from dovetail_train_fsdp2.memory import MemoryBudget

    memory = MemoryBudget(torch.device("cuda", torch.cuda.current_device()))

    def block(gib):
        return torch.empty(gib * GIB, dtype=torch.uint8, device="cuda")

    before = memory.free()
    block(8)  # freed at once; the allocator caches it
    assert memory.free() == before
    held = block(1)
    assert memory.free() == before - 8 * GIB
    del held
    assert memory.free() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_with_expandable_segments_there_are_no_such_rests():
    from dovetail_train_fsdp2.memory import MemoryBudget, use_expandable_segments

    device = torch.device("cuda", torch.cuda.current_device())
    use_expandable_segments(device)
    torch.cuda.empty_cache()
    memory = MemoryBudget(device)
    before = memory.free()
    torch.empty(8 * GIB, dtype=torch.uint8, device=device)
    held = torch.empty(GIB, dtype=torch.uint8, device=device)
    assert before - memory.free() < 1.1 * GIB
    assert held.numel() == GIB
    # The free memory can be allocated in one piece, though the allocator caches some of it.
    torch.empty(int(memory.free() * 0.98), dtype=torch.uint8, device=device)
