"""Validation is shown as a few figures with ±, instead of all metrics."""

from __future__ import annotations

import pytest

from dovetail_diagnosis.figures import (
    ACCURACY,
    SCORE,
    key_figure,
    validation_figure,
    write_best,
)


def with_ends(name, value, half):
    return {name: value, f"{name}/low": value - half, f"{name}/high": value + half}


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        (with_ends("val/mean@1", 0.312, 0.0213), "0.312 ± 0.021"),
        (with_ends("val/mean@1", 7.25, 0.25), "7.250 ± 0.25"),
        (with_ends("val/mean@1", 0.5, 0.0), "0.500"),
        ({"val/mean@1": 0.5}, "0.500"),
        ({"val/mean@1": 0.5, "val/mean@1/low": None, "val/mean@1/high": 0.6}, "0.500"),
        ({}, ""),
    ],
)
def test_an_interval_is_read_as_plus_or_minus_half_its_width(metrics, text):
    assert SCORE.read(metrics) == text


def test_an_accuracy_is_a_share_and_a_score_is_not_one_even_where_it_could_be():
    assert ACCURACY.read(with_ends("val/acc@1", 0.312, 0.0213)) == "31.2% ± 2.1"
    assert SCORE.read({"val/mean@1": 1.0}) == "1.000"


@pytest.mark.parametrize(
    ("name", "short", "label"),
    [
        ("val/acc@1", "accuracy", "Validation accuracy"),
        ("val/acc@16", "acc@16", "Validation acc@16"),
        ("val/mean@1", "score", "Validation score"),
        ("val/mean@16", "mean@16", "Validation mean@16"),
        ("val/mean@11", "mean@11", "Validation mean@11"),
        (None, "score", "Validation score"),
    ],
)
def test_accuracy_is_only_what_the_reward_calls_right_in_single_answers(name, short, label):
    assert validation_figure(name).short_for(name) == short
    assert validation_figure(name).label_for(name) == label


def test_a_mean_score_is_not_shown_beside_an_accuracy():
    both = {"val/mean@1": 0.55, "val/acc@1": 0.5}
    assert (ACCURACY.value(both), SCORE.value(both)) == (0.5, None)
    assert (ACCURACY.value({"val/mean@1": 0.5}), SCORE.value({"val/mean@1": 0.5})) == (None, 0.5)


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        ("val/mean@4", 0.648, "step 3, val/mean@4 0.648"),
        ("val/gsm8k/pass@4/low", 0.5, "step 3, val/gsm8k/pass@4/low 50.0%"),
        ("val/acc@4", 0.5, "step 3, val/acc@4 50.0%"),
        ("val/best@4", 0.5, "step 3, val/best@4 0.500"),
        ("val/mean@1", 7.25, "step 3, val/mean@1 7.250"),
        ("val/response_length/mean", 0.5, "step 3, val/response_length/mean 0.500"),
    ],
)
def test_the_best_checkpoint_is_told_with_its_figure(metric, value, text):
    assert write_best({"step": 3, "metric": metric, "value": value, "path": "p"}) == text


@pytest.mark.parametrize("best", [None, {}, "step 3", {"step": 3, "value": None}])
def test_without_a_best_checkpoint_nothing_is_told(best):
    assert write_best(best) == ""


@pytest.mark.parametrize(
    ("metric", "label", "short", "style"),
    [
        ("actor/loss", "Loss", "loss", "number"),
        ("val/loss", "Held-out loss", "val_loss", "number"),
        ("val/accuracy", "Held-out accuracy", "val_accuracy", "percent"),
        ("actor/margin", "Margin", "margin", "number"),
        ("val/judge/loss", "Held-out loss of judge", "judge/val_loss", "number"),
        ("reward/mean", "Reward", "reward", "number"),
    ],
)
def test_key_figures_are_named_by_their_metric(metric, label, short, style):
    figure = key_figure(metric, "down")
    assert (figure.label, figure.short, figure.style) == (label, short, style)
    assert figure.title == f"{label} (lower is better)"
