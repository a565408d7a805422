"""ModelRunner: one model that scores the tokens of laid-out micro-batches.

Legend: B rows, G distinct prompts, L padded length, P padded prompt length, R scored tokens, T response tokens, K token
ids for each scored token.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, cast

import attrs
import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from dovetail.errors import ConfigError
from dovetail.interfaces import OUTPUTS, OutputSpec, top_size
from dovetail.sections import ModelSection
from dovetail_datasets import ImageInputs
from dovetail_torch_engines import empty_columns, ids_column
from dovetail_train_fsdp2.architecture import has_plain_head, quadratic, shares_prompts
from dovetail_train_fsdp2.head import score_tokens, scores_of_logits
from dovetail_train_fsdp2.layout import DUMMY, MicroBatchLayout, PackedSequences, Shared
from dovetail_train_fsdp2.packing import Means
from dovetail_train_fsdp2.probing import PackingSupport, probe_packing
from dovetail_train_fsdp2.trunk import Trunk, flat
from dovetail_train_fsdp2.ulysses import SequenceParallel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dovetail_train_fsdp2.adapter import PeftAdapter
    from dovetail_train_fsdp2.config import Fsdp2Config
    from dovetail_train_fsdp2.value_model import ValueModel


class ModelRunner(nn.Module):
    """Base class that runs one model and computes outputs for tokens. Tests once which optimisations the architecture allows.

    The runner is a module so that it can be the root of sharding: weights outside of decoder layers (embedding, last norm, output
    layer) are gathered only within `forward`.

    Attributes:
        model: the module with all parameters.
        device: the device of computation.
        sharded: whether the weights are sharded over ranks. If so, every forward pass is collective and gathers weights in the
            compute dtype, without autocast.
        can_share_prompts: whether several responses can attend to one prompt's keys and values.
        parallel: the group of ranks that each hold a part of every pack (packed micro-batch), and so score the same samples; None if
            every rank holds whole packs.
        packs: whether samples can be packed end to end, with or without shared prompts, as `probe` found it.
        room: a function that returns how many bytes of logits may currently be kept for the backward pass.
        section: the model's config section, with the path of its image processor.
        vision_everywhere: whether some rank trains on images, so that every rank must have gradients of the vision
            tower.
    """

    head: ClassVar[str]
    """Description of the model's head, for error messages."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, adapter: PeftAdapter | None) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.adapter = adapter
        self.device: torch.device = self.trunk.device
        self.sharded = False
        self.can_share_prompts = False
        self.parallel: SequenceParallel | None = None
        self.packs = PackingSupport(why_not="packing was not tested yet")
        self.room: Callable[[], int] = lambda: 0
        self.section: ModelSection | None = None
        self.vision_everywhere = False
        self._images: ImageInputs | None = None
        self._runner = Trunk(self)
        self.training = False
        if self.device.type != "meta":
            self.probe()

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model has embeddings for, V."""
        return int(self.trunk.config.get_text_config().vocab_size)

    @property
    @abstractmethod
    def trunk(self) -> PreTrainedModel:
        """The transformers part of the model: all of a language model, the base of a value model."""

    @property
    @abstractmethod
    def output_layer(self) -> nn.Module | None:
        """The layer that computes logits or values from the last hidden states; None if the architecture has none."""

    def probe(self) -> None:
        """Test which optimisations the architecture allows.

        Called when the runner is created, or after its weights are loaded if they were on the meta device. Collective if the model
        is sharded.

        Raises:
            ConfigError: `sequence_parallel_size` is above 1, and the architecture does not support packing.
        """
        self(None, ())
        if self.parallel is not None and self.packs.why_not is not None:
            raise ConfigError(
                f"sequence_parallel_size={self.parallel.size} needs packed samples, which this model does not support: "
                f"{self.packs.why_not}",
                hint="use sequence_parallel_size=1",
            )

    def images(self) -> ImageInputs:
        """Return the converter of images to the model's inputs, created at first use.

        Raises:
            ModelError: the model takes no images, or its image processor can't be loaded.
        """
        if self._images is None:
            assert self.section is not None
            self._images = ImageInputs(self.trunk, self.section)
        return self._images

    def means(self, config: Fsdp2Config) -> Means:
        """Return the layouts of micro-batches that both config and model allow."""
        shares = self.can_share_prompts and not self.sharded
        packing = config.packing if self.parallel is None else "always"
        return Means(
            packing=packing if self.packs.why_not is None else "never",
            # In padded micro-batches, sharing takes a second forward pass, which all ranks would have to run together.
            share=config.share_prompts if shares else "never",
            share_packed=config.share_prompts if self.packs.with_shared_prompts else "never",
            device=self.device.type,
            quadratic=quadratic(self.trunk),
        )

    def forward(
        self, layout: MicroBatchLayout | None, outputs: Sequence[OutputSpec]
    ) -> dict[str, Shaped[Tensor, "T ..."]]:
        """Compute outputs, such as log-probabilities, for a micro-batch's tokens.

        Args:
            layout: the layout of the micro-batch. None only tests which optimisations the architecture allows.
            outputs: specs of outputs that the engine has for this head, each once.

        Returns:
            The outputs by name, [T, …] in each output's dtype and inner shape, aligned with the response tokens; masked tokens hold
            0. Differentiable if gradients are enabled. A sharded model's outputs are differentiable even if no token is scored: the
            backward pass then gives gradients of 0, and takes part in the collectives.
        """
        if layout is None:
            self._probe()
            self.packs = probe_packing(self.trunk)
            return {}
        if not len(layout.token_R) and not self.sharded:
            empty = empty_columns(layout.tokens, outputs)
            return {name: self._runner.tensor(values) for name, values in empty.items()}
        fed = layout if len(layout.token_R) else _dummy(layout)
        if self.parallel is not None and isinstance(fed.fed, PackedSequences):
            part = self.parallel.part(fed)
            scores = self.parallel.whole(self._scores(part.layout, outputs), part)
        else:
            scores = self._scores(fed, outputs)
        if len(layout.token_R) == layout.tokens and fed is layout:
            # FSDP2 registers backward hooks on these tensors; a view would lose its hook if an objective wrote into it.
            return {name: values.clone() for name, values in scores.items()}
        token_R = self._runner.tensor(layout.token_R)
        return {
            name: values_R.new_zeros(layout.tokens, *values_R.shape[1:]).index_copy(
                0, token_R, values_R[: len(token_R)]
            )
            for name, values_R in scores.items()
        }

    @abstractmethod
    def _probe(self) -> None:
        """Test the architecture, and set the attributes that depend on it."""

    @abstractmethod
    def _scores(self, layout: MicroBatchLayout, outputs: Sequence[OutputSpec]) -> dict[str, Tensor]:
        """Compute each output for the scored tokens, [R, …]."""


def _dummy(layout: MicroBatchLayout) -> MicroBatchLayout:
    """Return the layout `DUMMY` of one token, by which a rank without tokens to score takes part in the forward pass.

    Columns that the outputs read, `layout.read`, get one row of zeros.
    """
    read = {name: np.zeros((1, *x.shape[1:]), x.dtype) for name, x in layout.read.items()}
    return attrs.evolve(DUMMY, read=read)


class PolicyRunner(ModelRunner):
    """Runs a language model: computes log-probabilities and other functions of its logits."""

    head = "a language model's head"

    def __init__(
        self, model: PreTrainedModel, dtype: torch.dtype, adapter: PeftAdapter | None = None
    ) -> None:
        self._plain_head = False
        super().__init__(model, dtype, adapter)

    @property
    def trunk(self) -> PreTrainedModel:
        return cast("PreTrainedModel", self.model)

    @property
    def output_layer(self) -> nn.Module | None:
        return self.trunk.get_output_embeddings()

    def _probe(self) -> None:
        self._plain_head = has_plain_head(self.trunk)
        self.can_share_prompts = self._plain_head and shares_prompts(self.trunk)

    def _scores(self, layout: MicroBatchLayout, outputs: Sequence[OutputSpec]) -> dict[str, Tensor]:
        own = [output for output in outputs if output.name != "ref_log_probs"]
        scores = self._scores_of_tokens(layout, own) if own else {}
        if len(own) < len(outputs):
            assert self.adapter is not None
            with self.adapter.off(), torch.no_grad():
                of_base = self._scores_of_tokens(layout, [OUTPUTS["log_probs"]])
            scores["ref_log_probs"] = of_base["log_probs"]
        return scores

    def _scores_of_tokens(
        self, layout: MicroBatchLayout, outputs: Sequence[OutputSpec]
    ) -> dict[str, Tensor]:
        names, at = frozenset(output.name for output in outputs), ids_column(outputs)
        ids_RK = None if at is None else self._runner.tensor(layout.read[at])
        source_R = self._runner.tensor(layout.source_R)
        targets_R = self._runner.tensor(layout.targets_R)
        temperature_R = (
            None if layout.temperature_R is None else self._runner.tensor(layout.temperature_R)
        )
        if not self._plain_head:
            logits_RV = self._logits(layout, source_R, temperature_R)
            return scores_of_logits(
                logits_RV, targets_R, names, ids_CK=ids_RK, top_k=top_size(outputs)
            )
        states_RH = self._runner.states(layout).index_select(0, source_R)
        # Looked up in every pass, after the states: sharding replaces the weight's tensor.
        head = cast("nn.Linear", self.trunk.get_output_embeddings())
        return score_tokens(
            states_RH,
            head.weight,
            head.bias,
            targets_R,
            temperature_R,
            outputs=names,
            dtype=self.dtype,
            room=self.room() if torch.is_grad_enabled() else 0,
            ids_RK=ids_RK,
            top_k=top_size(outputs),
        )

    def _logits(
        self, layout: MicroBatchLayout, source_R: Tensor, temperature_R: Tensor | None
    ) -> Tensor:
        """Return logits / temperature, float [R, V], of architectures whose output layer is more than a matrix product."""
        assert not isinstance(layout.fed, Shared)
        with self._runner.autocast(), self._runner.inputs(layout.fed) as inputs:
            output = self.trunk(use_cache=False, **inputs)
        logits_RV = self._runner.owing_vision(flat(output.logits).index_select(0, source_R))
        if temperature_R is not None:
            logits_RV = logits_RV.float() / temperature_R[:, None]
        return logits_RV


class ValueRunner(ModelRunner):
    """Runs a value model: computes the value of the state before each token, from the hidden state that predicts the token."""

    head = "a value head"

    def __init__(
        self, model: ValueModel, dtype: torch.dtype, adapter: PeftAdapter | None = None
    ) -> None:
        super().__init__(model, dtype, adapter)

    @property
    def trunk(self) -> PreTrainedModel:
        return cast("ValueModel", self.model).trunk

    @property
    def output_layer(self) -> nn.Module:
        return cast("ValueModel", self.model).value_head

    def _probe(self) -> None:
        self.can_share_prompts = shares_prompts(self.trunk)

    def _scores(self, layout: MicroBatchLayout, outputs: Sequence[OutputSpec]) -> dict[str, Tensor]:
        source_R = self._runner.tensor(layout.source_R)
        states_RH = self._runner.states(layout).index_select(0, source_R)
        head = cast("ValueModel", self.model).value_head
        return {"values": head(states_RH.float())[:, 0]}
