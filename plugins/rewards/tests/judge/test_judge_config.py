"""Configs that a judge refuses before a run: bad templates, contradictory options, a missing key."""

from __future__ import annotations

import pytest

from dovetail.errors import ConfigError
from dovetail.interfaces import PluginContext
from dovetail_rewards.judge_config import JudgeConfig
from dovetail_rewards.models.judge import JudgeManager
from dovetail_rewards.models.question import Question


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ prompt", "template"),
        ("{{ reponse }}", "'reponse'.*'response'"),
        ("nothing.jinja", "nothing.jinja"),
        ("nothing.jinja2", "nothing.jinja2"),
        ("rubric.tmpl", "rubric.tmpl.*response"),
        ("{{ prompt }} {{ ground_truth }}", "response"),
    ],
)
def test_a_template_with_errors_is_refused_before_a_run(template, message) -> None:
    config = JudgeConfig(url="http://127.0.0.1:9/v1", model="m", template=template)
    with pytest.raises(ConfigError, match=message):
        JudgeManager(config, PluginContext()).start()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"votes": 2}, "temperature=0.*votes=2"),
        ({"votes": 2, "min_votes": 3, "temperature": 1.0}, "min_votes=3.*votes=2"),
        ({"normalise": True, "low": 1.0}, "normalise=true"),
        ({"pattern": "("}, r"pattern='\('"),
    ],
)
def test_what_makes_no_sense_is_refused(config, message) -> None:
    with pytest.raises(ValueError, match=message):
        JudgeConfig(url="http://127.0.0.1:9/v1", model="m", template="{{ response }}", **config)


def test_a_missing_key_is_refused_before_a_run(monkeypatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    config = JudgeConfig(
        url="http://127.0.0.1:9/v1", model="m", template="{{ response }}", auth_env="JUDGE_KEY"
    )
    with pytest.raises(ConfigError, match="JUDGE_KEY"):
        JudgeManager(config, PluginContext()).start()


def test_the_system_message_may_hold_the_response() -> None:
    given = {"url": "http://127.0.0.1:9/v1", "model": "m", "template": "{{ prompt }}"}
    Question(JudgeConfig(**given, system="Rate: {{ response }}"))
    with pytest.raises(ConfigError, match="response"):
        Question(JudgeConfig(**given, system="Rate."))
