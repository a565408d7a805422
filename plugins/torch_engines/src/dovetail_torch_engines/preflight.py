"""Preflight rules about the models of a run: whether their files exist and fit, and which layers adapters target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError, ModelError, nearest
from dovetail.interfaces import Finding, ModelShape
from dovetail.planning import ModelRole, Plan
from dovetail.sections import ModelSection, RunConfig
from dovetail_datasets import model_directory, read_shape
from dovetail_torch_engines.adapter import no_matrix, shared_weight
from dovetail_torch_engines.stored import FILES, read_index, unpickled


def model_missing(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Report a model that is missing or can't be used.

    The rule reports three cases: transformers can't read the model's config; the weights differ from the config; or the weights are
    quantised, and the run trains the model or the installed packages can't load quantised weights of this kind.

    For a local directory, the rule reads the headers of the weight files, not the tensors. It reports missing or truncated files,
    and tensors that are missing or whose shape differs from config.json. A policy named by a hub id is downloaded later. In runs on
    several machines a model missing on this machine is only a warning: other machines may have it.
    """
    judged: list[ModelSection] = []
    for role in plan.models if plan is not None else ():
        section = config.model_section(role.role)
        if section in judged:
            continue
        judged.append(section)
        policy = role.path == config.model.path
        if policy and _may_be_fetched(role.path, config.model):
            continue
        key = "model.path" if policy else f"{role.key}.path"
        try:
            shape = read_shape(section)
        except ConfigError as error:
            own = getattr(config.role_sections[role.role], "override_config", None)
            whose = "model" if own is None else role.key
            yield Finding.error(f"{whose}.{error.message}", hint=error.hint)
            continue
        except ModelError as error:
            find = Finding.error if config.runtime.in_process else Finding.warning
            cause = error.__cause__
            reason = f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
            instead = "" if policy else ", or leave it out to use model.path"
            hint = f"set {key}= to a directory with config.json or to a hub id{instead}"
            if isinstance(cause, ModelError):
                reason, hint = cause.message, cause.hint or hint
            elif "trust_remote_code" in str(cause):
                reason = "its architecture is Python code that comes with the weights"
                hint = "read that code; if you trust it, set model.trust_remote_code=true"
            yield find(
                f"{key} = {role.path} holds no model that transformers can read: {reason}",
                hint=hint,
            )
            continue
        problem = _weight_problem(role, shape)
        if problem is not None:
            yield Finding.error(
                f"{key} = {role.path} can't be loaded: {problem}",
                hint=f"fetch or export the model again, or set {key}= to another",
            )
        problem = _quantisation_problem(role, shape.quantisation)
        if problem is not None:
            find = Finding.error if role.moves or config.runtime.in_process else Finding.warning
            yield find(
                f"{key} = {role.path} has quantised weights: {problem}",
                hint=f"set {key}= to the same model in full precision",
            )


def _may_be_fetched(path: str, section: ModelSection) -> bool:
    """Return whether a path is a hub id that has not been downloaded."""
    names_a_place = path.startswith(("/", ".", "~")) or path.count("/") > 1
    return not names_a_place and model_directory(path, section) is None


def _weight_problem(role: ModelRole, shape: ModelShape) -> str | None:
    """Return what is wrong with the weights in a model's directory; None if nothing is, or if the path is no directory."""
    directory = Path(role.path).expanduser()
    if not directory.is_dir():
        return None
    try:
        stored = _stored(directory)
    except ModelError as error:
        return error.message
    missing, wrong = [], []
    for weight in shape.weights:
        if role.head == "value" and weight.above_base:
            continue
        name = next((name for name in weight.names if name in stored), None)
        if name is None and weight.required:
            missing.append(weight.names[0])
        elif name is not None and stored[name][1] != weight.shape:
            wrong.append((name, stored[name], weight.shape))
    if wrong:
        name, (file, shape_there), expected = wrong[0]
        return (
            f"the tensor {name} in {file} has the shape {list(shape_there)}; config.json requires {list(expected)}"
            f"{_and_more(wrong)}"
        )
    if missing:
        return f"the files in {directory} lack the tensor {missing[0]}, which config.json requires{_and_more(missing)}"
    return None


def _quantisation_problem(role: ModelRole, given: Any) -> str | None:
    """Return why a model with this `quantization_config` can't be used; None if it can, or if transformers ignores the config."""
    from transformers.quantizers import AutoHfQuantizer

    if given is None or not AutoHfQuantizer.supports_quant_method(given):
        return None
    if role.moves:
        return "a model that is trained must be stored in full precision"
    try:
        quantizer = AutoHfQuantizer.from_config(deepcopy(given), pre_quantized=True)
        quantizer.validate_environment(device_map=None)
    except Exception as error:  # noqa: BLE001 - every method of quantisation has errors of its own
        return str(error).partition("\n")[0]
    return None


def _and_more(found: Sequence[object]) -> str:
    return f" (and {len(found) - 1} more)" if len(found) > 1 else ""


def adapter_targets(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    """Report an error if an adapter targets layers that the model does not have, or that can't have an adapter.

    The model's config gives the layers and the weights that layers share. If this machine can't read the model, the engine checks
    the targets.
    """
    told: set[str] = set()
    for role in plan.models if plan is not None else ():
        planned = role.adapter
        for target in planned.target_modules if planned is not None else ():
            try:
                shape = read_shape(config.model_section(role.role))
            except ModelError:
                break
            problem = _problem(target, shape, role)
            if problem is None:
                continue
            message = f"{_section(plan, role)}: {problem.message}"
            if message not in told:
                told.add(message)
                yield Finding.error(message, hint=problem.hint)


def _problem(target: str, shape: ModelShape, role: ModelRole) -> ConfigError | None:
    """Return what is wrong with one target of an adapter, as the error that engines raise."""
    named = sorted(shape.matching(target))
    if not named:
        return ConfigError(
            f"lora.target_modules names {target!r}, but the model {role.path} has no module of that name",
            hint=_layers(target, shape),
        )
    for name in named:
        if name not in shape.matrices:
            linear = [n for n, layer in shape.layers.items() if layer.linear]
            return no_matrix(target, name, linear)
        # A value head replaces the output layer, so that the embedding's weight is not shared.
        if role.head == "lm" and name in shape.layers and shape.layers[name].shared:
            return shared_weight(name)
    return None


def _section(plan: Plan | None, role: ModelRole) -> str:
    """Return the key path that selects a role's engine."""
    own = f"{role.key}.engine"
    return own if plan is not None and own in plan.refs else "actor.engine"


def _layers(target: str, shape: ModelShape) -> str:
    known = sorted({name.rpartition(".")[2] for name in shape.layers})
    near = nearest(target.rpartition(".")[2], known)
    return (
        f"did you mean {near!r}? " if near else ""
    ) + f"The model's layers are {', '.join(known)}"


def _stored(directory: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Return the file and shape of every tensor of a model, by the tensor's name: from the headers of safetensors, or from pickled files.

    Raises:
        ModelError: there are no weights, or a file is missing, truncated or lacks a tensor that the index assigns to it.
    """
    name = next((name for name in FILES if (directory / name).is_file()), None)
    if name is None:
        raise ModelError(
            f"the directory {directory} has no weights; expected a file {FILES[1]} or {FILES[0]}"
        )
    file = directory / name
    if file.suffix != ".json":
        return {tensor: (file, shape) for tensor, shape in _shapes(file).items()}
    places = read_index(file)
    parts = {part: _shapes(directory / part) for part in sorted(set(places.values()))}
    for tensor, part in places.items():
        if tensor not in parts[part]:
            raise ModelError(
                f"the file {directory / part} lacks the tensor {tensor}, which {file.name} assigns to it"
            )
    return {tensor: (directory / part, parts[part][tensor]) for tensor, part in places.items()}


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    if file.suffix != ".safetensors":
        return {name: tuple(tensor.shape) for name, tensor in unpickled(file).items()}
    try:
        size = file.stat().st_size
        with safe_open(file, framework="np") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in list(opened.keys())}
    except OSError as error:
        raise ModelError(f"the file {file} can't be read: {error.strerror}") from error
    except SafetensorError as error:
        raise ModelError(
            f"the file {file} ({size:,} bytes) is truncated or is not a safetensors file: {error}"
        ) from error
