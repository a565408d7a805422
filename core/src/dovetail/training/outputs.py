"""check_outputs: whether an engine gives what an objective or a stage asks of a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from dovetail.errors import ConfigError
from dovetail.interfaces.engine import TrainEngine
from dovetail.interfaces.objective import OutputSpec
from dovetail.interfaces.plugin import PluginConfig

_ENDS = {"lm": "a language model's head", "value": "a value head"}
_OTHER: dict[str, Literal["lm", "value"]] = {"lm": "value", "value": "lm"}
_HINTS = {
    "ref_log_probs": "it scores as its own reference only with lora in its engine's section",
    "values": "values come from the role critic",
}


def check_outputs(
    engine: type[TrainEngine],
    config: PluginConfig,
    head: Literal["lm", "value"],
    role: str,
    wanted: Iterable[str | OutputSpec],
    *,
    trained: bool = True,
) -> None:
    """Refuse outputs that the model of a role can't give.

    Args:
        engine: class of the role's training engine.
        config: of the engine.
        head: what the role's model ends in.
        role: of the model.
        wanted: names, or specs where dtype and shape must fit, too.
        trained: whether the model is trained.

    Raises:
        ConfigError: names the output, and what there is.
    """
    given = dict(engine.outputs(config, head))
    if not trained:
        # It is scored without an adapter, whatever the config of the engine that it shares.
        given.pop("ref_log_probs", None)
    for output in sorted(wanted, key=lambda one: one if isinstance(one, str) else one.name):
        name = output if isinstance(output, str) else output.name
        who = f"engine {engine.name!r} of role {role!r} can't compute {name!r}"
        if name not in given:
            raise ConfigError(
                f"{who}: its model ends in {_ENDS[head]}, which gives {', '.join(sorted(given))}",
                hint=_hint(name, role, head, also=name in engine.outputs(config, _OTHER[head])),
            )
        found = given[name]
        if isinstance(output, OutputSpec) and (found.dtype, found.inner) != (
            output.dtype,
            output.inner,
        ):
            raise ConfigError(
                f"{who} as {output.dtype} {list(output.inner)} a token; it gives {found.dtype} {list(found.inner)}"
            )


def _hint(name: str, role: str, head: Literal["lm", "value"], *, also: bool) -> str | None:
    """What to do about an output that a head does not give; `also` says whether the other head does."""
    if role not in ("actor", "critic", "ref"):
        return f"set roles.{role}.head={_OTHER[head]}" if also else _HINTS.get(name)
    if head == "value":
        return f"choose an objective of values for {role}.objective, or leave it out"
    return _HINTS.get(name)
