"""What is asked of a model: whether its engine gives it, and the columns that it is computed from.

Legend: N samples, T response tokens, K words.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np

from dovetail.batch.batch import Batch
from dovetail.batch.columns import sizes_of
from dovetail.errors import ColumnError, ConfigError
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
) -> tuple[OutputSpec, ...]:
    """Return what is asked of the model of a role, each output as a spec, in the order of their names.

    Args:
        engine: class of the role's training engine.
        config: of the engine.
        head: what the role's model ends in.
        role: of the model.
        wanted: names, or specs where dtype and shape must fit, too. What the engine gives in a size to choose needs a spec.
        trained: whether the model is trained.

    Raises:
        ConfigError: the model can't give one of them; names the output, and what there is.
    """
    specs: dict[str, OutputSpec] = {}
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
        spec = found if isinstance(output, str) else output
        if spec.dtype != found.dtype or not _fits(spec.inner, found.inner):
            raise ConfigError(
                f"{who} as {spec.dtype} {_sizes(spec)} a token; it gives {found.dtype} {_sizes(found)}",
                hint=f'choose the size: OUTPUTS["{name}"].sized(8)' if 0 in spec.inner else None,
            )
        if name == "log_probs_at" and len(spec.reads) != 1:
            raise ConfigError(
                f"{who} from the columns {sorted(spec.reads)}; expected one column of word ids",
                hint='name it: OUTPUTS["log_probs_at"].sized(8, reads={"teacher_top_ids"})',
            )
        if specs.setdefault(name, spec) != spec:
            raise ConfigError(f"{who} in two ways at once: as {specs[name]} and as {spec}")
    top_size(specs.values())
    return tuple(specs.values())


def check_reads(batch: Batch, outputs: Iterable[OutputSpec], vocabulary: int) -> None:
    """Check the columns that outputs are computed from, besides those that every forward pass reads.

    Args:
        batch: N samples.
        outputs: as `check_outputs` returned them.
        vocabulary: words that the model has.

    Raises:
        ColumnError: one is missing, does not line up with the response tokens, or holds no ids of words.
        ConfigError: more words are asked for than there are.
    """
    for output in outputs:
        if output.inner and (count := output.inner[0]) > vocabulary:
            raise ConfigError(
                f"{output.name} of {count} words a token is asked of a model with {vocabulary}",
                hint=f"ask for {vocabulary} at most",
            )
        if output.name == "log_probs_at":
            _check_ids(batch, output, vocabulary)


def columns_read(outputs: Iterable[OutputSpec]) -> list[str]:
    """Return the columns that outputs are computed from, besides those that every forward pass reads, in order."""
    return sorted(set().union(*(output.reads for output in outputs)))


def read_at(
    micro_batch: Batch, token_R: np.ndarray, outputs: Iterable[OutputSpec]
) -> dict[str, np.ndarray]:
    """Return those columns at the scored tokens, [R, …] each; integers as int64.

    Args:
        micro_batch: with those columns, ragged over response tokens.
        token_R: int64 [R], positions of the scored tokens.
        outputs: as `check_outputs` returned them.
    """
    found = {name: micro_batch[name].values[token_R] for name in columns_read(outputs)}
    return {n: x.astype(np.int64) if x.dtype.kind in "iu" else x for n, x in found.items()}


def empty_columns(tokens: int, outputs: Iterable[OutputSpec]) -> dict[str, np.ndarray]:
    """Return zeros for each output by name, [T, …] of its dtype and inner shape."""
    return {o.name: np.zeros((tokens, *o.inner), o.dtype) for o in outputs}


def top_size(outputs: Iterable[OutputSpec]) -> int:
    """Return how many of the most likely words are asked for, K; 0 where none are.

    Raises:
        ConfigError: `top_ids` and `top_log_probs` are asked for in different sizes.
    """
    sizes = {o.inner[0] for o in outputs if o.name in ("top_ids", "top_log_probs")}
    if len(sizes) > 1:
        raise ConfigError(
            f"top_ids and top_log_probs are asked for in the sizes {sorted(sizes)}; expected one size"
        )
    return sizes.pop() if sizes else 0


def ids_column(outputs: Iterable[OutputSpec]) -> str | None:
    """Return the column of word ids at which log-probabilities are asked for; None where they are not."""
    return next((next(iter(o.reads)) for o in outputs if o.name == "log_probs_at"), None)


def _check_ids(batch: Batch, output: OutputSpec, vocabulary: int) -> None:
    (name,) = output.reads
    batch.require([name], f"the output {output.name!r}")
    ids, mask = batch[name], batch["response_mask"]
    if ids.dtype.kind not in "iu" or ids.inner != output.inner:
        raise ColumnError(
            f"{name} holds {ids.dtype} {sizes_of('T', *ids.inner)}; expected integers {sizes_of('T', *output.inner)}"
        )
    if not np.array_equal(ids.offsets, mask.offsets):
        raise ColumnError(f"{name} does not line up with response_ids")
    wrong = ids.values[mask.values.astype(bool)]
    wrong = wrong[(wrong < 0) | (wrong >= vocabulary)]
    if wrong.size:
        raise ColumnError(
            f"{name} holds the word {wrong[0]}, and the model has {vocabulary}",
            hint="score with models of one vocabulary",
        )


def _fits(inner: tuple[int, ...], given: tuple[int, ...]) -> bool:
    """Whether a shape that is asked for has all its sizes, and those that are given."""
    return len(inner) == len(given) and all(
        size > 0 and own in (0, size) for size, own in zip(inner, given, strict=True)
    )


def _hint(name: str, role: str, head: Literal["lm", "value"], *, also: bool) -> str | None:
    """What to do about an output that a head does not give; `also` says whether the other head does."""
    if role not in ("actor", "critic", "ref"):
        return f"set roles.{role}.head={_OTHER[head]}" if also else _HINTS.get(name)
    if head == "value":
        return f"choose an objective of values for {role}.objective, or leave it out"
    return _HINTS.get(name)


def _sizes(output: OutputSpec) -> str:
    return sizes_of(*(size or None for size in output.inner))
