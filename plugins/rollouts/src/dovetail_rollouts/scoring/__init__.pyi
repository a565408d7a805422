from .functions import configured_functions as configured_functions
from .reading import conversation_ids as conversation_ids
from .trial import TrialSample as TrialSample, try_rewards as try_rewards
