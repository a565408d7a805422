"""Rules about what a run reads and writes: files and trackers named twice, models that can't be loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from dovetail.errors import ModelError
from dovetail.interfaces.preflight import Finding, PreflightRule
from dovetail.planning.model_shape import ModelShape, read_shape
from dovetail.planning.models import ModelRole
from dovetail.planning.plan import Plan
from dovetail.preflight.models import model_directory, stored_tensors
from dovetail.sections import ModelSection, RunConfig


class FileTwice(PreflightRule):
    """A file that is read twice: its rows count double, or what is held out is trained on.

    Held-out figures say nothing of what a model can do where it was trained on the same rows.
    """

    name = "file_twice"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        train, val = config.data.training_files, config.data.val_files
        trained = "data.mixture" if config.data.mixture else "data.train_files"
        for key, files in ((trained, train), ("data.val_files", val)):
            for file in _repeated(files):
                yield self.warning(
                    f"{key} names {file} more than once: its prompts count as often",
                    hint="name it once",
                )
        places = {_place(file) for file in train}
        for file in dict.fromkeys(file for file in val if _place(file) in places):
            yield self.warning(
                f"data.val_files and {trained} both name {file}: validation asks what is trained on",
                hint="set data.val_files= to prompts that are held out",
            )


class TrackerTwice(PreflightRule):
    """One tracker that is asked for twice with the same settings: it would show or write everything twice."""

    name = "tracker_twice"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        trackers = list(config.tracking)
        for number, tracker in enumerate(trackers):
            if tracker in trackers[:number]:
                yield self.error(
                    f"tracking[{number}] is {tracker.name or tracker.path} once more, with the same settings: everything would "
                    "be told twice",
                    hint=f"leave tracking[{number}] out of tracking=",
                )


class ModelMissing(PreflightRule):
    """A model that is not there, or can't be used: without a config that transformers reads, with other weights than it says, or with
    quantised ones that are to be trained, or that the packages here can't load.

    Weights in a directory on this machine are judged by the headers of their files: files that are missing or truncated, tensors
    that are missing or have another shape than config.json gives them. No tensor is read. A policy by its hub id is
    left to be fetched. In runs on several machines a model that is not here may be on the others, hence a warning there.
    """

    name = "model_missing"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        judged: set[str] = set()
        for role in plan.models if plan is not None else ():
            if role.path in judged:
                continue
            judged.add(role.path)
            policy = role.path == config.model.path
            if policy and _may_be_fetched(role.path, config.model):
                continue
            key = "model.path" if policy else f"{role.key}.path"
            try:
                shape = read_shape(config.model, role.path)
            except ModelError as error:
                find = self.error if config.runtime.in_process else self.warning
                cause = error.__cause__
                reason = f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
                instead = "" if policy else ", or leave it out to take model.path"
                hint = f"set {key}= to a directory with config.json, or a hub id{instead}"
                if isinstance(cause, ModelError):
                    reason, hint = cause.message, cause.hint or hint
                elif "trust_remote_code" in str(cause):
                    reason = "it is Python code that comes with the weights"
                    hint = "read that code, then set model.trust_remote_code=true"
                yield find(
                    f"{key} = {role.path} holds no model that transformers can read: {reason}",
                    hint=hint,
                )
                continue
            problem = _weight_problem(role, shape)
            if problem is not None:
                yield self.error(
                    f"{key} = {role.path} can't be loaded: {problem}",
                    hint=f"fetch or export the model again, or set {key}= to another",
                )
            problem = _quantisation_problem(role, shape.quantisation)
            if problem is not None:
                find = self.error if role.moves or config.runtime.in_process else self.warning
                yield find(
                    f"{key} = {role.path} has quantised weights: {problem}",
                    hint=f"set {key}= to the model in full precision",
                )


def _may_be_fetched(path: str, section: ModelSection) -> bool:
    """Whether a path is a hub id of which nothing is here yet."""
    names_a_place = path.startswith(("/", ".", "~")) or path.count("/") > 1
    return not names_a_place and model_directory(path, section) is None


def _weight_problem(role: ModelRole, shape: ModelShape) -> str | None:
    """What is wrong with the weights in a model's directory; None where nothing is, or nothing can be told."""
    directory = Path(role.path).expanduser()
    if not directory.is_dir():
        return None
    try:
        stored = stored_tensors(directory)
    except ModelError as error:
        return error.message
    missing, wrong = [], []
    for weight in shape.weights:
        if role.head == "value" and weight.above_base:
            continue
        name = next((name for name in weight.names if name in stored), None)
        if name is None and weight.required:
            missing.append(weight.names[0])
        elif name is not None and stored[name].shape != weight.shape:
            wrong.append((name, stored[name], weight.shape))
    if wrong:
        name, tensor, expected = wrong[0]
        return (
            f"{name} in {tensor.file} has the shape {list(tensor.shape)}; expected {list(expected)} by config.json"
            f"{_and_more(wrong)}"
        )
    if missing:
        return f"no file of {directory} has {missing[0]}, which its config.json asks for{_and_more(missing)}"
    return None


def _quantisation_problem(role: ModelRole, given: Any) -> str | None:
    """Why a model with this `quantization_config` can't be used; None where it can, or where transformers heeds none."""
    from transformers.quantizers import AutoHfQuantizer

    if given is None or not AutoHfQuantizer.supports_quant_method(given):
        return None
    if role.moves:
        return "those of a model that is trained have to be stored in full precision"
    try:
        quantizer = AutoHfQuantizer.from_config(deepcopy(given), pre_quantized=True)
        quantizer.validate_environment(device_map=None)
    except Exception as error:  # noqa: BLE001 - every method of quantisation has errors of its own
        return str(error).partition("\n")[0]
    return None


def _and_more(found: Sequence[object]) -> str:
    return f" (and {len(found) - 1} more tensors)" if len(found) > 1 else ""


def _repeated(files: tuple[str, ...]) -> list[str]:
    """Those that are named again, each once, as they are first written."""
    counts = Counter(_place(file) for file in files)
    first = {_place(file): file for file in reversed(files)}
    return [first[place] for place, count in counts.items() if count > 1]


def _place(file: str) -> Path | str:
    """The file itself, however it is written; an address stays as it is."""
    return file if "://" in file else Path(file).expanduser().resolve()
