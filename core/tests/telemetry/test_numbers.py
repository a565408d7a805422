"""Numbers are written in few characters, and the ends of their course are found."""

from __future__ import annotations

import math

import pytest

from dovetail.telemetry.numbers import before_and_after, write_figure


@pytest.mark.parametrize(
    ("value", "style", "text"),
    [
        (0.4567, "number", "0.457"),
        (0.00012, "number", "0.00012"),
        (12.3456, "number", "12.35"),
        (0.0, "number", "0.000"),
        (1.2e7, "number", "1.20e+07"),
        (0.875, "percent", "87.5%"),
        (12.5, "percent", "12.5"),
        (4096.4, "length", "4,096"),
        (0.0031, "seconds", "3.1 ms"),
        (59.99, "seconds", "1 min 00 s"),
        (125.0, "seconds", "2 min 05 s"),
        (12000.0, "seconds", "3 h 20 min"),
        (math.nan, "number", "nan"),
        (-math.inf, "percent", "-inf"),
    ],
)
def test_figures_are_written_briefly(value, style, text):
    assert write_figure(value, style) == text


def test_before_and_after_are_held_out_values_and_means_of_training():
    rows = [{"step": 0, "val/loss": 3.0}]
    rows += [{"step": step, "actor/loss": float(step)} for step in range(1, 41)]
    rows += [{"step": 40, "val/loss": 2.0}, {"step": 41, "actor/loss": None, "val/loss": None}]
    ends = before_and_after(rows, {"val/loss": "down", "actor/loss": "down", "val/margin": "up"})
    assert ends == {
        "val/loss": {"before": 3.0, "after": 2.0, "better": "down"},
        "actor/loss": {"before": 5.5, "after": 35.5, "better": "down"},
    }
