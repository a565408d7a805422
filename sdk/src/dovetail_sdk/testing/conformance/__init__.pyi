from .advantage import AdvantageConformance as AdvantageConformance
from .agent_loop import (
    AgentLoopConformance as AgentLoopConformance,
    draw_episodes as draw_episodes,
)
from .engine import EngineConformance as EngineConformance
from .loss_aggregation import LossAggregationConformance as LossAggregationConformance
from .objective import ObjectiveConformance as ObjectiveConformance
from .optimizer import (
    OptimizerConformance as OptimizerConformance,
    ScheduleConformance as ScheduleConformance,
)
from .plugin import PluginConformance as PluginConformance
from .policy_loss import PolicyLossConformance as PolicyLossConformance
from .preset import PresetConformance as PresetConformance
from .reward_function import RewardFunctionConformance as RewardFunctionConformance
from .reward_manager import RewardManagerConformance as RewardManagerConformance
from .rollout import RolloutConformance as RolloutConformance
from .rollout_correction import RolloutCorrectionConformance as RolloutCorrectionConformance
from .rules import RulesConformance as RulesConformance
from .run import RunConformance as RunConformance
from .run_parts import (
    DatasetConformance as DatasetConformance,
    KlControllerConformance as KlControllerConformance,
    SamplerConformance as SamplerConformance,
    TrackerConformance as TrackerConformance,
    TrainerConformance as TrainerConformance,
)
from .runtime import (
    DispatchModeConformance as DispatchModeConformance,
    RuntimeConformance as RuntimeConformance,
)
from .sample_filter import SampleFilterConformance as SampleFilterConformance
from .source import SourceConformance as SourceConformance
from .stage import StageConformance as StageConformance
from .stage_set import StageSetConformance as StageSetConformance
from .tool import (
    ToolConformance as ToolConformance,
    ToolParserConformance as ToolParserConformance,
)
from .transport import WeightTransportConformance as WeightTransportConformance
