from .disk import write_whole as write_whole
from .manifest import CheckpointManifest as CheckpointManifest
from .store import CheckpointStore as CheckpointStore
