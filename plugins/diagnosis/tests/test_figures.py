"""Key figures are found, written and drawn in characters."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from dovetail.telemetry.figures import (
    ACCURACY,
    REWARD,
    bucket_means,
    key_figure,
    sparkline,
    write_figure,
)


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


def test_accuracy_is_found_whatever_n_it_was_sampled_with():
    assert ACCURACY.value({"val/gsm8k/acc@4": 0.1, "val/acc@4": 0.5}) == 0.5
    assert ACCURACY.value({"val/gsm8k/acc@4": 0.1}) is None
    assert REWARD.value({"reward/mean": math.nan}) is None


@pytest.mark.parametrize(
    ("metric", "label", "short"),
    [
        ("actor/margin", "Margin", "margin"),
        ("val/loss", "Held-out loss", "val_loss"),
        ("critic/value_loss", "Value loss", "value_loss"),
        ("roles/prm/loss", "Loss of prm", "prm/loss"),
        ("val/prm/loss", "Held-out loss of prm", "prm/val_loss"),
        ("bleu", "Bleu", "bleu"),
        ("val", "Val", "val"),
    ],
)
def test_a_key_figure_is_named_after_its_metric_and_its_role(metric, label, short):
    figure = key_figure(metric, "down")
    assert (figure.label, figure.short, figure.better) == (label, short, "down")
    assert figure.value({metric: 0.5}) == 0.5


@given(st.lists(st.floats(-1e6, 1e6), max_size=200), st.integers(1, 30))
def test_a_sparkline_is_never_wider_than_asked(values, width):
    assert len(sparkline(values, width)) == min(len(values), width)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=100), st.integers(1, 10))
def test_bucket_means_cover_every_value_once(values, count):
    means = bucket_means(values, count)
    assert min(values) - 1e-9 <= min(means)
    assert max(means) <= max(values) + 1e-9
    if len(values) % len(means) == 0:
        assert sum(means) / len(means) == pytest.approx(sum(values) / len(values), abs=1e-6)


def test_a_sparkline_rises_with_its_series():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, 1.0]) == "▄▄"
    assert sparkline([math.nan]) == ""
