"""Draw the console of `dovetail demo` as docs/images/demo.svg.

Usage: dovetail demo --seed 1 > demo.log && python docs/record_demo.py demo.log
"""

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

SHOWN = 3
"""Steps at the beginning and at the end that the picture has; those between are left out."""


def main() -> None:
    """Write the picture."""
    lines = [line.rstrip() for line in Path(sys.argv[1]).read_text().splitlines()]
    start = max(n for n, line in enumerate(lines) if line.startswith("step 1/"))
    end = next(n for n in range(start, len(lines)) if lines[n].startswith("Next:"))
    steps = [n for n in range(start, end) if re.match(r"step \d+/\d+  reward", lines[n])]
    kept = [*range(steps[0], steps[SHOWN]), *range(steps[-SHOWN], end)]
    console = Console(record=True, width=112, file=io.StringIO())
    console.print(Text("$ dovetail demo", style="bold"))
    for n in kept:
        if n == steps[-SHOWN]:
            console.print(Text("…", style="dim"))
        # Paths are those of the machine, and the speed's last columns say little here.
        line = re.sub(r"\S*/(demo/\S+)", r"\1", re.sub(r"  tokens/s.*", "", lines[n]))
        console.print(Text(line, style="green" if "accuracy" in line.lower() else ""))
    picture = console.export_svg(title="dovetail demo, two CPU cores")
    # Without fonts that a viewer would fetch from another host.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    Path(__file__).with_name("images").joinpath("demo.svg").write_text(picture)


if __name__ == "__main__":
    main()
