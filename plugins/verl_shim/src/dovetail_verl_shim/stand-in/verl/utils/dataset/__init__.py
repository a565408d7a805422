"""Stand-ins for verl's datasets."""

from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

__all__ = ["RLHFDataset", "collate_fn"]
