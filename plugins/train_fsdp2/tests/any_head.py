"""The engine on ranks as it treats models whose logits are more than a product with hidden states: it takes the model's own."""

from __future__ import annotations

from dovetail_train_fsdp2.engine import Fsdp2Engine


class AnyHead(Fsdp2Engine):
    """Whatever the model ends in, it is asked for its logits."""

    def start(self) -> None:
        super().start()
        self._runner._plain_head = False
