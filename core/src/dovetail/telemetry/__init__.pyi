from . import numbers as numbers
from .escapes import (
    visible as visible,
    visible_json as visible_json,
)
from .jsonl import (
    append_rows as append_rows,
    dump_json as dump_json,
    plain as plain,
    read_rows as read_rows,
    step_of as step_of,
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
