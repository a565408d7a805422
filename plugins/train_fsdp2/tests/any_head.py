"""An engine class that uses the model's own logits, as for architectures whose output layer is more than a matrix product."""

from __future__ import annotations

from dovetail_train_fsdp2.engine import Fsdp2Engine


class AnyHead(Fsdp2Engine):
    """Whatever the model ends in, it is asked for its logits."""

    def start(self) -> None:
        super().start()
        self._runner._plain_head = False
