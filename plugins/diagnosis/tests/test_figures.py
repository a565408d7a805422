"""Key figures are found, written and drawn in characters."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from dovetail_diagnosis.figures import ACCURACY, REWARD, bucket_means, key_figure, sparkline


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
