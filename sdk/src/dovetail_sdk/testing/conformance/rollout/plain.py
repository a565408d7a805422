"""The oracle of the rollout suite: a transformers model, one plain forward pass a sequence, in float32 on the CPU.

Legend: P prompt tokens, T response tokens, L tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache


class PlainModel:
    """A reference causal language model that scores one unbatched sequence at a time."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()

    @classmethod
    def of(cls, directory: Path) -> PlainModel:
        """Load the model in this directory in float32."""
        return cls(AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32))

    def changed(self) -> PlainModel:
        """Return a model in which every weight w is 1.5 w + 0.01."""
        model = copy.deepcopy(self._model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5).add_(0.01)
        return PlainModel(model)

    def plus(self, added: Mapping[str, torch.Tensor]) -> PlainModel:
        """Return a model with these tensors added to the weights of the same names and shapes."""
        model = copy.deepcopy(self._model)
        with torch.no_grad():
            for name, tensor in added.items():
                model.get_parameter(name).add_(tensor)
        return PlainModel(model)

    def weights(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Return a copy of every parameter on this device, in its shape, by Hugging Face name; tied parameters appear once."""
        return {
            name: parameter.detach().clone().to(device)
            for name, parameter in self._model.named_parameters()
        }

    def score(self, ids_L: Sequence[int] | np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Return float32 [L − 1]: log-probability, in nats, of every token but the first, given the tokens before it."""
        ids_1L = torch.tensor([[int(token) for token in ids_L]])
        with torch.no_grad():
            logits_LV = self._model(ids_1L, use_cache=False).logits[0] / temperature
        log_probs_LV = logits_LV[:-1].log_softmax(-1)
        chosen_L1 = ids_1L[0, 1:, None]
        return np.asarray(log_probs_LV.gather(-1, chosen_L1)[:, 0].numpy(), dtype=np.float32)

    def log_probs(
        self,
        prompt_ids_P: Sequence[int] | np.ndarray,
        response_ids_T: np.ndarray,
        temperature: float = 1.0,
    ) -> np.ndarray:
        """Return float32 [T]: log-probabilities, in nats, of a response under the full softmax of logits / temperature."""
        if not len(response_ids_T):
            return np.empty(0, dtype=np.float32)
        whole_L = [*prompt_ids_P, *response_ids_T.tolist()]
        return self.score(whole_L, temperature)[len(prompt_ids_P) - 1 :]

    def continued(self, ids_1L: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Return logits [L, V] of L tokens that follow the tokens of a KV cache, and add their keys and values to the cache."""
        return self._model(ids_1L, past_key_values=cache, use_cache=True).logits[0]

    @staticmethod
    def kept_log_probs(
        models: Mapping[int, PlainModel],
        prompt_ids_P: Sequence[int] | np.ndarray,
        response_ids_T: np.ndarray,
        versions_T: np.ndarray,
    ) -> np.ndarray:
        """Return float32 [T], nats: log-probabilities of a response during which the weights changed while the KV cache was kept.

        To score a token, the model of the token's version processes the preceding token with the keys and values computed so far.

        Args:
            models: the models by version.
            prompt_ids_P: token ids of the prompt, which the model of the first token's version processes.
            response_ids_T: token ids of the response, int64.
            versions_T: weight version of each response token, int64, ascending.
        """
        whole_1L = torch.tensor([[*map(int, prompt_ids_P), *response_ids_T.tolist()]])
        cache, begin, logits = DynamicCache(), 0, []
        with torch.no_grad():
            for version in np.unique(versions_T).tolist():
                last = len(prompt_ids_P) + int(np.flatnonzero(versions_T == version)[-1])
                inputs = whole_1L[:, begin:last]
                logits.append(models[version].continued(inputs, cache))
                begin = last
        logits_TV = torch.cat(logits)[len(prompt_ids_P) - 1 :]
        chosen_T1 = whole_1L[0, len(prompt_ids_P) :, None]
        log_probs_T = logits_TV.log_softmax(-1).gather(-1, chosen_T1)[:, 0]
        return np.asarray(log_probs_T.numpy(), dtype=np.float32)

    def behind_T(
        self, prompt_ids_P: Sequence[int] | np.ndarray, response_ids_T: np.ndarray
    ) -> np.ndarray:
        """Return float32 [T], nats: the most likely token's log-probability minus the response token's, at each position."""
        whole_1L = torch.tensor([[*map(int, prompt_ids_P), *response_ids_T.tolist()]])
        with torch.no_grad():
            logits_LV = self._model(whole_1L, use_cache=False).logits[0]
        logits_TV = logits_LV[len(prompt_ids_P) - 1 : -1]
        chosen_T = logits_TV.gather(-1, torch.from_numpy(response_ids_T)[:, None])[:, 0]
        return np.asarray((logits_TV.max(-1).values - chosen_T).numpy(), dtype=np.float32)

    def greedy(self, prompt_ids_P: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
        """Return int64 [count]: the greedy continuation of the prompt."""
        ids_1L = torch.tensor([[int(token) for token in prompt_ids_P]])
        with torch.no_grad():
            for _ in range(count):
                logits_V = self._model(ids_1L, use_cache=False).logits[0, -1]
                ids_1L = torch.cat([ids_1L, logits_V.argmax().view(1, 1)], dim=1)
        return np.asarray(ids_1L[0, len(prompt_ids_P) :].numpy(), dtype=np.int64)
