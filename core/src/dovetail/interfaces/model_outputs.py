"""Checks that a model's engine can compute the requested outputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from dovetail.batch.columns import sizes_of
from dovetail.errors import ConfigError
from dovetail.interfaces.engine import TrainEngine
from dovetail.interfaces.objective import OutputSpec
from dovetail.interfaces.plugin import PluginConfig

_ENDS = {"lm": "a language model's head", "value": "a value head"}
_OTHER: dict[str, Literal["lm", "value"]] = {"lm": "value", "value": "lm"}
_HINTS = {
    "ref_log_probs": "a model gives `ref_log_probs` only with an adapter: set `lora` in the section of the role's engine",
    "values": "`values` come from the role critic",
}


def check_outputs(
    engine: type[TrainEngine],
    config: PluginConfig,
    head: Literal["lm", "value"],
    role: str,
    wanted: Iterable[str | OutputSpec],
    *,
    trained: bool = True,
) -> tuple[OutputSpec, ...]:
    """Return the specs of the outputs wanted from a role's model, in the order of their names.

    Args:
        engine: class of the role's training engine.
        config: the config of the engine.
        head: the last layer of the role's model.
        role: the role of the model.
        wanted: names, or specs to check dtype and shape too. An output whose size the caller chooses needs a spec.
        trained: whether the model is trained.

    Raises:
        ConfigError: the model can't compute an output; the error names the missing and the available outputs.
    """
    specs: dict[str, OutputSpec] = {}
    given = dict(engine.outputs(config, head))
    if not trained:
        # A frozen model has no adapter to turn off, even if the engine's config names one.
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
        spec = found if isinstance(output, str) else output
        if spec.dtype != found.dtype or not _fits(spec.inner, found.inner):
            raise ConfigError(
                f"{who} as {spec.dtype} {_sizes(spec)} for each token; the engine gives {found.dtype} {_sizes(found)}",
                hint=f'choose the size: OUTPUTS["{name}"].sized(8)' if 0 in spec.inner else None,
            )
        if name == "log_probs_at" and len(spec.reads) != 1:
            raise ConfigError(
                f"{who} from the columns {sorted(spec.reads)}; expected one column of token ids",
                hint='name the column: OUTPUTS["log_probs_at"].sized(8, reads={"teacher_top_ids"})',
            )
        if specs.setdefault(name, spec) != spec:
            raise ConfigError(
                f"{who} in two ways at once: as {specs[name]} and as {spec}; expected one"
            )
    top_size(specs.values())
    return tuple(specs.values())


def top_size(outputs: Iterable[OutputSpec]) -> int:
    """Return the K of the outputs `top_ids` and `top_log_probs`: the K most likely tokens at each position. 0 if neither is requested.

    Raises:
        ConfigError: `top_ids` and `top_log_probs` are requested with different sizes.
    """
    sizes = {o.inner[0] for o in outputs if o.name in ("top_ids", "top_log_probs")}
    if len(sizes) > 1:
        raise ConfigError(
            f"top_ids and top_log_probs are requested with the sizes {sorted(sizes)}; expected one size"
        )
    return sizes.pop() if sizes else 0


def _fits(inner: tuple[int, ...], given: tuple[int, ...]) -> bool:
    """Return whether a requested shape is one that the engine can compute.

    Args:
        inner: the requested shape of one token's value; a size of 0 is never allowed.
        given: the shape of the engine's output; 0 stands for a size that the caller chooses.
    """
    return len(inner) == len(given) and all(
        size > 0 and own in (0, size) for size, own in zip(inner, given, strict=True)
    )


def _hint(name: str, role: str, head: Literal["lm", "value"], *, also: bool) -> str | None:
    """Return a hint for an output that a head does not give; `also` says whether a model with the other head gives the output."""
    if role not in ("actor", "critic", "ref"):
        return f"set roles.{role}.head={_OTHER[head]}" if also else _HINTS.get(name)
    if head == "value":
        return f"set {role}.objective to an objective that reads values, or remove {role}.objective"
    return _HINTS.get(name)


def _sizes(output: OutputSpec) -> str:
    return sizes_of(*(size or None for size in output.inner))
