"""Ten small Python packages with one bug and a failing test each, as JSON lines for the agent to repair.

A row has the package with its tests in `extra_info`, and the tests once more as the ground truth, by which the reward scores.
Usage: `python examples/repositories/prepare.py` writes train.jsonl into demo/repositories.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple


class Broken(NamedTuple):
    """A package as it should be, and what breaks it."""

    issue: str
    source: str
    right: str
    wrong: str
    checks: tuple[str, ...]
    """Expressions that hold for the package as it should be; one of them does not for the broken one."""


PACKAGES = {
    "slugs": Broken(
        "slugify leaves dashes at both ends of a title with punctuation around it.",
        'import re\n\n\ndef slugify(title):\n    words = re.sub("[^a-z0-9]+", "-", title.lower())\n    return words.strip("-")\n',
        'words.strip("-")',
        "words",
        ("slugify('Hello, World!') == 'hello-world'", "slugify('a b') == 'a-b'"),
    ),
    "spans": Broken(
        "merge loses an interval that touches the one before it.",
        "def merge(spans):\n    merged = []\n    for start, end in sorted(spans):\n        if merged and start <= merged[-1][1]:\n            merged[-1] = (merged[-1][0], max(merged[-1][1], end))\n        else:\n            merged.append((start, end))\n    return merged\n",
        "start <= merged[-1][1]",
        "start < merged[-1][1]",
        (
            "merge([(1, 2), (2, 3)]) == [(1, 3)]",
            "merge([(5, 6), (1, 4), (2, 3)]) == [(1, 4), (5, 6)]",
        ),
    ),
    "cache": Broken(
        "A cache that is full throws out the entry that was just read.",
        "from collections import OrderedDict\n\n\nclass Cache:\n    def __init__(self, size):\n        self.size = size\n        self.entries = OrderedDict()\n\n    def get(self, key):\n        self.entries.move_to_end(key)\n        return self.entries[key]\n\n    def put(self, key, value):\n        self.entries[key] = value\n        if len(self.entries) > self.size:\n            self.entries.popitem(last=False)\n\n\ndef kept(size, reads, writes):\n    cache = Cache(size)\n    for key in writes[:size]:\n        cache.put(key, key)\n    for key in reads:\n        cache.get(key)\n    for key in writes[size:]:\n        cache.put(key, key)\n    return sorted(cache.entries)\n",
        "        self.entries.move_to_end(key)\n",
        "",
        ("kept(2, 'a', 'abc') == ['a', 'c']", "kept(2, '', 'abc') == ['b', 'c']"),
    ),
    "roman": Broken(
        "IV is read as 6.",
        'VALUES = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100}\n\n\ndef number(text):\n    total = 0\n    for here, following in zip(text, text[1:] + "I"):\n        value = VALUES[here]\n        total += -value if value < VALUES[following] else value\n    return total\n',
        "-value if value < VALUES[following] else value",
        "value",
        ("number('IV') == 4", "number('XLII') == 42", "number('VI') == 6"),
    ),
    "pages": Broken(
        "The last page is missing where it is not full.",
        "def pages(items, size):\n    return [items[i : i + size] for i in range(0, len(items), size)]\n",
        "len(items), size)",
        "len(items) - size + 1, size)",
        ("pages([1, 2, 3], 2) == [[1, 2], [3]]", "pages([1, 2], 1) == [[1], [2]]"),
    ),
    "money": Broken(
        "A split of an amount of cents does not add up to the amount.",
        "def split(cents, people):\n    share, rest = divmod(cents, people)\n    return [share + (number < rest) for number in range(people)]\n",
        "share + (number < rest)",
        "share",
        ("split(10, 3) == [4, 3, 3]", "sum(split(101, 7)) == 101"),
    ),
    "words": Broken(
        "count does not see words that begin with a capital as the same.",
        "from collections import Counter\n\n\ndef count(text):\n    return Counter(text.lower().split())\n",
        "text.lower().split()",
        "text.split()",
        ("count('The the THE')['the'] == 3", "count('')['x'] == 0"),
    ),
    "paths": Broken(
        "normal climbs above the root.",
        'def normal(path):\n    parts = []\n    for part in path.split("/"):\n        if part == "..":\n            parts = parts[:-1]\n        elif part not in ("", "."):\n            parts.append(part)\n    return "/" + "/".join(parts)\n',
        "parts = parts[:-1]",
        "parts.append(part)",
        ("normal('/a/../b') == '/b'", "normal('/../..') == '/'", "normal('/a//./b') == '/a/b'"),
    ),
    "search": Broken(
        "find does not find the last of the values.",
        "def find(values, wanted):\n    low, high = 0, len(values)\n    while low < high:\n        middle = (low + high) // 2\n        if values[middle] < wanted:\n            low = middle + 1\n        else:\n            high = middle\n    return low if low < len(values) and values[low] == wanted else None\n",
        "0, len(values)\n",
        "0, len(values) - 2\n",
        ("find([1, 3, 5], 5) == 2", "find([1, 3, 5], 1) == 0", "find([1, 3], 2) is None"),
    ),
    "clock": Broken(
        "after adds minutes beyond midnight.",
        'def after(time, minutes):\n    hours, rest = map(int, time.split(":"))\n    total = (hours * 60 + rest + minutes) % (24 * 60)\n    return f"{total // 60:02}:{total % 60:02}"\n',
        "(hours * 60 + rest + minutes) % (24 * 60)",
        "hours * 60 + rest + minutes",
        ("after('23:30', 45) == '00:15'", "after('08:05', 5) == '08:10'"),
    ),
}


def tests_of(name: str, broken: Broken) -> str:
    """Return the file of tests of a package."""
    checks = "".join(
        f"\n    def test_{number}(self):\n        self.assertTrue({check})\n"
        for number, check in enumerate(broken.checks)
    )
    return f"import unittest\n\nfrom {name} import *\n\n\nclass Tests(unittest.TestCase):{checks}"


def row(name: str, broken: Broken) -> dict[str, object]:
    """Return a row of the dataset."""
    tests = {"tests/__init__.py": "", f"tests/test_{name}.py": tests_of(name, broken)}
    source = broken.source.replace(broken.right, broken.wrong)
    issue = f"{broken.issue} The package is {name}/; its tests run by `python3 -m unittest discover -s tests -t .`."
    return {
        "prompt": [{"role": "user", "content": issue}],
        "data_source": "repositories",
        "reward_model": {"ground_truth": json.dumps({"package": name, "tests": tests})},
        "extra_info": {"files": {f"{name}/__init__.py": source, **tests}},
    }


def main() -> None:
    """Write the rows."""
    folder = Path("demo/repositories")
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row(name, broken) for name, broken in PACKAGES.items()]
    (folder / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    print(f"{len(rows)} repositories → {folder / 'train.jsonl'}")


if __name__ == "__main__":
    main()
