"""Assert tests get copies of the response's values: an operation that a copy can't answer is reported and never counts as passed."""

from __future__ import annotations

from pathlib import Path
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


def judged(source: str, test: str, **config: Any) -> dict[str, Any]:
    function = Code(CodeConfig(**{"time_limit": 1.0, **config}), PluginContext())
    return dict(function.compute_score(None, f"```python\n{source}\n```", {"tests": [test]}))


@pytest.mark.parametrize(
    "test",
    [
        "n = Node(1)\nassert clone(n) is not n",
        "a = []\nb = f(a)\nassert b is not a",
        "assert 1 < 2 and f() is Color.RED",
        "assert callable(f())",
        "a = [1]\nassert id(f(a)) != id(a)",
        "assert 'f' in globals() and f(1)",
        "async def main():\n    assert await f() == 1",
        "class B(A):\n    pass\nassert B().f() == 1",
        "with opened(1) as v:\n    assert v == 1",
        "import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as text:\n    f()\nassert text.getvalue()",
        "import sys\nsys.stdout = None\nassert f() == 1",
        "from unittest.mock import patch\nwith patch('builtins.input', return_value='7'):\n    assert f() == 7",
    ],
)
def test_a_row_that_asks_for_identity_can_be_judged_in_process_alone(test) -> None:
    why = Code.check_row(CodeConfig(), {"tests": [test]})
    assert why is not None
    assert "tests=in_process" in why
    assert Code.check_row(CodeConfig(tests="in_process"), {"tests": [test]}) is None
    with pytest.raises(ValueError, match="tests=in_process"):
        judged("def f(*a): return a", test)


@pytest.mark.parametrize(
    "test",
    ["assert f(None) is None", "assert f(True) is not False", "assert type(f(1)) is int"],
)  # fmt: skip
def test_singletons_and_types_of_plain_data_are_the_same_in_copies(test) -> None:
    assert Code.check_row(CodeConfig(), {"tests": [test]}) is None
    assert judged("def f(x): return x", test)["score"] == 1.0


def test_what_cannot_be_sent_is_a_fault_whatever_the_test_catches() -> None:
    test = "def bad(x): raise ValueError\ntry:\n    apply(bad, 1)\nexcept Exception:\n    pass\nelse:\n    assert False"
    with pytest.raises(ValueError, match=r"type function.*tests=in_process"):
        judged("def apply(f, x): return 0", test)


POINT = "class V:\n    def __init__(s, x): s.x = x\n    def __enter__(s): return 1\n    def __exit__(s, *a): pass\ndef v(): return V(1)\n"


@pytest.mark.parametrize(
    "statement",
    [
        "V(1) + 'a'", "hash(v())", "type(v())", "isinstance(v(), int)", "v() @ v()", "v().__eq__(1)", "import copy; copy.copy(v())",
        "from collections.abc import Iterator; isinstance(v(), Iterator)",
    ],
)  # fmt: skip
def test_what_only_the_responses_process_can_do_does_not_hold_whatever_the_test_catches(
    statement,
) -> None:
    found = judged(POINT, f"try:\n    {statement}\nexcept BaseException:\n    pass\nassert 1 == 1")
    assert found["score"] == 0.0
    assert "tests=in_process" in found["first_failure"]


CASES: dict[str, tuple[str, str]] = {
    "a parameter named as the function": ("def f(x): return x + 1", "def check(f):\n    assert f(1) == 2\ncheck(f)"),
    "a comprehension's variable named so": ("def total(x): return sum(x)", "assert total([1, 2]) == 3 and [total for total in [1]] == [1]"),
    "a class of the response": ("class S: pass\ndef f(): return S()", "assert isinstance(f(), S)"),
    "an exception of a module": ("import json\ndef f(s): return json.loads(s)", "import json\ntry:\n    f('{')\n    assert False\nexcept json.JSONDecodeError as e:\n    assert e.pos == 1 and 'line 1' in str(e)"),
    "an exception of another module": ("import statistics\ndef f(s): return statistics.mean(s)", "import statistics\ntry:\n    f([])\n    assert False\nexcept statistics.StatisticsError:\n    pass"),
    "a hierarchy of exceptions": ("class A(ValueError): pass\nclass B(A): pass\ndef f(): raise B('x')", "try:\n    f()\n    assert False\nexcept A as e:\n    assert str(e) == 'x' and isinstance(e, ValueError)"),
    "an exception below two": ("class E(KeyError, AttributeError): pass\ndef f(): raise E('x')", "try:\n    f()\n    assert False\nexcept AttributeError:\n    pass"),
    "attributes of an exception": ("class E(Exception):\n    def __init__(s, code): super().__init__('m'); s.code = code\n    def __str__(s): return f'code {s.code}'\ndef f(): raise E(3)", "try:\n    f()\n    assert False\nexcept E as e:\n    assert e.code == 3 and str(e) == 'code 3' and e.args == ('m',)"),
    "in": ("class T:\n    def __contains__(s, w): return w == 'a'", "assert 'a' in T() and 'b' not in T()"),
    "a global after a call": ("n = 0\ndef inc():\n    global n\n    n += 1", "assert n == 0\ninc()\nassert n == 1"),
    "an aware time": ("import datetime as d\ndef f(): return d.datetime(2020, 1, 2, tzinfo=d.timezone.utc)", "import datetime as d\nassert f() == d.datetime(2020, 1, 2, tzinfo=d.timezone.utc)"),
    "the length of a deque": ("from collections import deque\ndef f(): return deque([1, 2], 2)", "assert f().maxlen == 2 and list(f()) == [1, 2]"),
    "an ellipsis": ("def f(): return ...", "assert f() is ..."),
    "a slice": ("class M:\n    def __getitem__(s, k): return [1, 2, 3][k]", "assert M()[0:2] == [1, 2]"),
    "names that copies have": ("class N:\n    def __init__(s): s._key, s._client, s._ask = 1, 2, 3\ndef f():\n    'text'", "assert (N()._key, N()._client, N()._ask, f.__doc__) == (1, 2, 3, 'text')"),
    "del, format, reversed": ("class D:\n    def __init__(s): s.d = [1, 2]\n    def __delitem__(s, k): del s.d[k]\n    def __reversed__(s): return iter(s.d)\n    def __format__(s, form): return form", "d = D()\ndel d[0]\nassert list(reversed(d)) == [2] and f'{d:x}' == 'x'"),
    "a type and functions as arguments": ("def f(g, xs): return [g(x) for x in xs]\ndef only(xs, t): return [x for x in xs if type(x) is t]\ndef same(g): return g", "import math\nassert f(math.sqrt, [4]) == [2] and f(len, ['ab']) == [2] and only([1, 'a'], int) == [1] and same([int, len]) == [int, len]"),
    "an attribute that the test changes": ("class N:\n    def __init__(s, v): s.v, s.children, s.by = v, [], {}\n    def total(s): return s.v + sum(c.total() for c in s.children) + len(s.by)", "r = N(1)\nr.children.append(N(2))\nr.children.append(N(3))\nr.by['a'] = []\nr.by['a'].append(1)\nassert r.total() == 7 and r.by == {'a': [1]}"),
    "a module that the response lacks": ("def f(x): return x ** 0.5", "assert math.isclose(f(4), 2)"),
    "an end that the test expects": ("def f(): raise StopIteration", "try:\n    f()\n    assert False\nexcept StopIteration:\n    pass"),
    "a global that the test binds": ("n = 0\ndef inc(): pass", "assert n == 0\nfor m in [1]:\n    inc()\nassert n == 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_right_response_passes_on_copies(name) -> None:
    source, test = CASES[name]
    assert judged(source, test) == {"score": 1.0, "passed_share": 1.0}


@pytest.mark.parametrize(
    ("source", "test"),
    [
        ("def f(a): return float(a.sum() + a.ndim)", "import numpy as np\nassert f(np.array([[1, 2]])) == 5"),
        ("import numpy as np\ndef f(): return np.zeros((2, 3), 'int16')", "assert f().shape == (2, 3) and str(f().dtype) == 'int16'"),
        ("def f(a): a += 1", "import numpy as np\nx = np.zeros(3)\nf(x)\nassert x.sum() == 3"),
    ],
)  # fmt: skip
def test_arrays_stay_arrays(source, test) -> None:
    packages = Path(pytest.importorskip("numpy").__file__).parents[1]
    found = judged(source, test, packages=[str(packages)], time_limit=4.0)
    assert found == {"score": 1.0, "passed_share": 1.0}


@pytest.mark.parametrize(
    ("source", "test"),
    [
        ("def enc(s): return chr(233) * 1200000\ndef dec(s): return 0", "assert dec(enc('a') * 2) == 'a'"),
        ("import operator\nadd = operator.add\ndef f(g, x): return 0", "assert f(add, 1) == 1"),
        ("import operator\ndef f(g, x): return 0", "assert f(operator.add, 1) == 1"),
        ("class TestsError(Exception): pass\ndef f(): raise TestsError('x')", "assert f() == 1"),
    ],
)  # fmt: skip
def test_no_response_turns_a_miss_into_no_score(source, test) -> None:
    assert judged(source, test)["score"] == 0.0


@pytest.mark.parametrize(
    ("source", "test"),
    [
        ("def f(x):\n    x.append(x)\n    return len(x)", "x = [1]\nassert f(x) == 2"),
        ("def f():\n    x = ()\n    for i in range(600): x = (i, x)\n    return x", "try:\n    f()\nexcept RecursionError:\n    pass\nassert 1 == 1"),
        ("def f(x): return x", "x = [1]\nx.append(x)\nassert f(x) == 2"),
        ("def f(): return 'x' * 2**23", "try:\n    f()\nexcept ValueError:\n    pass\nassert 1 == 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_encoded_costs_its_test_alone(source, test) -> None:
    function = Code(CodeConfig(time_limit=1.0, scoring="share"), PluginContext())
    truth = {"tests": [test, "assert 1 == 1"]}
    found = function.compute_score(None, f"```python\n{source}\n```", truth)
    assert found["passed_share"] == 0.5
    assert "tests=in_process" in found["first_failure"]


def test_an_attribute_that_a_copy_lacks_names_the_option() -> None:
    source = "from collections import namedtuple\nP = namedtuple('P', 'x')\ndef f(): return P(1)"
    found = judged(source, "assert f().x == 1")
    assert "tests=in_process" in found["first_failure"]
