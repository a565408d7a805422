"""The form of call that a reward function's parameters need: one sample, lists, or a pair."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import attrs

from dovetail.errors import ConfigError, nearest

Form = Literal["sample", "list", "pair"]
"""The form of a call: one sample, lists over samples, or two responses to compare."""

PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""The parameters of a reward function that `**kwargs` also gets."""
FURTHER = ("prompt", "response_ids", "finish_reason", "trajectory")
"""Parameters that a reward function gets only if its signature names them, not by `**kwargs`."""
_SAMPLE = {name: name for name in (*PARAMETERS, *FURTHER)}
_LIST = {
    **{f"{name}s": name for name in (*PARAMETERS, "prompt", "finish_reason")},
    "responses": "solution_str",
    "response_ids": "response_ids",
    "trajectories": "trajectory",
}
_PAIR = {
    **{name: name for name in ("data_source", "ground_truth", "extra_info", "prompt")},
    "solution_a": "solution_str",
    "solution_b": "solution_str",
}
_TABLES: Mapping[Form, Mapping[str, str]] = {"sample": _SAMPLE, "list": _LIST, "pair": _PAIR}
"""For each form of call, the parameters that a function may have, each with the key of `Sample.arguments` that fills it."""
POSITIONAL_LISTS = "compute_reward"
"""Name of functions that get the lists of responses and ground truths by position, whatever their first two parameters are called."""


@attrs.frozen(kw_only=True)
class Signature:
    """The form in which a reward function is called, and the names of the parameters that are passed by position and by keyword."""

    form: Form
    positional: tuple[str, ...]
    keywords: tuple[str, ...]

    @property
    def fields(self) -> frozenset[str]:
        """Keys of `Sample.arguments` that the function gets."""
        table = _TABLES[self.form]
        return frozenset(table[name] for name in (*self.positional, *self.keywords))

    def field(self, parameter: str) -> str:
        """Return the key of `Sample.arguments` that a parameter is filled from."""
        return _TABLES[self.form][parameter]


def signature_of(function: Callable[..., Any], name: str) -> Signature:
    """Derive a reward function's form of call from its parameters.

    Args:
        function: any callable.
        name: the function's name in messages.

    Raises:
        ConfigError: the function has a required parameter that is not passed to reward functions.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # compiled functions may have no signature
        return Signature(form="sample", positional=(), keywords=PARAMETERS)
    names = {parameter.name for parameter in parameters}
    positional: list[str] = []
    if _takes_positional_lists(function, parameters):
        form: Form = "list"
        positional = ["responses", "ground_truths"]
        parameters = parameters[2:]
    elif {"solution_a", "solution_b"} <= names:
        form = "pair"
    else:
        form = "list" if names & (_LIST.keys() - _SAMPLE.keys()) else "sample"
    keywords: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            keywords += [n for n in _all_of(form) if n not in positional and n not in keywords]
            break
        if parameter.name not in _TABLES[form]:
            if parameter.default is parameter.empty:
                raise _unknown(name, parameter.name, form)
            continue
        chosen = positional if parameter.kind is parameter.POSITIONAL_ONLY else keywords
        chosen.append(parameter.name)
    return Signature(form=form, positional=tuple(positional), keywords=tuple(keywords))


def _takes_positional_lists(
    function: Callable[..., Any], parameters: list[inspect.Parameter]
) -> bool:
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return (
        getattr(function, "__name__", "") == POSITIONAL_LISTS
        and len(parameters) >= 2
        and all(parameter.kind in by_position for parameter in parameters[:2])
        and not {parameter.name for parameter in parameters[:2]} & _SAMPLE.keys()
    )


def _all_of(form: Form) -> Iterable[str]:
    """Return the names of the parameters that `**kwargs` gets in a form of call."""
    if form == "list":
        return tuple(f"{name}s" for name in PARAMETERS)
    if form == "pair":
        return ("solution_a", "solution_b", "data_source", "ground_truth", "extra_info")
    return PARAMETERS


def _unknown(name: str, parameter: str, form: Form) -> ConfigError:
    known = tuple(_TABLES[form])
    close = nearest(parameter, known)
    what = {
        "sample": "reward functions",
        "list": "reward functions on lists",
        "pair": "comparisons",
    }[form]
    problem = f"{name} requires a parameter {parameter!r}, which {what} don't get"
    problem += f"; nearest: {close!r}" if close else f"; they get {', '.join(known)}"
    written = {
        "sample": f"def compute_score({', '.join(PARAMETERS[:3])}, extra_info=None)",
        "list": "def compute_score(data_sources, solution_strs, ground_truths, extra_infos)",
        "pair": "def compare(prompt, solution_a, solution_b, ground_truth)",
    }
    return ConfigError(problem, hint=f"write {written[form]}")
