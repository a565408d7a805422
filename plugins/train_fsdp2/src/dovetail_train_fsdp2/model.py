"""Loading a causal language model from a directory or the hub, with errors that say what is missing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from dovetail.errors import ConfigError, ModelError
from dovetail.sections import ModelSection
from dovetail_datasets import model_class, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", "*.index.json")


def load_model(section: ModelSection, device: torch.device) -> PreTrainedModel:
    """Load any Hugging Face causal language model or vision-language model, with float32 weights and without dropout.

    Raises:
        ModelError: the model's files can't be found or downloaded, or the model is not a causal language model.
    """
    model, missing = _from_pretrained(section)
    _check_complete(section, missing)
    # eval() turns off dropout, also for training: log-probabilities must be those that the policy sampled from.
    return model.to(device).eval()


def load_trunk(section: ModelSection, device: torch.device) -> PreTrainedModel:
    """Load a causal language model, or a classifier of the same family, without its head.

    Raises:
        ModelError: the model can't be loaded, as for `load_model`; a missing head is no error.
    """
    model, missing = _from_pretrained(section)
    trunk = base_of(model)
    below = f"{model.base_model_prefix}."
    _check_complete(section, [name for name in missing if name.startswith(below)])
    return trunk.to(device).eval()


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a causal language model that computes hidden states, without the head.

    Raises:
        ModelError: the base can't be identified.
    """
    trunk: PreTrainedModel = model.base_model
    if trunk is model:
        raise ModelError(
            f"the architecture {type(model).__name__} can't be a value model: its base and its head are not separate",
            hint="set critic.path to another model",
        )
    return trunk


def empty_model(section: ModelSection) -> PreTrainedModel:
    """Build the causal language model of a checkpoint without its weights: float32 parameters on the meta device.

    Buffers (rotary frequencies, masks) are real, on the CPU: checkpoints do not hold them.

    Raises:
        ModelError: the config can't be found or downloaded, or is not of a causal language model.
    """
    _check_directory(section.path)
    return described_model(section)


def described_model(section: ModelSection, *, classifier: bool = False) -> PreTrainedModel:
    """Build the model of a directory's config without weights, as `empty_model` does.

    Args:
        section: the config section with the directory.
        classifier: whether to build a token classifier instead of a causal language model.

    Raises:
        ModelError: the model can't be built.
    """
    from transformers import AutoModelForTokenClassification, GenerationConfig

    try:
        with quietly(), _parameters_on_meta():
            config = read_config(section)
            auto = AutoModelForTokenClassification if classifier else model_class(config)
            model: PreTrainedModel = auto.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=section.attn_implementation,
                trust_remote_code=section.trust_remote_code,
            )
        # Without such a file, the settings for generation in the model's config remain.
        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(
                str(Path(section.path).expanduser()), revision=section.revision
            )
    except ConfigError:
        raise
    except Exception as error:  # transformers raises errors of any class
        raise _unloadable(section, error) from error
    return model.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put all parameters that modules of this thread register within the block on the meta device; tied parameters stay tied."""
    from torch.nn.modules.module import register_module_parameter_registration_hook

    thread = threading.get_ident()

    def to_meta(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if threading.get_ident() != thread or parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(cast("Any", to_meta))
    try:
        yield
    finally:
        handle.remove()


def _from_pretrained(section: ModelSection) -> tuple[PreTrainedModel, list[str]]:
    """Return the model in float32, and the names of the weights that the checkpoint lacks."""
    _check_directory(section.path)
    model: PreTrainedModel
    try:
        with quietly():
            config = read_config(section)
            model, found = model_class(config).from_pretrained(
                str(Path(section.path).expanduser()),
                config=config,
                dtype=torch.float32,
                attn_implementation=section.attn_implementation,
                trust_remote_code=section.trust_remote_code,
                revision=section.revision,
                output_loading_info=True,
            )
    except ConfigError:
        raise
    except Exception as error:  # transformers raises errors of any class
        raise _unloadable(section, error) from error
    return model, sorted(found["missing_keys"])


def _check_complete(section: ModelSection, missing: list[str]) -> None:
    if missing:
        # transformers would fill in random numbers.
        raise ModelError(
            f"model {section.path!r} lacks {len(missing)} of its weights, such as {missing[0]!r}",
            hint="use a complete causal language model: fetch or export the model again",
        )


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress transformers' progress bar and load report within the block, if the run has its own display.

    The problems of which the report warns are checked after loading.
    """
    from transformers.utils import logging

    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


def _check_directory(path: str) -> None:
    """Check that a path is a model directory or may be a hub id; transformers' own error for a missing directory mentions only the hub.

    Raises:
        ModelError: the path is a file, a directory without config or weights, or a path that does not exist.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ModelError(
                f"model directory {path!r} has no config.json",
                hint="name a directory in Hugging Face format, as save_pretrained writes it",
            )
        if not any(any(directory.glob(pattern)) for pattern in WEIGHT_FILES):
            raise ModelError(
                f"model directory {path!r} has no weights (model.safetensors)",
                hint="the download may be incomplete: fetch the model again",
            )
    elif directory.is_file():
        raise ModelError(
            f"the model path {path!r} is a file; expected a directory",
            hint="name the directory that holds config.json",
        )
    elif path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise ModelError(
            f"model directory {path!r} does not exist",
            hint="check model.path (or critic.path, ref.path); a relative path starts in the directory where the command runs",
        )


def _unloadable(section: ModelSection, error: Exception) -> ModelError:
    return ModelError(
        f"model {section.path!r} can't be loaded: {_first_lines(error)}", hint=_hint(section)
    )


def _hint(section: ModelSection) -> str | None:
    if Path(section.path).expanduser().is_dir():
        return None
    return (
        f"there is no directory {section.path!r}, so it was taken for a hub id; "
        "download the model and set model.path to its directory, or check the name and the network"
    )


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
