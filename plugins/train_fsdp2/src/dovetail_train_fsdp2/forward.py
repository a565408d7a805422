"""Scorer: a laid-out micro-batch through one model, and the scores of its tokens out.

Legend: B rows, G distinct prompts, L padded length, P padded prompt length, R scored tokens, T response tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float32
from torch import Tensor, nn

from dovetail_train_fsdp2.architecture import plain_head, shares_prompts
from dovetail_train_fsdp2.head import score_tokens, scores_of_logits
from dovetail_train_fsdp2.packing import Layout
from dovetail_train_fsdp2.trunk import Trunk, flat

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dovetail_train_fsdp2.adapter import Adapter
    from dovetail_train_fsdp2.value_model import ValueModel


class Scorer(ABC):
    """Runs one model. What it may do with the architecture is found out once, by trying.

    Attributes:
        model: everything that is trained or kept.
        trunk: its part that transformers made: the whole of a language model, the base of a value model.
    """

    head: ClassVar[str]
    """What the model ends in, in words."""

    def __init__(
        self, model: nn.Module, trunk: PreTrainedModel, dtype: torch.dtype, adapter: Adapter | None
    ) -> None:
        self.model = model
        self.trunk = trunk
        self.dtype = dtype
        self.adapter = adapter
        self.device: torch.device = trunk.device
        self.can_share_prompts = False
        self._runner = Trunk(trunk, dtype)

    @property
    @abstractmethod
    def computes(self) -> frozenset[str]:
        """The outputs that it can be asked for."""

    def __call__(self, layout: Layout, outputs: frozenset[str]) -> dict[str, Float32[Tensor, "T"]]:
        """Score the micro-batch's tokens.

        Returns:
            float32 [T] for each output, aligned with the packed response tokens; masked tokens hold 0.
            They carry the gradient where gradients are enabled.
        """
        if not len(layout.token_R):
            return {name: torch.zeros(layout.tokens, device=self.device) for name in outputs}
        scores = self._scores(layout, self._runner.tensor(layout.source_R), outputs)
        if len(layout.token_R) == layout.tokens:
            return scores
        token_R = self._runner.tensor(layout.token_R)
        return {
            name: values_R.new_zeros(layout.tokens).index_copy(0, token_R, values_R)
            for name, values_R in scores.items()
        }

    @abstractmethod
    def _scores(
        self, layout: Layout, source_R: Tensor, outputs: frozenset[str]
    ) -> dict[str, Tensor]:
        """float32 [R] for each output."""


class PolicyScorer(Scorer):
    """Of a language model: log-probabilities, and what else its logits tell."""

    head = "a language model's head"

    def __init__(
        self, model: PreTrainedModel, dtype: torch.dtype, adapter: Adapter | None = None
    ) -> None:
        super().__init__(model, model, dtype, adapter)
        self._head = plain_head(model)
        self.can_share_prompts = self._head is not None and shares_prompts(model)

    @property
    def computes(self) -> frozenset[str]:
        of_reference = {"ref_log_probs"} if self.adapter is not None else set()
        return frozenset({"log_probs", "entropies", "sum_pi_squared"} | of_reference)

    def _scores(
        self, layout: Layout, source_R: Tensor, outputs: frozenset[str]
    ) -> dict[str, Tensor]:
        own = outputs - {"ref_log_probs"}
        scores = self._scores_of_tokens(layout, source_R, own) if own else {}
        if "ref_log_probs" in outputs:
            assert self.adapter is not None
            with self.adapter.off(), torch.no_grad():
                of_base = self._scores_of_tokens(layout, source_R, frozenset({"log_probs"}))
            scores["ref_log_probs"] = of_base["log_probs"]
        return scores

    def _scores_of_tokens(
        self, layout: Layout, source_R: Tensor, outputs: frozenset[str]
    ) -> dict[str, Tensor]:
        targets_R = self._runner.tensor(layout.targets_R)
        temperature_R = (
            None if layout.temperature_R is None else self._runner.tensor(layout.temperature_R)
        )
        if self._head is None:
            return self._scores_of_any_head(layout, source_R, targets_R, temperature_R, outputs)
        return score_tokens(
            self._runner.states(layout).index_select(0, source_R),
            self._head.weight,
            self._head.bias,
            targets_R,
            temperature_R,
            outputs=outputs,
            dtype=self.dtype,
        )

    def _scores_of_any_head(
        self,
        layout: Layout,
        source_R: Tensor,
        targets_R: Tensor,
        temperature_R: Tensor | None,
        outputs: frozenset[str],
    ) -> dict[str, Tensor]:
        """Through the model's own output: for architectures that do more than one matrix product there."""
        with self._runner.autocast():
            output = self.trunk(input_ids=self._runner.tensor(layout.ids_BL), use_cache=False)
        logits_RV = flat(output.logits).index_select(0, source_R)
        if temperature_R is not None:
            logits_RV = logits_RV.float() / temperature_R[:, None]
        return scores_of_logits(logits_RV, targets_R, outputs)


class ValueScorer(Scorer):
    """Of a value model: the value of the state before each token, by the hidden state that would predict it."""

    head = "a value head"

    def __init__(
        self, model: ValueModel, dtype: torch.dtype, adapter: Adapter | None = None
    ) -> None:
        super().__init__(model, model.trunk, dtype, adapter)
        self._head = model.value_head
        self.can_share_prompts = shares_prompts(model.trunk)

    @property
    def computes(self) -> frozenset[str]:
        return frozenset({"values"})

    def _scores(
        self, layout: Layout, source_R: Tensor, outputs: frozenset[str]
    ) -> dict[str, Tensor]:
        states_RH = self._runner.states(layout).index_select(0, source_R)
        return {"values": self._head(states_RH.float())[:, 0]}
