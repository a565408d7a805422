from . import figures as figures
from .diagnosis import (
    LearningWarning as LearningWarning,
    RunDiagnosis as RunDiagnosis,
    diagnose as diagnose,
)
from .frames import load as load
