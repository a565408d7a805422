from .config import VerifiedSection as VerifiedSection, is_pattern as is_pattern
from .functions.answers import (
    accepted_texts as accepted_texts,
    complaint as complaint,
    extracted as extracted,
    last_boxed as last_boxed,
    last_match as last_match,
    last_tag as last_tag,
)
from .functions.verified import VerifiedFunction as VerifiedFunction
