from . import plain_yaml as plain_yaml
from .keys import format_path as format_path
from .layers import read_file as read_file
from .load import (
    LoadedConfig as LoadedConfig,
    config_from_mapping as config_from_mapping,
    load_config as load_config,
)
from .schema import fields_of as fields_of
from .serialise import to_mapping as to_mapping
