from .disk import write_whole as write_whole
from .store import CheckpointStore as CheckpointStore
