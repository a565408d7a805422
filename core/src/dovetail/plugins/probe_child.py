"""The process that imports plugins for `probe` and writes one line of JSON for each to a file descriptor."""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Read which plugins to import from standard input, and import them one by one."""
    asked = json.load(sys.stdin)
    sys.path[:] = asked["path"]

    from dovetail.errors import DovetailError, PluginNeedsError
    from dovetail.interfaces.runtime import PluginRef
    from dovetail.plugins.load import load_plugin_class

    with os.fdopen(int(sys.argv[1]), "w") as answers:
        for text in asked["plugins"]:
            kind, _, rest = text.partition("/")
            name, _, distribution = rest.partition("@")
            answer: dict[str, object] = {"loadable": True}
            try:
                load_plugin_class(PluginRef(kind=kind, name=name, distribution=distribution))
            except DovetailError as error:
                answer = {
                    "loadable": False,
                    "cause": error.message,
                    "fix": error.hint,
                    "for_want_of_needs": isinstance(error, PluginNeedsError),
                }
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
