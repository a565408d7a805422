"""ScoringModel: a model that scores texts, with its forward passes and its offloading. Classifier: a ScoringModel with a single label.

Legend: B texts of a forward pass, L padded length.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from dovetail.errors import ConfigError
from dovetail_rewards.model_config import RewardModelConfig, ScoringModelConfig
from dovetail_rewards.models.reading import Reading

Found = TypeVar("Found")
"""The type of a model's result for one text."""


class ScoringModel(ABC, Generic[Found]):
    """A scoring model on its device. Runs one forward pass at a time; thread-safe.

    Args:
        config: the settings of the model.
        model: a transformers model, on the CPU.

    Raises:
        ConfigError: the device can't be used.
    """

    def __init__(self, config: ScoringModelConfig, model: Any) -> None:
        self._device = _device(config)
        self._model = model.to(self._device)
        self._text_config = self._model.config.get_text_config()
        self._pad = getattr(self._text_config, "pad_token_id", None)
        self._lock = threading.Lock()
        self._host: dict[str, Tensor] = {}
        if config.offload and self._device.type != "cpu":
            self._host = {name: _on_host(tensor) for name, tensor in self._tensors()}
            self.sleep()
        else:
            self.awake = True

    awake: bool
    """Whether the model's weights are on the device on which it computes."""

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens in a text, from the model's position embeddings; None if the model's config does not state it."""
        limit = getattr(self._text_config, "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else None

    @abstractmethod
    def found(self, inputs: dict[str, Tensor], readings: Sequence[Reading]) -> list[Found]:
        """Run a forward pass over B texts, and return one result for each, in order.

        Args:
            inputs: the model's inputs by name, int64 [B, L] each, padded on the right to L tokens.
            readings: the texts.
        """

    def score(self, readings: Sequence[Reading]) -> list[Found]:
        """Return the model's results for B texts, in order; float32 values, possibly not finite.

        A forward pass that exceeds the accelerator's memory is repeated with each half of the texts.

        Raises:
            torch.OutOfMemoryError: a single text exceeds the accelerator's memory.
        """
        with self._lock:
            self._wake()
            return self._halving(readings)

    def sleep(self) -> None:
        """Wait until no forward pass is running, and move the model to host memory, if `offload` is set."""
        if not self._host:
            return
        with self._lock:
            for name, tensor in self._tensors():
                tensor.data = self._host[name]
            self.awake = False
            torch.accelerator.empty_cache()

    def _wake(self) -> None:
        if self.awake:
            return
        for name, tensor in self._tensors():
            tensor.data = self._host[name].to(self._device, non_blocking=True)
        self.awake = True

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [*self._model.named_parameters(), *self._model.named_buffers()]

    def _halving(self, readings: Sequence[Reading]) -> list[Found]:
        try:
            return self._pass(readings)
        except torch.OutOfMemoryError:
            if len(readings) == 1:
                raise
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()
        middle = len(readings) // 2
        return self._halving(readings[:middle]) + self._halving(readings[middle:])

    @torch.inference_mode()
    def _pass(self, readings: Sequence[Reading]) -> list[Found]:
        lengths = [len(reading.ids) for reading in readings]
        shape = (len(readings), max(lengths))
        pad = self._padding(readings)
        ids_BL = torch.full(shape, pad, dtype=torch.int64)
        mask_BL = torch.zeros(shape, dtype=torch.int64)
        segments_BL = torch.zeros(shape, dtype=torch.int64)
        for row, (reading, length) in enumerate(zip(readings, lengths, strict=True)):
            ids_BL[row, :length] = torch.tensor(reading.ids)
            mask_BL[row, :length] = 1
            if reading.segments is not None:
                segments_BL[row, :length] = torch.tensor(reading.segments)
        inputs = {"input_ids": ids_BL, "attention_mask": mask_BL}
        if readings[0].segments is not None:
            inputs["token_type_ids"] = segments_BL
        on_device = {name: tensor.to(self._device) for name, tensor in inputs.items()}
        return self.found(on_device, readings)

    def _padding(self, readings: Sequence[Reading]) -> int:
        """Return the token id for padding.

        Decoders read the score at the last token that is not padding. If the model has no padding token, the id must therefore not be
        the last token of any text, else that text would be scored at an earlier token.
        """
        if self._pad is not None:
            return int(self._pad)
        ends = {reading.ids[-1] for reading in readings}
        pad = next(token for token in range(len(ends) + 1) if token not in ends)
        self._text_config.pad_token_id = pad
        return pad


class Classifier(ScoringModel[float]):
    """The model of a `RewardModelConfig`: a sequence classifier with one label, whose logit is the result.

    Raises:
        ConfigError: the model can't be loaded, has more than one label, or its checkpoint lacks weights.
    """

    def __init__(self, config: RewardModelConfig) -> None:
        super().__init__(config, _load(config))

    def found(self, inputs: dict[str, Tensor], readings: Sequence[Reading]) -> list[float]:
        logits_B1 = self._model(**inputs).logits
        return logits_B1[:, 0].float().tolist()


def _device(config: ScoringModelConfig) -> torch.device:
    if config.device is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        return found if found is not None else torch.device("cpu")
    try:
        device = torch.device(config.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            f"reward model {config.model!r} can't be placed on device={config.device!r}: {error}",
            hint="set `device` to a device that this process sees, or leave `device` out",
        ) from error
    return device


def _load(config: RewardModelConfig) -> Any:
    from transformers import AutoModelForSequenceClassification

    return load_scoring_model(config, AutoModelForSequenceClassification, "sequence", labels=(1,))


def load_scoring_model(
    config: ScoringModelConfig, auto: Any, what: str, labels: Sequence[int] = ()
) -> Any:
    """Load a transformers model onto the CPU.

    Args:
        config: the model's config.
        auto: the auto class of transformers that loads the model.
        what: the unit that the model classifies, `sequence` or `token`, for messages.
        labels: the allowed numbers of labels; empty for a model without labels.

    Raises:
        ConfigError: the model can't be loaded, has another number of labels, or its checkpoint lacks weights.
    """
    from pickle import UnpicklingError

    from safetensors import SafetensorError
    from transformers import AutoConfig

    source = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    try:
        found = AutoConfig.from_pretrained(config.model, **source).num_labels
        if labels and found not in labels:
            expected = "one" if tuple(labels) == (1,) else " or ".join(map(str, labels))
            raise ConfigError(
                f"checkpoint {config.model!r} has num_labels={found}; expected {expected} for a reward model",
                hint=f"set `model` to a checkpoint whose config.json has num_labels: {labels[-1]}",
            )
        model, report = auto.from_pretrained(
            config.model,
            dtype=getattr(torch, config.dtype),
            attn_implementation=config.attn_implementation,
            output_loading_info=True,
            **source,
        )
    except (
        OSError,
        ValueError,
        ImportError,
        RuntimeError,
        UnpicklingError,
        SafetensorError,
    ) as error:
        raise ConfigError(
            f"reward model {config.model!r} can't be loaded: {error}",
            hint=f"set `model` to a directory in Hugging Face format, or to the hub id of a {what} classifier"
            if labels
            else "set `model` to a directory in Hugging Face format, or to the hub id of a causal language model",
        ) from error
    missing = sorted([*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])])
    if missing:
        # transformers would initialise missing weights at random, and rewards would be noise.
        raise ConfigError(
            f"checkpoint {config.model!r} lacks weights of a {what} classifier: {len(missing)} missing, such as {missing[0]!r}",
            hint="set `model` to a trained reward model; a plain language model has no scoring head",
        )
    return model.eval().requires_grad_(False)


def _on_host(tensor: Tensor) -> Tensor:
    """Return a copy in pinned host memory, which copies fast to the accelerator."""
    return tensor.detach().to("cpu", copy=True).pin_memory()
