"""Whole runs with a teacher: on the student's samples and on a dataset's examples, planned, refused, trained."""

from pathlib import Path

import pytest
from run_files import steps_of

from dovetail import check, plan, train
from dovetail.errors import ConfigError, DovetailError
from dovetail_sdk.testing import tiny_model_and_tokenizer

ADVANTAGE = "algorithm.stages=[{name: teacher_advantage, reward_coef: 0}]"
SUPERVISED = "trainer={name: supervised, total_steps: 2}"


def run_of(config, *overrides):
    train(config, [*overrides])
    return steps_of(Path(config).parent / "runs" / "tests" / "run")


def test_the_teacher_scores_where_something_reads_its_columns(config):
    found = plan(config, [ADVANTAGE])
    stages = [stage["name"] for stage in found["stages"]]
    assert stages.index("score_teacher") < stages.index("advantage")
    assert stages.index("advantage") < stages.index("teacher_advantage")
    assert "teacher" in {model["role"] for model in found["models"]}


@pytest.mark.parametrize(
    ("overrides", "metric"),
    [
        ([ADVANTAGE], "distill/reverse_kl"),
        (["actor.objective={name: distill, divergence: jsd, top_k: 8}"], "actor/teacher_mass"),
        pytest.param(
            ["actor.objective={name: distill, divergence: k2, coef: 0.1, plus: {name: policy}}"],
            "actor/pg_loss",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            [
                SUPERVISED,
                "actor.objective={name: distill, top_k: 8, plus: {name: nll}}",
                "data.val_files=[{rows}]",
            ],
            "actor/perplexity",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_student_learns_from_its_teacher(config, overrides, metric):
    rows = str(Path(config).parent / "rows.jsonl")
    first, second = run_of(config, *(o.replace("{rows}", rows) for o in overrides))
    assert metric in second
    assert second["actor/grad_norm"] > 0
    assert first["actor/updates"] == 1


def test_forward_kl_falls_on_a_datasets_examples(config):
    steps = run_of(
        config,
        "trainer={name: supervised, total_steps: 12}",
        "data.train_batch_size=8",
        "actor.objective={name: distill, top_k: 16}",
        "actor.optim.lr=5e-3",
    )
    assert steps[-1]["actor/divergence"] < 0.6 * steps[0]["actor/divergence"]


@pytest.mark.nightly
def test_several_teachers_by_data_source(config, student):
    (step, _) = run_of(
        config,
        f"roles.second.path={student}",
        "algorithm.stages=[{name: score_teacher, teachers: {odd: second, default: teacher}}, "
        "{name: teacher_advantage, reward_coef: 0}]",
    )
    # The second teacher, of the odd rows, is the student itself, so their divergence is 0.
    assert step["time/score_teacher"] > 0
    assert step["distill/reverse_kl"] != 0


def test_one_sample_a_prompt_is_enough_where_the_teacher_replaces_the_rewards(config):
    first, _ = run_of(config, ADVANTAGE, "rollout.n=1", "algorithm.advantage=grpo")
    assert first["actor/grad_norm"] > 0
    with pytest.raises(DovetailError, match="needs at least 2"):
        train(config, [ADVANTAGE.replace("0", "0.5"), "rollout.n=1", "experiment=mixed"])


@pytest.mark.parametrize("teachers", ["{even: teacher, odd: teacher}", "{odd: teacher}"])
def test_teachers_need_no_default_where_they_cover_every_source(config, teachers):
    stages = (
        f"algorithm.stages=[{{name: score_teacher, teachers: {teachers}}}, "
        "{name: teacher_advantage, reward_coef: 0, max_divergence: 0.01, min_log_prob: -3}]"
    )
    if "even" not in teachers:
        missing = "no teacher for data_source 'even'; it has teachers for: odd"
        (finding,) = check(str(config), [stages]).errors
        assert missing in finding.message
        assert finding.rule == "score_teacher"
        with pytest.raises(DovetailError, match=missing):
            train(config, [stages])
        return
    assert not check(str(config), [stages]).errors
    first, _ = run_of(config, stages)
    assert abs(first["distill/reverse_kl"]) <= 0.01


def test_a_teacher_with_another_vocabulary_is_refused_by_name(config, tmp_path):
    other = tiny_model_and_tokenizer(tmp_path / "other", vocab_size=280)
    with pytest.raises(DovetailError, match=r"roles\.teacher\.path = .*other"):
        train(config, [ADVANTAGE, f"roles.teacher.path={other}"])
    assert not list(tmp_path.glob("runs/tests/run/metrics.jsonl"))


def test_more_words_than_the_vocabulary_has_are_refused(config):
    with pytest.raises(ConfigError, match=r"301 token ids .* 300"):
        train(config, ["actor.objective={name: distill, top_k: 301}"])


def test_a_role_that_is_not_there_is_named(config):
    teachers = "{name: score_teacher, teachers: {default: techer}}"
    with pytest.raises(DovetailError, match="'techer'"):
        plan(config, [f"algorithm.stages=[{teachers}, {{name: teacher_advantage}}]"])


def test_a_served_teacher_trains_as_the_role_does(config, without_role, server):
    by_role = run_of(config, ADVANTAGE, "trainer.total_steps=1")
    endpoint = f"{{url: '{server.url}', model: teacher-1}}"
    stage = (
        f"{{name: score_teacher, teachers: {{default: served}}, endpoints: {{served: {endpoint}}}}}"
    )
    stages = f"algorithm.stages=[{stage}, {{name: teacher_advantage, reward_coef: 0}}]"
    train(without_role, [stages, "trainer.total_steps=1", "experiment=served"])
    by_server = steps_of(config.parent / "runs" / "tests" / "served")
    for name in ("distill/reverse_kl", "actor/grad_norm", "actor/pg_loss"):
        assert by_server[0][name] == pytest.approx(by_role[0][name], rel=1e-3, abs=1e-5), name
