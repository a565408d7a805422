from .functions import configured_functions as configured_functions
from .trial import (
    TrialSample as TrialSample,
    read_trial as read_trial,
    try_rewards as try_rewards,
)
