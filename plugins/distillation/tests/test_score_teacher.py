"""The teacher's columns: from a role, a server, or several teachers; and errors of a served teacher."""

from types import SimpleNamespace

import numpy as np
import pytest

from dovetail.batch import Batch, Ragged
from dovetail.dispatch import Future
from dovetail.errors import ConfigError, DataError
from dovetail.interfaces import PluginContext, PluginRef
from dovetail.plugins import make_plugin
from dovetail.sections import ModelSection
from dovetail_distillation.config import DistillConfig, EndpointSection, ScoreTeacherConfig
from dovetail_distillation.endpoint import TeacherError
from dovetail_distillation.score_teacher import ScoreTeacher

COLUMNS = ("teacher_log_probs", "teacher_top_ids", "teacher_top_log_probs")
K = 4


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    lengths = [5, 3, 1, 4]
    mask = Ragged.from_list([rng.random(n) < 0.8 for n in lengths], dtype=bool)
    return Batch(
        {
            "prompt_ids": Ragged.from_list([rng.integers(3, 300, 4) for _ in lengths], np.int64),
            "response_ids": mask.with_values(rng.integers(3, 300, mask.total)),
            "response_mask": mask,
            "temperature": np.ones(4, np.float32),
            "data_source": ["a", "b", None, "a"],
        }
    )


def engine_of(path):
    context = PluginContext(
        role="teacher", trained=False, model=ModelSection(path=str(path), dtype="float32")
    )
    engine = make_plugin(PluginRef(kind="engine", name="fsdp2"), context)
    engine.start()
    return engine


def step_of(**models):
    """Return a step with these models as roles, whose student compares K words."""
    objective = SimpleNamespace(
        ref=SimpleNamespace(kind="objective"),
        config=DistillConfig(name="distill", top_k=K),
    )
    roles = {
        role: SimpleNamespace(
            forward=lambda batch, outputs, own=engine: Future.completed(own.forward(batch, outputs))
        )
        for role, engine in models.items()
    }
    facts = SimpleNamespace(
        required=dict.fromkeys(COLUMNS, "a test"), plugins={"actor.objective": objective}
    )
    return SimpleNamespace(facts=facts, roles=roles)


def stage_of(student, teachers=None, **endpoints):
    from transformers import AutoTokenizer

    config = ScoreTeacherConfig(
        name="score_teacher",
        teachers=teachers or {"default": next(iter(endpoints), "teacher")},
        endpoints=endpoints,
    )
    stage = ScoreTeacher(config, PluginContext(tokenizer=AutoTokenizer.from_pretrained(student)))
    stage.start()
    return stage


def served(server, **settings):
    return EndpointSection(**{"url": server.url, "model": "teacher-1", "retries": 1, **settings})


def assert_same(one, other):
    for name in COLUMNS:
        np.testing.assert_array_equal(one[name].offsets, other[name].offsets)
        np.testing.assert_allclose(one[name].values, other[name].values, atol=2e-5, err_msg=name)


def test_a_server_gives_the_columns_of_the_same_model_as_a_role(batch, student, teacher, server):
    by_role = stage_of(student).run(batch, step_of(teacher=engine_of(teacher)))
    by_server = stage_of(student, served=served(server)).run(batch, step_of())
    assert by_role["teacher_top_ids"].dtype == by_server["teacher_top_ids"].dtype == np.int32
    assert (
        by_role["teacher_top_log_probs"].inner == by_server["teacher_top_log_probs"].inner == (K,)
    )
    assert_same(by_server, by_role)
    shown = batch["response_mask"].values
    assert (by_server["teacher_log_probs"].values[~shown] == 0).all()
    assert by_server["teacher_log_probs"].values[shown].max() < 0


def test_each_sample_is_scored_by_the_teacher_of_its_data_source(batch, student, teacher):
    models = {"teacher": engine_of(teacher), "other": engine_of(student)}
    teachers = {"a": "other", "default": "teacher"}
    found = stage_of(student, teachers).run(batch, step_of(**models))
    for rows, model in (([0, 3], "other"), ([1, 2], "teacher")):
        alone = stage_of(student, {"default": model}).run(batch.take(rows), step_of(**models))
        assert_same(found.take(rows), alone)


def test_a_sample_without_a_teacher_is_refused_by_its_data_source(batch, student, teacher):
    stage = stage_of(student, {"a": "teacher"})
    with pytest.raises(DataError, match=r"'b'; .* a\b"):
        stage.run(batch, step_of(teacher=None))


def test_a_busy_server_is_asked_again(batch, student, server):
    stage = stage_of(student, served=served(server, concurrency=2))
    before = len(server.requests)
    server.alter = lambda number, answer: (503, {}) if number == before + 2 else (200, answer)
    found = stage.run(batch, step_of())
    assert np.isfinite(found["teacher_log_probs"].values).all()
    assert len(server.requests) == before + 5


def no_scores(number, answer):
    return 200, {"choices": [{"text": "", "prompt_logprobs": None}]}


def no_number(number, answer):
    scores = answer["choices"][0]["prompt_logprobs"]
    for word in scores[1].values():
        word["logprob"] = None
    return 200, answer


def other_words(number, answer):
    for entry in answer["choices"][0]["prompt_logprobs"][1:]:
        for word in entry.values():
            word["decoded_token"] = "@" + word["decoded_token"]
    return 200, answer


@pytest.mark.parametrize(
    ("alter", "settings", "error", "said"),
    [
        (lambda n, a: (503, {}), {}, TeacherError, r"answered with status 503 \(2 tries\)"),
        (lambda n, a: (404, a), {"model": "wrong"}, TeacherError, "404.*`wrong` does not exist"),
        (no_scores, {}, TeacherError, "without the field prompt_logprobs"),
        (no_number, {}, TeacherError, "log-probability None .* at position 1"),
        (other_words, {}, ConfigError, "vocabulary .*: .* '@"),
        (None, {"url": "http://127.0.0.1:9"}, TeacherError, "can't be reached"),
        (None, {"auth_env": "DOVETAIL_NO_SUCH_KEY"}, ConfigError, "DOVETAIL_NO_SUCH_KEY"),
    ],
)  # fmt: skip
def test_a_server_that_does_not_score_is_named_before_the_first_step(
    student, server, alter, settings, error, said
):
    server.alter = alter or server.alter
    with pytest.raises(error, match=said) as caught:
        stage_of(student, math=served(server, **settings))
    assert "'math'" in str(caught.value)
    assert isinstance(caught.value, error)


def test_a_server_that_is_too_slow_is_named(student, server):
    import time

    def slow(number, answer):
        time.sleep(0.5)
        return 200, answer

    server.alter = slow
    with pytest.raises(TeacherError, match=r" 0\.05 s \(1 try\)"):
        stage_of(student, math=served(server, timeout=0.05, retries=0))


def test_a_failure_ends_the_step_and_is_no_number(batch, student, server):
    stage = stage_of(student, served=served(server, retries=0))
    before = len(server.requests)
    server.alter = lambda number, answer: (500, {}) if number == before + 2 else (200, answer)
    with pytest.raises(TeacherError, match="status 500"):
        stage.run(batch, step_of())


def test_fewer_words_than_are_compared_are_refused(batch, student, server):
    stage = stage_of(student, served=served(server))

    def few(number, answer):
        scores = answer["choices"][0]["prompt_logprobs"]
        scores[1:] = [dict(list(entry.items())[:2]) for entry in scores[1:]]
        return 200, answer

    server.alter = few
    with pytest.raises(TeacherError, match=r" [12] token id.* top_k=4"):
        stage.run(batch, step_of())


def test_another_temperature_is_refused_of_a_server(batch, student, server):
    stage = stage_of(student, served=served(server))
    warm = batch.with_columns({"temperature": np.full(4, 0.7, np.float32)})
    with pytest.raises(ConfigError, match=r"temperature 0\.7: .* temperature 1"):
        stage.run(warm, step_of())


def test_an_endpoint_that_scores_nothing_is_named(student, server):
    with pytest.raises(ConfigError, match="'spare'"):
        stage_of(student, {"default": "teacher"}, spare=served(server))


def test_an_advantage_from_a_bounded_log_ratio():
    from dovetail_distillation.config import TeacherAdvantageConfig
    from dovetail_distillation.teacher_advantage import TeacherAdvantage

    mask = Ragged.from_list([[True, True, False, True]], dtype=bool)
    of = {
        "old_log_probs": [-0.5, -30.0, -1.0, -1.0],
        "teacher_log_probs": [-40.0, -1.0, -9.0, -1.5],
    }
    columns = {name: mask.with_values(np.array(v, np.float32)) for name, v in of.items()}
    config = TeacherAdvantageConfig(
        name="teacher_advantage", coef=2.0, reward_coef=0.0, min_log_prob=-10.0, max_divergence=9.2
    )
    step = SimpleNamespace(metrics={})
    found = TeacherAdvantage(config, PluginContext()).run(
        Batch({"response_mask": mask, **columns}), step
    )
    # Log-ratios -0.5 + 10 and -10 + 1 have bounded log-probabilities; the first exceeds the bound of the ratio.
    np.testing.assert_allclose(found["advantages"].values, [-18.4, 18.0, 0.0, -1.0], rtol=1e-6)
    assert step.metrics["distill/reverse_kl"] == pytest.approx((9.2 - 9.0 + 0.5) / 3)
