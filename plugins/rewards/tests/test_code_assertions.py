"""Assert tests in a process other than the response's: allowed operations on the response's values, and no forged passes."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.interfaces import PluginContext
from dovetail_rewards.config_code import CodeConfig
from dovetail_rewards.functions.code import Code
from dovetail_rewards.sandbox import available_levels

pytestmark = pytest.mark.skipif(
    not any(level.available for level in available_levels()[:2]),
    reason=f"no sandbox here: {'; '.join(f'{r.level}: {r.detail}' for r in available_levels())}",
)


def judged(source: str, truth: Any, **config: Any) -> dict[str, Any]:
    function = Code(CodeConfig(**{"time_limit": 1.0, **config}), PluginContext())
    return dict(function.compute_score(None, f"```python\n{source}\n```", truth))


ADD = {"tests": "assert add(1, 2) == 3\nassert add(2, 2) == 4"}
SET = {"tests": "assert set(shared((1, 2), (2, 3))) == set((2,))"}
FORGE_BY_FRAMES = """
import json, os, sys
frame = sys._getframe()
while frame:
    for names in (frame.f_locals, frame.f_globals):
        task = names.get('task')
        if isinstance(task, dict):
            for case in range(9):
                line = json.dumps({'case': case, 'held': task.get('token', '')}) + '\\n'
                for fd in range(10):
                    try: os.write(fd, line.encode())
                    except OSError: pass
    frame = frame.f_back
os._exit(0)
"""
FORGE_BY_MEMORY = """
import gc, json, os, re
texts = {t for one in gc.get_objects() for t in (one.values() if isinstance(one, dict) else [one]) if isinstance(t, str)}
for token in (t for t in texts if re.fullmatch('[0-9a-f]{32}', t)):
    for fd in range(10):
        for case in range(9):
            try: os.write(fd, (json.dumps({'case': case, 'held': token}) + '\\n').encode())
            except OSError: pass
def add(a, b): return 0
"""
ALWAYS_EQUAL = "class T{base}:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n    __hash__ = None\n"
FORGERIES = {
    "equal to everything": (ALWAYS_EQUAL.format(base="") + "def add(a, b): return T()", ADD),
    "an int equal to everything": (
        ALWAYS_EQUAL.format(base="(int)") + "def add(a, b): return T(0)",
        ADD,
    ),
    "a list with such": (
        ALWAYS_EQUAL.format(base="") + "def add(a, b): return [T()]",
        {"tests": "assert add(1, 2) == [3]"},
    ),
    "token by frames": (FORGE_BY_FRAMES, ADD),
    "token by memory": (FORGE_BY_MEMORY, ADD),
    "another set": ("def shared(a, b): return ()\ndef set(x): return 0", SET),
    "set in builtins": (
        "import builtins\nbuiltins.set = lambda x: 0\ndef shared(a, b): return ()",
        SET,
    ),
    "other exceptions in builtins": (
        "import builtins\nbuiltins.AssertionError = type('E', (BaseException,), {})\ndef add(a, b): return 0",
        ADD,
    ),
    "another isclose": (
        "import types\nmath = types.SimpleNamespace(isclose=lambda *a: True)\ndef half(x): return 0",
        {"tests": "import math\nassert math.isclose(half(3), 1.5)"},
    ),
    "an object in place of a module": (
        "class math:\n    isclose = staticmethod(lambda *a: True)\ndef half(x): return 0",
        {"tests": "assert math.isclose(half(3), 1.5)"},
    ),
    "an object in place of a module that is not here": (
        "class pd:\n    isna = staticmethod(lambda *a: True)\ndef half(x): return 0",
        {"tests": "assert pd.isna(half(3))"},
    ),
    "an end of the test's loop": (
        "def half(x): raise StopIteration",
        {"tests": "assert all(map(lambda x: half(x) == x / 2, [1, 2]))"},
    ),
    "a set-up replaced": (
        "def same(a, b): return True\ndef add(a, b): return 0",
        {
            "test_setup_code": "def same(a, b): return a == b",
            "test_list": ["assert same(add(1, 2), 3)"],
        },
    ),
    "raises what a test catches": (
        "import os\ndef add(a, b): os._exit(0)",
        {"tests": "try:\n    add(1, 2)\nexcept BaseException:\n    pass\nassert 1 == 1"},
    ),
    "what is not a message": (
        "import os\nfor fd in range(10):\n    try: os.write(fd, b'[' * 10**6 + b'\\n')\n    except OSError: pass\ndef add(a, b): return 3",
        {"tests": "try:\n    add(1, 2)\nexcept BaseException:\n    pass\nassert 1 == 1"},
    ),
    "a reply that changes the tests": (
        'import os\nfor fd in range(10):\n    try: os.write(fd, b\'{"raised": ["helper.answer_client", "AnswerLostError"], "args": ["os"]}\\n\' * 99)\n    except OSError: pass\n',
        ADD,
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_no_response_forges_a_pass(name) -> None:
    source, truth = FORGERIES[name]
    assert judged(source, truth)["score"] == 0.0


def test_a_value_that_is_no_plain_data_fails_and_names_the_option() -> None:
    source = "class Point:\n    pass\ndef f(): return Point()"
    found = judged(source, {"tests": "assert f() == 1"})
    assert found["score"] == 0.0
    assert "Point" in found["first_failure"]
    assert "tests=in_process" in found["first_failure"]


def test_the_tests_run_in_the_responses_process_where_the_user_says_so() -> None:
    source, truth = FORGERIES["equal to everything"]
    assert judged(source, truth, tests="in_process")["score"] == 1.0


@pytest.mark.parametrize(
    ("source", "test"),
    [
        ("def f(x): return x", "for v in (None, True, 1, 2**99, 1.5, 'ä\\ud800', b'b', 1j, (1,), [2], {3}, {4: (5,)}): assert f(v) == v and type(f(v)) is type(v)"),
        ("from fractions import Fraction\nfrom decimal import Decimal\nimport datetime as d\ndef f(): return [Fraction(1, 3), Decimal('0.1'), range(3), d.date(2020, 1, 2), d.timedelta(1)]",
         "import fractions, decimal, datetime\nassert f() == [fractions.Fraction(1, 3), decimal.Decimal('0.1'), range(3), datetime.date(2020, 1, 2), datetime.timedelta(1)]"),
        ("from collections import *\ndef f(x): return [Counter(x), defaultdict(int, a=1), OrderedDict(b=2), deque([3])]",
         "from collections import deque, OrderedDict\nassert f('xx') == [{'x': 2}, {'a': 1}, OrderedDict(b=2), deque([3])]"),
        ("from collections import namedtuple\nP = namedtuple('P', 'x')\ndef f(): return P(1)", "assert f() == (1,)"),
        ("from enum import IntEnum\nclass E(IntEnum):\n    A = 1\ndef f(): return E.A", "assert f() == 1"),
        ("def f(n):\n    for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2]\nassert next(f(1)) == 0"),
        ("def f(x): return map(str, x)", "assert ''.join(f([1, 2])) == '12'"),
        ("def f(a):\n    a.sort()\n    a[0] = [9]", "x = [3, 1, 2]\nassert f(x) is None\nassert x == [[9], 2, 3]"),
        ("def f(a): a['k'] = 1", "x = {}\nf(a=x)\nassert x == {'k': 1}"),
        ("class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\ndef f(ps): return max(p.b - p.a for p in ps)", "assert f([Pair(1, 5), Pair(2, 3)]) == 4"),
        ("class Node:\n    def __init__(self, v): self.v, self.left = v, None\ndef f(n): return n.v + n.left.v", "root = Node(1)\nroot.left = Node(2)\nassert f(root) == 3 and root.left.v == 2"),
        ("class Solution:\n    def f(self, x: 'int') -> int: return x", "assert Solution().f(x=3) == 3"),
        ("class MyError(ValueError): pass\ndef f(): raise MyError('no')", "try:\n    f()\n    assert False\nexcept MyError as error:\n    assert str(error) == 'no' and isinstance(error, ValueError)"),
        ("def f(x): return {}[x]", "try:\n    f('a')\n    assert False\nexcept KeyError as error:\n    assert error.args == ('a',)"),
        ("import math\nfrom collections import Counter\ndef f(x): return math.pi * x", "assert math.isclose(f(2), 6.283, rel_tol=1e-3)\nassert Counter('a') == {'a': 1}"),
        ("def sum(a, b): return a * b", "assert sum(3, 4) == 12"),
        ("def f(x): return x", "from solution import f as g\nimport solution\nassert g(1) == solution.f(1) == 1"),
        ("def f(self, what, function): return self + what + function", "assert f(self=1, what=2, function=3) == 6"),
        ("LIMIT = 7\ndef f(): return LIMIT", "assert f() == LIMIT"),
        ("def f(x):\n    print(x)\n    return input() if x else 1", "assert f(0) == 1"),
    ],
)  # fmt: skip
def test_a_right_response_passes(source, test) -> None:
    assert judged(source, {"tests": [test]}) == {"score": 1.0, "passed_share": 1.0}


@pytest.mark.parametrize(
    ("argument", "why"), [("lambda x: x", "type function"), ("'x' * 2**23", "too long")]
)
def test_an_argument_that_cannot_be_sent_is_a_fault_of_the_tests_and_no_score(
    argument, why
) -> None:
    with pytest.raises(ValueError, match=rf"{why}.*tests=in_process"):
        judged("def f(x): return 1", {"tests": f"assert f({argument}) == 1"})


def test_a_value_that_is_too_long_fails_and_says_so() -> None:
    found = judged("def f(): return 'x' * 2**23", {"tests": "assert f() == 1"})
    assert found["score"] == 0.0
    assert "8388608" in found["first_failure"]


def test_one_response_that_ends_costs_that_test_alone() -> None:
    source = (
        "import os\ndef f(x):\n    if x == 1: os._exit(0)\n    while x == 3: pass\n    return x"
    )
    truth = {"tests": [f"assert f({n}) == {n}" for n in range(5)]}
    found = judged(source, truth, scoring="share", time_limit=0.3)
    assert found["passed_share"] == pytest.approx(3 / 5)
    assert found["first_failure"].startswith("test 2 of 5: ")


def test_nothing_of_the_tests_is_in_the_responses_process() -> None:
    spy = """
import gc, sys
def add(a, b):
    seen = [repr(one) for one in gc.get_objects() if isinstance(one, (dict, list, tuple, str))]
    frame = sys._getframe()
    while frame:
        seen.append(repr(frame.f_locals) + repr(frame.f_globals)); frame = frame.f_back
    return any(''.join(['98765432', '1']) in text for text in seen)
"""
    found = judged(
        spy, {"tests": "value = add(1, 2)\nassert value is False\nassert add(1, 2) != 987654321"}
    )
    assert found["score"] == 1.0


def test_a_service_runs_them_in_the_responses_process_alone() -> None:
    truth = {"tests": "assert f(1) == 1"}
    config = CodeConfig(service="http://127.0.0.1:9")
    assert "tests=in_process" in (Code.check_row(config, truth) or "")
    assert (
        Code.check_row(CodeConfig(service="http://127.0.0.1:9", tests="in_process"), truth) is None
    )
