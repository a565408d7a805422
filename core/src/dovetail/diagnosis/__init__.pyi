from .diagnosis import RunDiagnosis as RunDiagnosis, diagnose as diagnose
