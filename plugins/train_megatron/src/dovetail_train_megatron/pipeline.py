"""Running micro-batches through a model's pipeline stages with Megatron's schedules: forward only, or forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.interfaces import ObjectiveTerm, OutputSpec
from dovetail_train_megatron.needs import imported
from dovetail_train_megatron.network import Network
from dovetail_train_megatron.packs import PackedMicroBatch

Scores = dict[str, Tensor]


@torch.no_grad()
def score(
    network: Network,
    packs: Sequence[PackedMicroBatch],
    outputs: Sequence[OutputSpec],
    module: object,
) -> list[Scores]:
    """Run forward passes of all packs without gradients. Collective.

    Args:
        network: this rank's stage of the model.
        packs: the packs, equally many on every rank.
        outputs: the outputs to compute.
        module: the network's module, possibly within Megatron's wrapper.

    Returns:
        On ranks of the last stage, each pack's outputs by name, [T, …] each, in the order of packs; an empty list on other ranks.
    """

    def collect(hidden: Tensor, pack: PackedMicroBatch) -> Any:
        def found(output: Tensor, **_: object) -> Scores:
            return network.scores(output, pack, outputs)

        return hidden, found

    return _run(network, packs, collect, module, forward_only=True)


def descend(
    network: Network,
    packs: Sequence[PackedMicroBatch],
    outputs: Sequence[OutputSpec],
    term_of: Callable[[int, Scores], ObjectiveTerm],
    module: object,
) -> list[ObjectiveTerm]:
    """Run forward and backward passes of all packs, and accumulate gradients, summed over the ranks that share weights. Collective.

    Args:
        network: this rank's stage of the model.
        packs: the packs, equally many on every rank.
        outputs: the outputs that the objective reads.
        term_of: a function that returns the objective's term of the i-th pack from i and the pack's outputs.
        module: the network's module, within Megatron's wrapper.

    Returns:
        Every pack's term on ranks of the last stage; an empty list on other ranks.
    """
    numbers = {id(pack): i for i, pack in enumerate(packs)}

    def loss(hidden: Tensor, pack: PackedMicroBatch) -> Any:
        def found(output: Tensor) -> tuple[Tensor, Tensor, ObjectiveTerm]:
            scores = network.scores(output, pack, outputs)
            term = term_of(numbers[id(pack)], scores)
            total = term.loss
            if not total.requires_grad:
                # A loss without a gradient still needs a backward pass: the other ranks wait for its communication.
                total = sum((s.sum() for s in scores.values() if s.requires_grad), total) * 0
            # Megatron would divide by the second value, but for `calculate_per_token_loss`, and collects the third.
            return total, torch.zeros((), dtype=torch.int32, device=total.device), term

        return hidden, found

    return _run(network, packs, loss, module, forward_only=False)


def _run(
    network: Network,
    packs: Sequence[PackedMicroBatch],
    then: Callable[[Tensor, PackedMicroBatch], Any],
    module: Any,
    *,
    forward_only: bool,
) -> list[Any]:
    schedule = imported("megatron.core.pipeline_parallel").get_forward_backward_func()
    parallel = network.parallel
    between = (
        {"p2p_communicator": _communicator(network, packs), "pg_collection": parallel.collection()}
        if parallel.pp > 1
        else {}
    )

    def step(waiting: Any, stage: Any) -> Any:
        pack = next(waiting)
        return then(network.run(stage, pack), pack)

    try:
        found: list[Any] = schedule(
            forward_step_func=step,
            data_iterator=iter(packs),
            model=[module],
            num_microbatches=len(packs),
            # No effect: `_communicator` gives every pack's shape.
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            **between,
        )
    finally:
        network.forget()
    return found if network.parallel.last_stage else []


def _communicator(network: Network, packs: Sequence[PackedMicroBatch]) -> Any:
    """Return a communicator that exchanges activations and gradients with the neighbouring stages, in shapes that follow from the packs.

    Megatron's own communicator sends every shape first, and synchronises the device to read it.
    """
    base = imported("megatron.core.pipeline_parallel.p2p_communication").P2PCommunicator
    shapes = [network.hidden_shape(pack) for pack in packs]

    class KnownShapes(base):  # type: ignore[misc, valid-type]
        """Communicator that takes shapes from the packs, in whose order activations and gradients arrive."""

        def __init__(self) -> None:
            super().__init__(network.parallel.pp_group, network.architecture.transformer)
            self._forward, self._backward = iter(shapes), iter(shapes)

        def _communicate_shapes(
            self, _: Tensor | None, __: Tensor | None, recv_prev: bool, recv_next: bool
        ) -> tuple[list[int], list[int]]:
            before = next(self._forward) if recv_prev else [0, 0, 0]
            after = next(self._backward) if recv_next else [0, 0, 0]
            return before, after

    return KnownShapes()
