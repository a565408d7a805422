"""Megatron-Core's warnings: those about its own code are suppressed, others are shown."""

from __future__ import annotations

import warnings

from dovetail_train_megatron.needs import quieten


def test_only_what_concerns_megatron_alone_is_kept_quiet() -> None:
    said = (
        (
            "full scope is deprecated. Use empty cuda_graph_scope",
            "megatron.core.transformer.config",
        ),
        ("TypedStorage is deprecated. It will be removed", "megatron.core.distributed.buffer"),
        ("TypedStorage is deprecated. It will be removed", "another.library"),
        ("set the environment variable CUDA_DEVICE_MAX_CONNECTIONS", "megatron.core.layers"),
    )
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        quieten()
        for number, (text, module) in enumerate(said):
            warnings.warn_explicit(text, UserWarning, f"{module}.py", number, module)
    assert [warning.lineno for warning in heard] == [2, 3]
