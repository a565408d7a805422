"""Suppression of libraries' import messages that a user of a run can't act on."""

from __future__ import annotations

import logging

_DROPPED = {
    "torchao": ("Failed to load ", ".so"),
    "torch.utils._pytree": ("register_constant() on Enum subclasses is deprecated",),
}
"""Logger name → texts; messages that contain all of them are dropped."""


def drop_import_messages() -> None:
    """Suppress torchao's log messages on import; transformers imports torchao if it is installed.

    torchao tries to load C++ extensions of every accelerator and Python version, and registers enums in a way that torch deprecates.
    An operator whose extension is missing raises an error where it is called.
    """
    for name in _DROPPED:
        logging.getLogger(name).addFilter(_is_for_users)


def _is_for_users(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not all(text in message for text in _DROPPED[record.name])
