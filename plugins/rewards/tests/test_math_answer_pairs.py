r"""Pairs of answer and ground truth that `math` and `dapo_math` accept or refuse, one pair per line: `answer ~ ground truth`."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Literal

import pytest
from hypothesis import given, strategies as st

from dovetail.interfaces import PluginContext
from dovetail_rewards.config import DapoMathConfig, MathConfig
from dovetail_rewards.functions.dapo_math import DapoMath
from dovetail_rewards.functions.math_answer import MathAnswer

EQUAL = r"""
5 ~ 5
5.0 ~ 5
5. ~ 5
+5 ~ 5
-0 ~ 0
.5 ~ 0.5
1/2 ~ 0.5
-1/2 ~ \frac{-1}{2}
\dfrac12 ~ \frac{1}{2}
\frac{10}{4} ~ 2.5
1,234 ~ 1234
1{,}234 ~ 1234
1 000 ~ 1000
$1,000 ~ 1000
2,345,678 ~ 2345678
\frac{1,000}{3} ~ 1000/3
\frac{\pi}2 ~ \frac{\pi}{2}
4\sqrt{3} ~ 4 \sqrt 3
2^{100} ~ 2^{100}
10000000! ~ 10000000!
$$5$$ ~ 5
\( \frac{1}{2} \) ~ 0.5
1\frac{2}{3} ~ \frac{5}{3}
137\frac{1}{2} ~ \frac{275}{2}
\frac{275}{2} ~ 137\frac{1}{2}
2\frac{1}{2} ~ 2.5
2.5 ~ 2\frac12
2 \dfrac{1}{2} ~ 2.5
2\,\tfrac12 ~ 2.5
$2$ $\frac{1}{2}$ ~ 2.5
1 1/2 ~ 1.5
1 1/2 ~ 1\frac12
1 1/2. ~ 1.5
-1\frac{1}{2} ~ -1.5
1,000\frac12 ~ 1000.5
1{,}000\frac12 ~ 1000.5
x = 5 ~ 5
5 ~ x = 5
5 = x ~ x = 5
x = 5 ~ x=5.0
x = 0.5 ~ x=\frac12
x = 2\frac12 ~ 2.5
$x = 5$ ~ 5
\(x = 5\) ~ 5
x := 5 ~ 5
= 5 ~ 5
x_1 = 5 ~ 5
x' = 3 ~ 3
\theta = 30^\circ ~ 30
AB = 5 ~ 5
\overline{AB} = 5 ~ 5
\angle ABC = 60^\circ ~ 60^\circ
\text{Area} = 12 ~ 12
f(3) = 7 ~ 7
f(x) = 3x ~ 3x
f^{-1}(3) = 2 ~ 2
y = 3x ~ y=3x
3x = y ~ y = 3x
3x ~ y = 3x
x = y ~ y
P(X=3) = \frac14 ~ 0.25
\sum_{k=1}^{10} k = 55 ~ 55
\sin\theta = \frac{3}{5} ~ \frac35
m+n = 34 ~ 34
$m + n = 34$ ~ 34
m - n = 3 ~ 3
100m+n = 234 ~ 234
xy = 6 ~ 6
x^2+y^2 = 25 ~ 25
\frac{m}{n} = \frac12 ~ 0.5
m+n = 21+13 = 34 ~ 34
x = \frac{10}{2} = 5 ~ 5
21+13 = 34 ~ 34
a=b=c=2 ~ 2
2x = 10 ~ 2x=10
n! = 120 ~ n!=120
P = (1,2) ~ (1,2)
S = \{1,2\} ~ \{1,2\}
x = \$5 ~ 5
50% ~ 50
50\% ~ 50
50 ~ 50\%
12\frac12\% ~ 12.5\%
5 cm ~ 5
5 ~ 5 cm
5 cm ~ 5\text{ cm}
5 centimeters ~ 5 cm
12\,\text{cm}^2 ~ 12 \text{ cm}^2
4.5\text{ m} ~ 4.5
2\frac12 \text{ cm} ~ 2.5
\$5 ~ 5 dollars
\$1{,}250.00 ~ 1250
5 degrees ~ 5^\circ
22\frac12^\circ ~ 22.5
10 square units ~ 10
(1,2) ~ (1, 2)
\left(1,2\right) ~ (1,2)
[0,1) ~ [0, 1)
(1,234) ~ (1,234)
3:4 ~ 3:4
\varnothing ~ \emptyset
\emptyset ~ \varnothing
x>3 ~ x > 3
\text{East} ~ east
No solution ~ \text{no solution}
A. ~ A
17_{8} ~ 17_8
（1，2） ~ (1,2)
［0，1） ~ [0,1)
｛1，2｝ ~ \{1,2\}
1，2 ~ 1,2
1、2 ~ 1,2
1，234 ~ 1234
１２ ~ 12
３．１４ ~ 3.14
－3 ~ -3
1／2 ~ 0.5
12。 ~ 12
(1,2)。 ~ (1,2)
50％ ~ 50
3：4 ~ 3:4
x＝5 ~ 5
m＋n＝34 ~ 34
x＞3 ~ x>3
￥5 ~ 5
Ｂ ~ B
答案 ~ 答案
∅ ~ \emptyset
−5 ~ -5
–5 ~ -5
2√3 ~ 2\sqrt{3}
2½ ~ 2.5
x²+1 ~ x^2+1
45° ~ 45
"""
"""Pairs that are equal in normalised notation, so also under `verify: text`."""

EQUAL_BY_VALUE = r"""
1+x ~ x+1
x^2+2x+1 ~ (x+1)^2
2x ~ 2\cdot x
e^{x} ~ \mathrm{e}^x
ab ~ ba
\frac{x}{2} ~ \frac12 x
2\sin x\cos x ~ \sin 2x
\sin^2 x+\cos^2 x ~ 1
\sqrt{8} ~ 2\sqrt{2}
\frac{\sqrt2}{2} ~ \frac{1}{\sqrt2}
2^{10} ~ 1024
2^{-1} ~ \frac{1}{2}
10^{-3} ~ 0.001
3! ~ 6
\binom{5}{2} ~ 10
5\times3 ~ 15
5·3 ~ 15
２＋３ ~ 5
x=\sqrt{8} ~ 2\sqrt2
y - 3x = 0 ~ y = 3x
2y = 6x ~ y=3x
y + x = 5 ~ x+y=5
x^2+y^2=25 ~ y^2+x^2=25
a = b ~ b = a
x=3,x=-3 ~ 3,-3
x=1 \text{ or } x=2 ~ 1,2
x=1 or x=2 ~ x=1, x=2
50\% ~ 0.5
0.5 ~ 50\%
25 apples ~ 25
5 m ~ 5
10\sqrt{2}\text{ units} ~ 10\sqrt2
(1\frac12, 3) ~ (1.5, 3)
(1 1/2, 3) ~ (\frac32, 3)
2\frac{1}{2}\pi ~ \frac{5\pi}{2}
1\frac12 x ~ 1.5x
x^2\frac12 ~ \frac{x^2}{2}
2\frac{\pi}{3} ~ \frac{2\pi}{3}
2\cdot\frac12 ~ 1
\left( 3, \frac{\pi}{2} \right) ~ (3,\frac{1}{2}\pi)
\{\} ~ \varnothing
\{2, 1\} ~ \{1, 2\}
2,1 ~ 1, 2
1 and 2 ~ 1, 2
1,000, 2,000 ~ 2,000, 1,000
3\pm2\sqrt{2} ~ 3+2\sqrt2, 3-2\sqrt2
x \in [0,1] ~ [0,1]
x\in(-1,3) ~ (-1,3)
(3,\infty) ~ x > 3
[1,2]\cup[3,4] ~ [3,4]\cup[1,2]
(0,\frac{1}{2}) ~ (0,0.5)
（－∞，3］ ~ (-\infty,3]
（0，+∞） ~ (0, \infty)
3<x ~ x>3
x≥3 ~ x\ge3
2:3 ~ 2/3
\begin{pmatrix} 1 \\ 0.5 \end{pmatrix} ~ \begin{pmatrix} 1 \\ \frac12 \end{pmatrix}
\begin{bmatrix}1&2\\3&4\end{bmatrix} ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}
(A) ~ A
A ~ \text{(A)}
"""

OTHER = r"""
6 ~ 5
50 ~ 5
-3 ~ 3
0 ~ 1
1,234 ~ 1.234
12,34 ~ 1234
1e3 ~ 13
10^3 ~ 103
2^3 ~ 6
5! ~ 5
0.33 ~ \frac13
3.14 ~ \pi
\infty ~ -\infty
2i ~ 2
5x ~ 5
5\pi ~ 5
\frac{2}{1} ~ \frac{1}{2}
99999999999999999999 ~ 100000000000000000000
4 ~ 1\frac{2}{3}
\frac{2}{3} ~ 1\frac{2}{3}
\frac{1371}{2} ~ 137\frac{1}{2}
1 1/2 ~ 5.5
1 1/2 ~ 1
1 1/2 ~ 0.5
10.5 ~ 2\frac12
1 ~ 2\frac12
\frac{1}{2} 5 ~ \frac{1}{25}
2\frac{-1}{2} ~ 1.5
x\frac{-1}{2} ~ x-\frac12
1\frac{2}{0} ~ 2
2^\frac{1}{2} ~ 1
\frac{3}{2}^2 ~ 3/4
\frac{1}{2},345 ~ \frac{1}{2345}
1.5\frac12 ~ 151/200
x = -1/2 ~ y = -1/2
x = -\frac{1}{2} ~ y = -\frac{1}{2}
x=3 ~ y=3
y = 3x ~ x = 3x
x = 2y ~ y = 2x
x_1 = 5 ~ x_2 = 5
AB = 5 ~ CD = 5
\theta = 30 ~ \phi = 30
m+n = 34 ~ a+b = 34
a-b = 5 ~ x+y = 5
2x = 10 ~ 10
2 \cdot x = 10 ~ 10
2*x=10 ~ 10
10=2x ~ 10
5x = 5 ~ 5
x+x = 10 ~ 10
x^2 = 9 ~ 9
x^{2} = 9 ~ 9
x^3=8 ~ 8
x\cdot x = 4 ~ 4
x(x+1) = 6 ~ 6
(x-2)^2 = 16 ~ 16
1/x = 4 ~ 4
\frac{1}{x} = 4 ~ 4
x^{-1} = 2 ~ 2
x/2 = 5 ~ 5
\frac{x}{2} = 5 ~ 5
-x=5 ~ 5
- x = 5 ~ 5
-y = 3 ~ y = 3
3x - 2 = 7 ~ 7
x+1 = 5 ~ 5
5 - x = 2 ~ 2
\sqrt{x} = 3 ~ 3
\sqrt{x+1} = 3 ~ 3
|x| = 3 ~ 3
x! = 6 ~ 6
e^x = 5 ~ 5
2^x = 8 ~ 8
\ln x = 2 ~ 2
\log_2 x = 3 ~ 3
2\theta = 60 ~ 60
2\pi r = 10\pi ~ 10\pi
2x = 10 ~ x = 10
x^2 = 9 ~ x = 9
x = 3 ~ x^2 = 9
10 ~ 2x = 10
25 ~ x^2+y^2=25
5 ~ x = 6
x=2=3 ~ 3
x=1=2=3 ~ 3
x=0=3 ~ 3
2 = 3 ~ 3
x=5=6 ~ 5
x = 5, y = 6 ~ 5
x = 12, y = 34 ~ 34
a = 3; b = 4 ~ 4
a=3 and b=4 ~ 4
x = 12 \text{ or } x = 34 ~ 34
x = 12 \lor x = 34 ~ 34
x=1 \quad y=2 ~ 2
\begin{cases} x=1 \\ y=2 \end{cases} ~ 2
a=3,b=4 ~ a=4,b=3
x = 5y ~ 5
x = 5 + y ~ 5
x = ~ 5
m+n = 35 ~ 34
m+n <= 34 ~ 34
x > 5 ~ 5
x \neq 5 ~ 5
m+n ~ 34
2x＝10 ~ 10
x＝5 ~ y=5
5, 6 ~ 5
5 or 6 ~ 5
5 ~ 5, 6
1,2 ~ 12
1，2 ~ 12
1、2 ~ 12
(1,2) ~ (2,1)
（1，2） ~ (2,1)
(1,2) ~ 12
(1,234) ~ 1234
(12,345) ~ (12345)
(1, 23) ~ (12, 3)
[0,1] ~ [0,1)
［0，1） ~ [0,1]
\{1,2\} ~ (2,1)
\pm3 ~ 3
3+2\sqrt2 ~ 3\pm2\sqrt2
x>3 ~ x\ge3
x>3 ~ y>3
(-\infty,3) ~ (-\infty,3]
\varnothing ~ 0
\{0\} ~ \emptyset
3:4 ~ 4:3
3：4 ~ 34
3:30 ~ 3:00
12。5 ~ 12
5。1 ~ 5
５ ~ 6
－3 ~ 3
３．５ ~ 35
2² ~ 22
½ ~ 12
50％ ~ 5
5 cm ~ 6
5 feet ~ 5 inches
5\text{ cm} ~ 5\text{ m}
5\text{ cm} ~ 5\text{ cm}^2
5 km ~ 5 miles
5 hours ~ 5 minutes
5 kg ~ 5 grams
\$5 ~ 5 cents
50\% ~ 50^\circ
60 degrees ~ 60 percent
0.5% ~ 50
x+2 ~ x+1
x ~ y
2x ~ x^2
x/2 ~ 2/x
e^x ~ e^{-x}
f(x) ~ g(x)
f(x)=x^2+1 ~ f(x)=x^2-1
\sin x ~ \cos x
1/2x+1 ~ 1/(2x+1)
\begin{pmatrix}1&2\end{pmatrix} ~ \begin{pmatrix}2&1\end{pmatrix}
\text{West} ~ east
east ~ seat
evil ~ live
listen ~ silent
not odd ~ odd
A ~ B
A or B ~ A
是 ~ 否
. ~ 5
\frac{ ~ 5
"""

Verify = Literal["text", "symbolic"]


def table(lines: str) -> list[tuple[str, str]]:
    pairs = [tuple(line.split(" ~ ")) for line in lines.strip().splitlines()]
    return [(answer, truth) for answer, truth in pairs]


@cache
def functions(verify: Verify) -> tuple[MathAnswer, DapoMath]:
    math = MathAnswer(MathConfig(processes=1, verify=verify), PluginContext())
    return math, DapoMath(DapoMathConfig(processes=1, verify=verify), PluginContext())


def right(answer: str, truth: str, verify: Verify) -> bool:
    """Return whether the functions accept the answer; both must agree."""
    math, dapo = functions(verify)
    first = math.compute_score(None, f"\\boxed{{{answer}}}", truth)["correct"]
    second = dapo.compute_score(None, f"Answer: {answer}", truth)["correct"]
    assert first == second
    return bool(first)


@pytest.mark.parametrize(("answer", "truth"), table(EQUAL))
@pytest.mark.parametrize("verify", ["text", "symbolic"])
def test_answers_equal_in_one_notation_are_right(answer, truth, verify) -> None:
    assert right(answer, truth, verify)


@pytest.mark.parametrize(("answer", "truth"), table(EQUAL_BY_VALUE))
def test_answers_of_equal_value_are_right(answer, truth) -> None:
    assert right(answer, truth, "symbolic")


@pytest.mark.parametrize(("answer", "truth"), table(OTHER))
@pytest.mark.parametrize("verify", ["text", "symbolic"])
def test_other_answers_are_wrong(answer, truth, verify) -> None:
    assert not right(answer, truth, verify)


@st.composite
def mixed_numbers(draw: st.DrawFn) -> tuple[int, int, int]:
    """Generate the whole part a, and the fraction b / c with b < c."""
    denominator = draw(st.integers(2, 200))
    return (
        draw(st.integers(0, 10**6)),
        draw(st.integers(1, denominator - 1)),
        denominator,
    )


@given(number=mixed_numbers(), command=st.sampled_from(["frac", "dfrac", "tfrac", "plain"]))
@pytest.mark.parametrize("verify", ["text", "symbolic"])
def test_a_mixed_number_equals_its_value_and_none_near_it(verify, number, command) -> None:
    a, b, c = number
    mixed = f"{a} {b}/{c}" if command == "plain" else f"{a}\\{command}{{{b}}}{{{c}}}"
    value = a + Fraction(b, c)
    joined = Fraction(int(f"{a}{b}"), c)
    near = {joined, a * Fraction(b, c), Fraction(a), Fraction(b, c), value + 1, a - Fraction(b, c)}
    assert right(mixed, str(value), verify)
    assert right(str(value), mixed, verify)
    for other in near - {value}:
        assert not right(mixed, str(other), verify)
        assert not right(str(other), mixed, verify)
