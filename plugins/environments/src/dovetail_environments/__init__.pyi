from .config import (
    EnvironmentSection as EnvironmentSection,
    WorkerSection as WorkerSection,
)
from .environment import (
    Environment as Environment,
    EnvironmentEpisode as EnvironmentEpisode,
    EnvironmentTask as EnvironmentTask,
    EpisodeScore as EpisodeScore,
)
from .served import ServedModel as ServedModel
from .worker_environment import WorkerEnvironment as WorkerEnvironment
from .worker_pool import EnvironmentProcessError as EnvironmentProcessError
