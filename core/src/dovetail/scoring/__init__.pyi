from .functions import configured_functions as configured_functions
from .reading import conversation_ids as conversation_ids
from .trial import (
    TrialSample as TrialSample,
    read_trial as read_trial,
    try_rewards as try_rewards,
)
