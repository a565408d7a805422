from .episodes import (
    Episodes as Episodes,
    chat_tools as chat_tools,
    running_episodes as running_episodes,
)
from .generation import Generation as Generation, together as together
from .group import Group as Group
from .placement import replicas_in as replicas_in
from .rollout_pool import RolloutPool as RolloutPool
from .rollout_service import RolloutService as RolloutService
from .sampling import training_sampling as training_sampling
from .scoring.functions import configured_functions as configured_functions
from .scoring.reading import conversation_ids as conversation_ids
from .scoring.reward_calls import (
    RewardCall as RewardCall,
    RewardFunctions as RewardFunctions,
    failure_from as failure_from,
    finite_float as finite_float,
    outcome_from as outcome_from,
    outcomes_from as outcomes_from,
)
from .scoring.rows import check_sources as check_sources
from .scoring.scorer import Scorer as Scorer
from .scoring.trial import TrialSample as TrialSample, try_rewards as try_rewards
from .source import RolloutsSource as RolloutsSource
from .source_wrapper import SourceWrapper as SourceWrapper
from .transports.checks import (
    Bucket as Bucket,
    bucketed as bucketed,
    gather_the_rest as gather_the_rest,
    matched as matched,
    received_whole as received_whole,
)
from .transports.tensor_digest import DeferredDigests as DeferredDigests
from .turn_encoder import TurnEncoder as TurnEncoder
from .validation import (
    held_out_samples as held_out_samples,
    unscored as unscored,
    validation_metrics as validation_metrics,
)
