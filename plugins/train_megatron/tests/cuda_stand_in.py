"""Stand-in for CUDA in tests: tensors are on the CPU where megatron-core requests "cuda".

megatron-core names the device "cuda" in many places, asks torch.cuda for its current device and its random state, and checks
whether a tensor's type is torch.cuda.FloatTensor. The stand-in redirects all of this to the CPU. No kernel is replaced: the
arithmetic is torch's own, in float32, over gloo. Streams, fused kernels and NCCL are not tested.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import wraps
from unittest import mock

import torch
from torch.nn.functional import dropout
from torch.overrides import TorchFunctionMode

from dovetail_train_megatron.engine import MegatronEngine


class CudaIsCpu(TorchFunctionMode):
    """Answers every request for a CUDA device with the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)


def _is_cuda(device) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


class NoStream:
    """Everything on the CPU is in order already."""

    def wait_stream(self, _) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self):
        return self


def cuda_stand_in():
    """The functions of torch.cuda that megatron-core calls, answered by the CPU."""
    answers = {
        "current_device": lambda: torch.device("cpu"),
        "synchronize": lambda *_: None,
        "Stream": NoStream,
        "stream": lambda _: nullcontext(),
        "current_stream": lambda *_: NoStream(),
        "default_stream": lambda *_: NoStream(),
        "manual_seed": lambda _: None,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda *_, **__: None,
    }
    return mock.patch.multiple(torch.cuda, **answers)


def _on_the_host(tensor, *, as_numpy=False, **_):
    """Convert a CPU tensor to NumPy as well: megatron-core's own function converts only CUDA tensors."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _standing_in(method):
    @wraps(method)
    def within(self, *args, **kwargs):
        with warnings.catch_warnings(), cuda_stand_in(), CudaIsCpu():
            warnings.simplefilter("ignore")
            from megatron.core.tensor_parallel import random
            from megatron.core.transformer.moe import token_dispatcher

            states = mock.patch.multiple(
                random,
                _set_cuda_rng_state=lambda *_, **__: None,
                _get_cuda_rng_state=lambda *_, **__: torch.get_rng_state(),
            )
            splits = mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _on_the_host)
            with states, splits:
                return method(self, *args, **kwargs)

    return within


class MegatronOnCpu(MegatronEngine):
    """The engine, whose every call finds the CPU where it looks for CUDA."""

    capabilities = MegatronEngine.capabilities | {"deterministic"}
    """Includes `deterministic`: on the CPU, the suite's test of a bit-identical next update passes too."""

    def _check_device(self) -> None:
        pass

    start = _standing_in(MegatronEngine.start)
    close = _standing_in(MegatronEngine.close)
    forward = _standing_in(MegatronEngine.forward)
    update = _standing_in(MegatronEngine.update)
    weight_manifest = _standing_in(MegatronEngine.weight_manifest)
    send_weights = _standing_in(MegatronEngine.send_weights)
    save = _standing_in(MegatronEngine.save)
    load = _standing_in(MegatronEngine.load)
    export = _standing_in(MegatronEngine.export)


class WithDropout(MegatronOnCpu):
    """Its model drops out half of what it embeds: it draws from torch's generators in every forward pass."""

    def start(self) -> None:
        super().start()
        embedding = self._network.module.embedding
        embedding.register_forward_hook(lambda module, inputs, states_TBH: dropout(states_TBH))
