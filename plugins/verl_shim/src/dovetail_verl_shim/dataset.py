"""VerlDataset: reads rows through a dataset class written for verl."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from dovetail.errors import DataError, PluginBrokenError
from dovetail.interfaces import DatasetSource
from dovetail_verl_shim.config import VerlDatasetConfig

_COLUMNS = ("prompt", "data_source", "reward_model", "extra_info", "ability", "images", "tools")
"""Keys of an item of the verl dataset that become columns of Dovetail's row. All other keys are added to the row's `extra_info`, unless it
already has the key."""


class VerlDataset(DatasetSource):
    """Reads files with a class that has the constructor of verl's `RLHFDataset(data_files, tokenizer, config, processor)`.

    Rows come from the class's own `__getitem__` if it defines one, else from its `dataframe`. A row's `raw_prompt`, if present, becomes
    the prompt. Values that are tensors are left out.

    In a config:

        data:
          source: {name: verl, file: my_dataset.py, class_name: MyDataset}
    """

    name = "verl"
    api = ">=1.0,<2"
    Config = VerlDatasetConfig
    config: VerlDatasetConfig

    def read(self, paths: Sequence[str]) -> Sequence[Mapping[str, Any]]:
        from omegaconf import OmegaConf

        cls = self._class()
        given = {
            "data_files": list(paths),
            "tokenizer": self.context.tokenizer,
            "config": OmegaConf.create(dict(self.config.settings)),
            "processor": None,
        }
        try:
            made = cls(**given)
            items = made if _makes_rows(cls) else made.dataframe
            return [self._row(dict(items[index])) for index in range(len(items))]
        except Exception as error:  # the user's class may raise anything
            raise DataError(
                f"{self._where} failed on {', '.join(paths)}: {type(error).__name__}: {error}"
            ) from error

    @property
    def _where(self) -> str:
        return f"the dataset class {self.config.class_name} of {self.config.file}"

    def _class(self) -> Any:
        file = Path(self.config.file).expanduser()
        module = ModuleType(file.stem)
        module.__file__ = str(file)
        try:
            SourceFileLoader(file.stem, str(file)).exec_module(module)
            return getattr(module, self.config.class_name)
        except Exception as error:
            hint = None
            if isinstance(error, ModuleNotFoundError):
                hint = f"install {error.name!r}, or add the folder that contains it to PYTHONPATH"
            raise PluginBrokenError(
                f"{self._where} can't be loaded: {type(error).__name__}: {error}", hint=hint
            ) from error

    def _row(self, item: dict[str, Any]) -> dict[str, Any]:
        prompt = self.config.settings.get("prompt_key", "prompt")
        item["prompt"] = item.pop("raw_prompt", item.get(prompt))
        plain = {key: value for key, value in item.items() if not hasattr(value, "detach")}
        row = {key: plain[key] for key in _COLUMNS if plain.get(key) is not None}
        further = {key: value for key, value in plain.items() if key not in {*_COLUMNS, prompt}}
        return {**row, "extra_info": further | dict(row.get("extra_info") or {})}


def _makes_rows(cls: type) -> bool:
    """Return whether a class has its own `__getitem__`, instead of the one of verl's base class."""
    owner = next((base for base in inspect.getmro(cls) if "__getitem__" in vars(base)), object)
    return owner.__name__ != "RLHFDataset"
