"""Checks of the inputs and results of plugins' losses and corrections, which cost nothing on the device.

Only types, shapes and dtypes are checked, never values, which would have to be fetched from the device. T response tokens.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dovetail.errors import PluginBrokenError
from dovetail.interfaces import Correction, PolicyLoss, RolloutCorrection, TokenLosses
from dovetail.metrics import Metric


class DeclaredColumns(dict[str, Float[Tensor, "T *inner"]]):
    """The columns that a policy loss may read, [T] or [T, …] each: those that its `requires()` names, and those that its `prepare` adds.

    Raises:
        PluginBrokenError: the loss reads another column; names the line that reads it.
    """

    def __init__(
        self, columns: Mapping[str, Float[Tensor, "T *inner"]], title: str, loss: PolicyLoss
    ) -> None:
        super().__init__(columns)
        self._title = title
        self._loss = loss

    def __missing__(self, name: str) -> Float[Tensor, "T *inner"]:
        file, line = _place(type(self._loss), "token_losses")
        # The innermost line in the loss's own file, since the loss may read the column through a helper in another file.
        inside = [f.lineno for f in traceback.extract_stack() if f.filename == file]
        raise PluginBrokenError(
            f"{self._title} ({file}:{inside[-1] if inside else line}) reads the column {name!r}, which its requires() "
            f"does not name; it can read {', '.join(sorted(self)) or 'none'}",
            hint=f"add {name!r} to the names that requires() returns, or read one of the columns that it can read",
        )


def check_losses(found: object, like_T: Float[Tensor, "T"], title: str, loss: PolicyLoss) -> None:
    """Check type, shapes and dtypes of the result of `token_losses`.

    Args:
        found: the returned value.
        like_T: float32 [T], the log-probabilities that the plugin got.
        title: the plugin's name in messages.
        loss: the plugin.

    Raises:
        PluginBrokenError: the result is not a TokenLosses, or its losses differ from `like_T` in shape or dtype.
    """
    who = partial(_titled, lambda: title, loss, "token_losses")
    if not isinstance(found, TokenLosses):
        raise PluginBrokenError(
            f"token_losses of {who()} returned {_what(found)}, not TokenLosses",
            hint="return TokenLosses(losses_T=…), with one loss for each response token, before aggregation",
        )
    _check_tensor("losses_T", found.losses_T, like_T, like_T.dtype, who)
    _check_metrics(found.metrics, who)


def check_correction(
    found: object, like_T: Float[Tensor, "T"], correction: RolloutCorrection
) -> None:
    """Check type, shapes and dtypes of the result of `correct`.

    Args:
        found: the returned value.
        like_T: float32 [T], the log-probabilities that the plugin got.
        correction: the plugin.

    Raises:
        PluginBrokenError: the result is not a Correction, or a tensor of it has a wrong shape or dtype.
    """
    from dovetail.plugins import title_of

    title = partial(title_of, "rollout_correction", correction)
    who = partial(_titled, title, correction, "correct")
    if not isinstance(found, Correction):
        raise PluginBrokenError(
            f"correct of {who()} returned {_what(found)}, not Correction",
            hint="return Correction(weights_T=…, keep_T=…, metrics=…); each argument is optional",
        )
    if found.weights_T is not None:
        _check_tensor("weights_T", found.weights_T, like_T, like_T.dtype, who)
    if found.keep_T is not None:
        _check_tensor("keep_T", found.keep_T, like_T, torch.bool, who)
    _check_metrics(found.metrics, who)


def _check_tensor(
    name: str, found: object, like_T: Tensor, dtype: torch.dtype, who: Callable[[], str]
) -> None:
    if not isinstance(found, Tensor) or found.shape != like_T.shape or found.dtype != dtype:
        wanted = f"a {_dtype(dtype)} tensor of shape [{like_T.shape[0]}]"
        raise PluginBrokenError(
            f"{name} of {who()} is {_what(found)}; expected {wanted}",
            hint=f"return {wanted}, with one value for each response token",
        )


def _check_metrics(metrics: object, who: Callable[[], str]) -> None:
    if not isinstance(metrics, Mapping):
        raise PluginBrokenError(
            f"metrics of {who()} are {_what(metrics)}",
            hint="return a mapping of names to metrics",
        )
    for name, metric in metrics.items():
        # `isinstance` of a protocol would be slower, and would check no more than this.
        if not hasattr(metric, "merge"):
            raise PluginBrokenError(
                f"the metric {name!r} of {who()} is {_what(metric)}, which can't be merged over micro-batches",
                hint=f"return an object of {Metric.__module__}, for example one that mean_metric of dovetail_stages makes",
            )


def _titled(title: Callable[[], str], plugin: object, method: str) -> str:
    """Return a plugin's title with the file and line of a method, for messages."""
    file, line = _place(type(plugin), method)
    return f"{title()} ({file}:{line})"


def _what(found: object) -> str:
    if isinstance(found, Tensor):
        return f"a {_dtype(found.dtype)} tensor of shape {list(found.shape)}"
    return "None" if found is None else f"of type {type(found).__name__}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _place(cls: type, method: str) -> tuple[str, int]:
    """Return the file and first line of a plugin's method; the class's module and 0 if the method is not written in Python."""
    code: Any = getattr(inspect.unwrap(getattr(cls, method)), "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code else (cls.__module__, 0)
