"""Test doubles and tiny models for plugin authors. Names load on first use, so that nothing heavy is imported unasked."""

from __future__ import annotations

import importlib

_HOME = {
    "failing_reward": (
        "FAILURES",
        "LIST_FAILURES",
        "PROCESS_FAILURES",
        "release_hung",
        "reward_that_fails",
    ),
    "fake_server": ("FakeServer",),
    "groups": ("SimulatedGroup",),
    "processes": ("ProcessRanks", "Rank"),
    "replicas": ("replica_context", "send_weights"),
    "resumed": ("resumed_state",),
    "table_engine": ("TableEngine",),
    "temporary": ("temporary_plugins",),
    "tiny": ("tiny_model", "tiny_model_and_tokenizer", "tiny_tokenizer"),
    "tiny_vision": ("square", "tiny_vision_model"),
    "transport_ends": ("TransportEnd", "TransportPlace"),
    "scripted_rollout": ("Script", "ScriptedRollout"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 - computed from the table above


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
