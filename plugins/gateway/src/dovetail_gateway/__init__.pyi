from .config import (
    GatewaySection as GatewaySection,
    is_command as is_command,
)
from .endpoint import EpisodeEndpoint as EpisodeEndpoint
from .server import Gateway as Gateway
from .turn_reader import (
    HERMES as HERMES,
    TurnReader as TurnReader,
)
