"""Conversion of a checkpoint of verl's FSDP workers to a Hugging Face model, tensor by tensor and without a process group.

    model_world_size_W_rank_R.pt    each rank's part of the state dict: DTensors, or plain tensors if unsharded
    huggingface/                    config, generation config, tokenizer
    lora_adapter/                   adapter_config.json of a LoRA run; its matrices are also in the state dicts

Only tensors are unpickled. Stand-ins record the meshes and placements of DTensors; every other class is refused.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.serialization import (
    add_safe_globals,
    clear_safe_globals,
    get_safe_globals,
    get_unsafe_globals_in_checkpoint,
    safe_globals,
)

from dovetail.errors import CheckpointError
from dovetail.sections import ModelSection
from dovetail_torch_engines import SafetensorsWriter
from dovetail_train_fsdp2.loading import tensors_of
from dovetail_train_fsdp2.model import WEIGHT_FILES, described_model
from dovetail_train_fsdp2.weights import stored

LATEST = "latest_checkpointed_iteration.txt"
_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_RECORDED = (
    "torch.distributed.device_mesh.",
    "torch.distributed._mesh_layout.",
    "torch.distributed.tensor.",
    "torch.distributed._tensor.",
)
"""Beginnings of the full names of the classes in a DTensor's pickle, in this and earlier versions of PyTorch."""
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
_PEFT = "base_model.model."


def checkpoint_in(path: Path) -> Path | None:
    """Return the folder with verl's rank files: the path itself, its folder `actor`, or that of the latest step; None if there is none.

    Raises:
        CheckpointError: a file in `path` names the latest step, but that step has no rank files.
    """
    if (path / LATEST).is_file():
        step = (path / LATEST).read_text().strip()
        found = checkpoint_in(path / f"global_step_{step}")
        if found is None:
            raise CheckpointError(
                f"the file {path / LATEST} names step {step}, but {path}/global_step_{step} has no model_world_size_*.pt",
                hint="name the folder of another step",
            )
        return found
    for folder in (path, path / "actor"):
        if any(folder.glob("model_world_size_*_rank_*.pt")):
            return folder
    return None


def export_verl(folder: Path, directory: Path) -> None:
    """Write verl's model in Hugging Face format, in the dtype of its saved weights, with LoRA merged and the files of `huggingface/`.

    At most one file's tensors are in memory.

    Args:
        folder: the folder with verl's rank files, as `checkpoint_in` returns it.
        directory: the directory to write the model to.

    Raises:
        CheckpointError: a file is missing, damaged or not a file of tensors, or the directory can't be written.
        ModelError: the model that `huggingface/` describes can't be built.
    """
    described = folder / "huggingface"
    if not (described / "config.json").is_file():
        raise CheckpointError(
            f"the folder {folder} has no huggingface/config.json",
            hint="copy the config and the tokenizer of the trained model to huggingface/",
        )
    ranks = [_loaded(file) for file in _files(folder)]
    saved = _Saved(folder, ranks)
    classifier = "score.weight" in saved.shapes
    model = described_model(ModelSection(path=str(described)), classifier=classifier)
    in_memory = tensors_of(model)
    empty = {
        name: torch.empty(tuple(tensor.shape), dtype=saved.dtype, device="meta")
        for name, tensor in in_memory.items()
    }
    aliases = model.state_dict().keys() - in_memory.keys()
    for name in aliases & saved.shapes.keys():
        saved.drop_alias(name, model)
    converted = dict(stored(model, empty.items(), empty))
    in_files = saved.shapes.keys() == converted.keys()
    _check(folder, saved.shapes, converted if in_files else empty)
    tensors = ((name, saved.whole(name)) for name in (converted if in_files else empty))
    writer = SafetensorsWriter(directory, "model")
    for name, tensor in tensors if in_files else stored(model, tensors, empty):
        writer.add(name, tensor)
    try:
        shutil.copytree(
            described, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*WEIGHT_FILES)
        )
        config = json.loads((described / "config.json").read_text())
        config.pop("torch_dtype", None)
        config |= {
            "architectures": [type(model).__name__],
            "dtype": str(saved.dtype).removeprefix("torch."),
        }
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    except (OSError, shutil.Error) as error:
        raise CheckpointError(
            f"the model can't be exported to {directory}: {error}",
            hint="see that there is room on the disk",
        ) from error
    writer.finish_model()


class _Recorded:
    """Stand-in for an object in a DTensor's pickle, which keeps the object's arguments or state and runs nothing."""

    def __new__(cls, *args: object) -> Self:
        made = super().__new__(cls)
        made.state = args
        return made

    state: Any

    def __setstate__(self, state: object) -> None:
        self.state = state

    def field(self, name: str, position: int) -> Any:
        """Return a field, by its name in the state or its position among the arguments."""
        return self.state[name] if isinstance(self.state, dict) else self.state[position]


def _files(folder: Path) -> list[Path]:
    """Return every rank's file, in order of ranks."""
    found = {
        tuple(map(int, match.groups())): file
        for file in folder.iterdir()
        if (match := _FILE.fullmatch(file.name))
    }
    sizes = sorted({size for size, _ in found})
    if len(sizes) > 1:
        raise CheckpointError(
            f"the folder {folder} holds files of the world sizes {', '.join(map(str, sizes))}; expected one world size",
            hint="move the files of the older save away",
        )
    expected = [(sizes[0], rank) for rank in range(sizes[0])]
    lacking = [rank for size, rank in expected if (size, rank) not in found]
    if lacking or len(found) > len(expected):
        wrong = (
            f"lacks the file of rank {lacking[0]}"
            if lacking
            else f"has a file of rank {max(r for _, r in found)}"
        )
        raise CheckpointError(
            f"the folder {folder} {wrong}; expected ranks 0 to {sizes[0] - 1} (world size {sizes[0]})",
            hint="copy the files of all ranks into one folder",
        )
    return [found[key] for key in expected]


def _loaded(file: Path) -> dict[str, Tensor]:
    """Load a rank's state dict, with tensors that are memory-mapped from the file; only tensors are unpickled.

    Raises:
        CheckpointError: the file can't be read, or holds something other than tensors by name.
    """
    before = get_safe_globals()
    # Cleared, because classes that other code marked as safe would be unpickled, or replace stand-ins.
    clear_safe_globals()
    try:
        named = get_unsafe_globals_in_checkpoint(file)
        foreign = sorted(name for name in named if not name.startswith(_RECORDED))
        if foreign:
            raise CheckpointError(
                f"the file {file} holds {foreign[0]}, which is not a tensor; nothing was unpickled",
                hint="use an unchanged FSDP checkpoint of verl"
                if "ShardedTensor" not in foreign[0]
                else "convert the checkpoint with verl: FSDP saved it without a device mesh",
            )
        allowed: list[Any] = [(_stand_in(name), name) for name in named]
        with safe_globals(allowed):
            state = torch.load(file, weights_only=True, mmap=True, map_location="cpu")
    except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"the file {file} can't be read: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            hint="the file is damaged or incomplete: copy it again",
        ) from error
    finally:
        clear_safe_globals()
        add_safe_globals(before)
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise CheckpointError(
            f"the file {file} holds no mapping of names to tensors; expected one, as in an unchanged FSDP checkpoint of verl"
        )
    return {_unwrapped(name): tensor for name, tensor in state.items()}


def _stand_in(name: str) -> type:
    last = name.rpartition(".")[2]
    # torch's own DTensor class is used: an instance has only a shape, until it computes.
    return DTensor if last == "DTensor" else type(last, (_Recorded,), {})


def _unwrapped(name: str) -> str:
    """Return a tensor's name in the model, without the wrappers of FSDP and peft."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    name = name.removeprefix(_PEFT).replace(".base_layer.", ".")
    return name.replace(".modules_to_save.default.", ".")


class _Saved:
    """The model's tensors, assembled from all ranks' state dicts.

    Attributes:
        shapes: the shapes of the assembled tensors by name, without those of an adapter.
        dtype: the dtype of the weights.
    """

    def __init__(self, folder: Path, ranks: list[dict[str, Tensor]]) -> None:
        self._folder, self._ranks = folder, ranks
        first = ranks[0]
        for rank, state in enumerate(ranks):
            if state.keys() != first.keys():
                name = min(state.keys() ^ first.keys())
                raise CheckpointError(
                    f"the folder {folder} mixes saves: of the files of ranks 0 and {rank}, only one holds the tensor {name!r}",
                    hint="copy all ranks' files from the same save",
                )
        names = [name for name in first if ".original_module." not in name]
        adapter = [name for name in names if ".lora_" in name]
        odd = [n for n in adapter if not n.endswith((".lora_A.default.weight", ".lora_B.default.weight"))]  # fmt: skip
        odd += [name for name in names if name.startswith(("v_head.", "pretrained_model."))]
        if odd:
            raise CheckpointError(
                f"the folder {folder} holds the tensor {odd[0]!r}, which can't be exported to Hugging Face format",
                hint="use a checkpoint whose LoRA adapters are all of linear layers, or a critic that was saved as a token classifier",
            )
        self._scale = self._lora_scale() if adapter else None
        self.shapes = {name: tuple(first[name].shape) for name in names if name not in adapter}
        dtypes = {first[name].dtype for name in self.shapes if first[name].dtype.is_floating_point}
        if len(dtypes) != 1:
            raise CheckpointError(
                f"the folder {folder} holds weights of {len(dtypes)} dtypes ({', '.join(sorted(map(str, dtypes))) or 'none'}); "
                "expected one floating-point dtype"
            )
        (self.dtype,) = dtypes

    def drop_alias(self, name: str, model: torch.nn.Module) -> None:
        """Leave out a tensor that the config ties to another one, after checking that both are equal."""
        state = model.state_dict(keep_vars=True)
        same = next(n for n in state if n != name and state[n] is state[name])
        if same in self.shapes and not torch.equal(self.whole(name), self.whole(same)):
            raise CheckpointError(
                f"the tensors {name!r} and {same!r} in {self._folder} differ, but the config ties them",
                hint="set tie_word_embeddings to false in huggingface/config.json",
            )
        if same in self.shapes:
            del self.shapes[name]

    def whole(self, name: str) -> Tensor:
        """Return a tensor assembled over all ranks, with its LoRA update merged."""
        tensor = self._merged(name)
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.default.weight" not in self._ranks[0]:
            return tensor
        assert self._scale is not None
        a_RI, b_OR = (
            self._merged(f"{layer}.lora_{kind}.default.weight").float() for kind in ("A", "B")
        )
        scale = self._scale(len(a_RI))
        merged: Tensor = tensor.float() + scale * (b_OR @ a_RI)
        return merged.to(tensor.dtype)

    def _merged(self, name: str) -> Tensor:
        parts = [state[name] for state in self._ranks]
        first = parts[0]
        if not isinstance(first, DTensor):
            if not all(torch.equal(first, part) for part in parts[1:]):
                raise CheckpointError(
                    f"the unsharded tensor {name!r} in {self._folder} has different values on different ranks",
                    hint="convert the checkpoint with verl: FSDP saved it without a device mesh",
                )
            return first
        local: list[Tensor] = [part._local_tensor for part in parts]  # type: ignore[attr-defined]  # noqa: SLF001
        *copies, last = _placements(first)
        if any(type(one).__name__ != "Replicate" for one in copies) or (
            type(last).__name__ not in ("Replicate", "Shard")
        ):
            kinds = ", ".join(type(one).__name__ for one in (*copies, last))
            raise CheckpointError(
                f"the tensor {name!r} in {self._folder} has the placements ({kinds}), which can't be assembled",
                hint="convert the checkpoint with verl: only the meshes (fsdp) and (ddp, fsdp) are supported here",
            )
        if type(last).__name__ == "Replicate":
            return local[0]
        # In a (ddp, fsdp) mesh, consecutive ranks are along fsdp: the first ranks hold one copy.
        dim, need, used, size = last.field("dim", 0), first.shape, 0, 0
        while used < len(local) and size < need[dim]:
            size += local[used].shape[dim]
            used += 1
        rest = [part.shape[:dim] + part.shape[dim + 1 :] for part in local[:used] if part.numel()]
        if size != need[dim] or any(other != need[:dim] + need[dim + 1 :] for other in rest):
            raise CheckpointError(
                f"the shards of {name!r} in {self._folder} have size {size} together in dimension {dim}; expected shape {list(need)}",
                hint="copy the files of all ranks again: they were saved with another world size than their names say",
            )
        return torch.cat([part for part in local[:used] if part.numel()], dim)

    def _lora_scale(self) -> Any:
        """Return the function that computes the factor of a LoRA update from its rank."""
        file = self._folder / "lora_adapter" / "adapter_config.json"
        try:
            config = json.loads(file.read_text())
            alpha, stabilised = float(config["lora_alpha"]), bool(config.get("use_rslora"))
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"the folder {self._folder} holds LoRA matrices, but {file} does not set lora_alpha",
                hint='write {"lora_alpha": …} to this file, with the value of the run',
            ) from error
        if config.get("alpha_pattern"):
            raise CheckpointError(
                f"the file {file} sets alpha_pattern, which is not supported; expected one lora_alpha for all layers"
            )
        return lambda rank: alpha / (math.sqrt(rank) if stabilised else rank)


def _placements(tensor: DTensor) -> Iterator[_Recorded]:
    return tensor._spec.field("placements", 1)  # type: ignore[attr-defined]  # noqa: SLF001


def _check(folder: Path, have: Mapping[str, tuple[int, ...]], want: Mapping[str, Tensor]) -> None:
    """Check that the saved tensors, `have` (shapes by name), are those of the model that the config describes, `want`.

    Raises:
        CheckpointError: names or shapes differ.
    """
    wrong = [f"the tensor {name!r} is missing" for name in sorted(want.keys() - have.keys())]
    wrong += [f"the tensor {name!r} is not expected" for name in sorted(have.keys() - want.keys())]
    wrong += [
        f"the tensor {name!r} has shape {have[name]}; expected {tuple(tensor.shape)}"
        for name, tensor in want.items()
        if name in have and have[name] != tuple(tensor.shape)
    ]
    if wrong:
        raise CheckpointError(
            f"the tensors in {folder} do not match its huggingface/config.json: {wrong[0]}"
            + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""),
            hint="replace huggingface/config.json by the config of the trained model",
        )
