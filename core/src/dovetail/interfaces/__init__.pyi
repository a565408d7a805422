from .advantage import (
    AdvantageEstimator as AdvantageEstimator,
    Advantages as Advantages,
    Groups as Groups,
)
from .agent_loop import (
    AgentLoop as AgentLoop,
    EpisodeEndedError as EpisodeEndedError,
    EpisodeError as EpisodeError,
    Session as Session,
    Transition as Transition,
)
from .contained import (
    contain_tasks as contain_tasks,
    contained as contained,
    error_text as error_text,
    outcome_of as outcome_of,
)
from .data import (
    DatasetSource as DatasetSource,
    GroundTruth as GroundTruth,
    InMemoryGroups as InMemoryGroups,
    PlacedRow as PlacedRow,
    Prompt as Prompt,
    RowGroups as RowGroups,
    Sampler as Sampler,
)
from .dispatch_mode import (
    Call as Call,
    DispatchMode as DispatchMode,
)
from .engine import (
    OUTPUTS as OUTPUTS,
    READS as READS,
    TOKEN_OUTPUTS as TOKEN_OUTPUTS,
    TrainEngine as TrainEngine,
)
from .hooks import HookSpec as HookSpec
from .kl_controller import KlController as KlController
from .media import MediaRef as MediaRef
from .model_outputs import (
    check_outputs as check_outputs,
    top_size as top_size,
)
from .model_shape import (
    BYTES as BYTES,
    MemoryRules as MemoryRules,
    ModelShape as ModelShape,
    UpdateSize as UpdateSize,
    Weight as Weight,
    WeightLayer as WeightLayer,
    WorkingMemory as WorkingMemory,
)
from .objective import (
    Objective as Objective,
    ObjectiveSpec as ObjectiveSpec,
    ObjectiveTerm as ObjectiveTerm,
    OutputSpec as OutputSpec,
)
from .optimizer import Optimizer as Optimizer
from .plugin import (
    ColumnPlugin as ColumnPlugin,
    LocalReduction as LocalReduction,
    Logger as Logger,
    Plugin as Plugin,
    PluginConfig as PluginConfig,
    PluginContext as PluginContext,
    Reduction as Reduction,
    Tokenizer as Tokenizer,
)
from .policy_loss import (
    LossAggregation as LossAggregation,
    LossInputs as LossInputs,
    PolicyLoss as PolicyLoss,
    TokenLosses as TokenLosses,
)
from .preflight import (
    Finding as Finding,
    PreflightRule as PreflightRule,
)
from .preset import Preset as Preset
from .reward import (
    CountedTime as CountedTime,
    Failure as Failure,
    FailureKind as FailureKind,
    Outcome as Outcome,
    RewardFunction as RewardFunction,
    RewardManager as RewardManager,
    RunningTime as RunningTime,
    Sample as Sample,
    Score as Score,
)
from .rollout import (
    ON_REQUEST as ON_REQUEST,
    BaseRollout as BaseRollout,
    Completion as Completion,
    FinishReason as FinishReason,
    PauseMode as PauseMode,
    RolloutRequest as RolloutRequest,
    SamplingParams as SamplingParams,
    closable as closable,
)
from .rollout_correction import (
    Correction as Correction,
    CorrectionInputs as CorrectionInputs,
    CorrectionMode as CorrectionMode,
    RolloutCorrection as RolloutCorrection,
)
from .run import (
    Run as Run,
    RunPosition as RunPosition,
)
from .runtime import (
    PluginRef as PluginRef,
    Runtime as Runtime,
    WorkerSpec as WorkerSpec,
)
from .sample_filter import SampleFilter as SampleFilter
from .schedule import Schedule as Schedule
from .source import (
    ExperienceSource as ExperienceSource,
    Key as Key,
    Measure as Measure,
    PlannedPart as PlannedPart,
    Selection as Selection,
    Site as Site,
    SourcePlacement as SourcePlacement,
    StepAsk as StepAsk,
    StepRows as StepRows,
)
from .source_data import (
    BadRow as BadRow,
    DatasetShape as DatasetShape,
    IndexedPrompts as IndexedPrompts,
    RowSet as RowSet,
    SourceData as SourceData,
    StreamedPrompts as StreamedPrompts,
    digest_of as digest_of,
)
from .source_description import PlanNote as PlanNote, RowVerdict as RowVerdict
from .stage import (
    PHASES as PHASES,
    Experience as Experience,
    PlanFacts as PlanFacts,
    SelectedPlugin as SelectedPlugin,
    Stage as Stage,
    StepContext as StepContext,
)
from .stage_set import StageSet as StageSet
from .task_workers import (
    Task as Task,
    TaskSpec as TaskSpec,
    TaskWorker as TaskWorker,
    load_target as load_target,
)
from .tool import (
    EpisodeInfo as EpisodeInfo,
    Tool as Tool,
    ToolResult as ToolResult,
    ToolSchema as ToolSchema,
)
from .tool_parser import (
    ParsedTurn as ParsedTurn,
    ToolCall as ToolCall,
    ToolParser as ToolParser,
    problem_of as problem_of,
)
from .tracker import Tracker as Tracker
from .trainer import Examples as Examples, Trainer as Trainer
from .trajectory import (
    EpisodeEnd as EpisodeEnd,
    Message as Message,
    MessageCall as MessageCall,
    Trajectory as Trajectory,
    Turn as Turn,
)
from .transport import (
    NODE_ADDRESS as NODE_ADDRESS,
    AdapterSpec as AdapterSpec,
    TensorSpec as TensorSpec,
    WeightManifest as WeightManifest,
    WeightReceiver as WeightReceiver,
    WeightSender as WeightSender,
    WeightTransport as WeightTransport,
)
