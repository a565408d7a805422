from .store import CheckpointStore as CheckpointStore
