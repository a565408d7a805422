from . import figures as figures
from .escapes import (
    visible as visible,
    visible_json as visible_json,
)
from .jsonl import (
    dump_json as dump_json,
    read_rows as read_rows,
)
from .libraries import drop_import_messages as drop_import_messages
from .logging import (
    bind_process as bind_process,
    get_logger as get_logger,
    json_formatter as json_formatter,
    json_handler as json_handler,
    process_context as process_context,
)
from .run_directory import RunDirectory as RunDirectory
from .terminal import Terminal as Terminal
