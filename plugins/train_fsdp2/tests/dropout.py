"""An engine class whose model drops out half of its embeddings, as a model with its own code may."""

from __future__ import annotations

from torch.nn.functional import dropout

from dovetail_train_fsdp2.engine import Fsdp2Engine


class WithDropout(Fsdp2Engine):
    """Its model draws from torch's generators in every forward pass."""

    def start(self) -> None:
        super().start()
        embedding = self._runner.trunk.get_input_embeddings()
        embedding.register_forward_hook(lambda module, inputs, states_BTH: dropout(states_BTH))
