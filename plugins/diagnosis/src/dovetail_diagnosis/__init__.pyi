from .diagnosis import diagnose as diagnose
