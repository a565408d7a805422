"""Checks across fields."""

from __future__ import annotations

from dovetail.config.checks import missing_files


def test_a_mini_batch_that_does_not_divide_the_batch_is_refused(problems):
    mapping = {
        "data": {"train_batch_size": 128},
        "actor": {"mini_batch_size": 48},
    }
    (problem,) = problems(mapping)
    assert problem == (
        "actor.mini_batch_size = 48 (mapping): does not divide data.train_batch_size = 128 "
        "(both count prompts or examples, not samples); nearest that do: 32 and 64"
    )


def test_a_mini_batch_larger_than_the_batch_is_refused(problems):
    (problem,) = problems({"data": {"train_batch_size": 64}, "actor": {"mini_batch_size": 128}})
    assert "larger than data.train_batch_size = 64" in problem
    assert "at most 64" in problem


def test_a_mini_batch_that_fits_and_none_at_all_are_accepted(build):
    for mini in (64, 128, None):
        assert build({"actor": {"mini_batch_size": mini}}).config.actor.mini_batch_size == mini


def test_a_token_budget_below_the_longest_sequence_is_refused_for_every_role(problems):
    found = problems(
        {
            "data": {"max_prompt_length": 100, "max_response_length": 50},
            "actor": {"max_tokens_per_micro_batch": 149},
            "ref": {"max_tokens_per_micro_batch": 10},
        }
    )
    assert [problem.split(" ")[0] for problem in found] == [
        "actor.max_tokens_per_micro_batch",
        "ref.max_tokens_per_micro_batch",
    ]
    assert "100 + 50 = 150 tokens); expected at least 150" in found[0]


def test_a_token_budget_of_exactly_the_longest_sequence_is_accepted(build):
    build(
        {
            "data": {"max_prompt_length": 100, "max_response_length": 50},
            "actor": {"max_tokens_per_micro_batch": 150},
        }
    )


def test_cross_checks_come_together_with_other_problems_but_judge_only_right_values(problems):
    mapping = {"actor": {"mini_batch_size": 48}, "trainer": {"total_epochs": 0}, "model": {}}
    assert len(problems(mapping)) == 3
    wrong_batch = {"actor": {"mini_batch_size": 48}, "data": {"train_batch_size": "128"}}
    assert len(problems(wrong_batch)) == 1


def test_data_files_that_are_not_there_are_named(build, tmp_path):
    there = tmp_path / "a.parquet"
    there.touch()
    config = build(
        {"data": {"train_files": [str(there), "no.parquet"], "val_files": "none.jsonl"}}
    ).config
    found = [str(problem) for problem in missing_files(config)]
    assert len(found) == 2
    assert found[0].startswith('data.train_files[1] = "no.parquet": no such file')


def test_a_profile_of_an_unknown_role_names_the_nearest(problems):
    (problem,) = problems({"profile": {"tool": "torch", "roles": ["actor", "crtic"]}})
    assert "profile.roles[1]" in problem
    assert "did you mean 'critic'?" in problem
    (problem,) = problems({"profile": {"roles": "rollout"}})
    assert "rollout engines" in problem


def test_a_profile_needs_steps_in_order_and_ranks(problems):
    for steps in ([0, 2], [3, 2]):
        (problem,) = problems({"profile": {"steps": steps}})
        assert "profile.steps" in problem
        assert "last step" in problem
    for ranks in ([], [0, -1]):
        (problem,) = problems({"profile": {"ranks": ranks}})
        assert "profile.ranks" in problem


def test_a_role_to_profile_may_be_a_bare_string(build):
    assert build({"profile": {"tool": "memory", "roles": "critic"}}).config.profile.roles == (
        "critic",
    )
