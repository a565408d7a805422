from .layers import read_file as read_file
from .load import (
    config_from_mapping as config_from_mapping,
    load_config as load_config,
)
