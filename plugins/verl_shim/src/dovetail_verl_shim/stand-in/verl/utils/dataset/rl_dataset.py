"""RLHFDataset: reads rows from files without tokenising them, since Dovetail tokenises prompts itself."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset


class RLHFDataset(Dataset[Any]):
    """Reads files into `dataframe`. Subclasses can use the attributes of verl's class, such as `prompt_key`, and override
    `_read_files_and_tokenize`.
    """

    def __init__(
        self,
        data_files: str | list[str],
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        self.data_files = [data_files] if isinstance(data_files, str) else list(data_files)
        self.original_data_files = list(self.data_files)
        self.tokenizer, self.processor, self.config = tokenizer, processor, config
        self.max_samples = max_samples
        self.prompt_key = config.get("prompt_key", "prompt")
        self.image_key = config.get("image_key", "images")
        self.video_key = config.get("video_key", "videos")
        self.max_prompt_length = config.get("max_prompt_length", 1024)
        self.truncation = config.get("truncation", "error")
        self.num_workers = config.get("filter_overlong_prompts_workers", 1)
        self._read_files_and_tokenize()

    def _read_files_and_tokenize(self) -> None:
        import datasets

        kinds = {"parquet": "parquet", "json": "json", "jsonl": "json"}
        read = []
        for file in self.data_files:
            kind = kinds.get(file.rpartition(".")[2])
            if kind is None:
                raise ValueError(f"{file} is neither a .parquet nor a .json or .jsonl file")
            read.append(datasets.load_dataset(kind, data_files=file)["train"])
        self.dataframe = datasets.concatenate_datasets(read)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """Return `dataframe` unchanged: Dovetail itself removes prompts longer than `data.max_prompt_length`."""
        return dataframe

    def _build_messages(self, example: dict[str, Any], key: str | None = None) -> Any:
        return example[key or self.prompt_key]

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> dict[str, Any]:
        return dict(self.dataframe[item])


def collate_fn(data_list: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a list of the samples' values for each key; verl's own function returns tensors."""
    return {key: [row[key] for row in data_list] for key in data_list[0]}
