from .adapter import PlannedAdapter as PlannedAdapter
from .agent_loop import EpisodeSection as EpisodeSection
from .algorithm import (
    AlgorithmSection as AlgorithmSection,
    KlInLossSection as KlInLossSection,
    LogProbCheckSection as LogProbCheckSection,
    OverlongPenaltySection as OverlongPenaltySection,
)
from .fields import (
    ABOVE_ZERO as ABOVE_ZERO,
    AT_LEAST_ONE as AT_LEAST_ONE,
    NOT_NEGATIVE as NOT_NEGATIVE,
    ONE_OR_MANY as ONE_OR_MANY,
    PLUGIN_DEFAULT as PLUGIN_DEFAULT,
    VERBATIM as VERBATIM,
    PluginSection as PluginSection,
    PresetSection as PresetSection,
    Validator as Validator,
    own_fields as own_fields,
    plugin_field as plugin_field,
)
from .placement import (
    Pool as Pool,
    RuntimeSection as RuntimeSection,
    check_environments as check_environments,
)
from .rollout import RolloutSection as RolloutSection, WeightCheckSection as WeightCheckSection
from .run import (
    DataSection as DataSection,
    ModelSection as ModelSection,
    RewardSection as RewardSection,
    RunConfig as RunConfig,
    TrainerSection as TrainerSection,
)
from .training import (
    CriticSection as CriticSection,
    EngineSection as EngineSection,
    FollowSection as FollowSection,
    OptimSection as OptimSection,
    TrainingSection as TrainingSection,
)
