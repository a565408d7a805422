"""verl's KL estimators, presets in the wrong place: what a person who writes them is told."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("override", ["preset=dapo", "preset.name=dapo", "algorithm.name=dapo", "algorithm=dapo"])  # fmt: skip
def test_a_preset_in_the_wrong_place_leads_to_its_key(problems, override):
    assert any(
        problem.endswith("a preset is chosen by algorithm.preset=dapo")
        for problem in problems(None, override)
    )


@pytest.mark.parametrize(
    ("where", "theirs", "ours"),
    [
        ("in_loss", "low_var_kl", "k3"),
        ("in_loss", "low_var_kl+", "k3+"),
        ("in_loss", "kl", "k1"),
        ("in_loss", "kl+", "k1+"),
        ("in_loss", "mse", "k2"),
        ("in_reward", "low_var_kl", "k3"),
        ("in_reward", "kl+", "k1"),
    ],
)
def test_verls_name_of_a_kl_estimator_leads_to_dovetails(problems, build, where, theirs, ours):
    (problem,) = problems(None, f"algorithm.kl.{where}.estimator={theirs}")
    assert problem.endswith(f'; verl\'s "{theirs}" is "{ours}"')
    assert "did you mean" not in problem
    build(None, f"algorithm.kl.{where}.estimator={ours}")


def test_a_misspelt_estimator_still_gets_the_nearest(problems):
    (problem,) = problems(None, "algorithm.kl.in_loss.estimator=K3")
    assert problem.endswith('did you mean "k3"?')


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ("false", "write algorithm.kl.in_loss=null for no penalty"),
        ("true", "write algorithm.kl.in_loss.coef=WEIGHT, the weight of the penalty"),
        ("0.01", "write algorithm.kl.in_loss.coef=0.01"),
        ("low_var_kl", "write algorithm.kl.in_loss.estimator=k3"),
        ("k1", "write algorithm.kl.in_loss.estimator=k1"),
    ],
)
def test_a_single_value_for_a_kl_penalty_is_told_which_key_it_is(problems, value, advice):
    (problem,) = problems(None, f"algorithm.kl.in_loss={value}")
    assert problem.endswith(f"; {advice}")
