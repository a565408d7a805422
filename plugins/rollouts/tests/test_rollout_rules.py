"""The rules of this package: a config that trips each, what it then says, and a config that it leaves alone."""

from __future__ import annotations

import pytest

from dovetail.plugins.rules import installed_rules

CASES = {
    "offload_frees_nothing": [
        ("here", ["rollout.offload=true", "rollout.name=vllm", "runtime={name: inline, device: cpu}"], "warning", "frees no memory"),
        ("Ray's CPUs", ["rollout.offload=true", "rollout.name=vllm", "runtime.name=ray"], "warning", "frees no memory"),
    ],
    "partial_rollout_unused": [
        ("on policy", ["rollout.partial_rollout=true"], "warning", "cuts nothing short: trainer on_policy waits"),
        ("cache", ["rollout.keep_cache=true"], "warning", "rollout.keep_cache=true keeps nothing"),
    ],
    "best_metric_unknown": [
        ("n", ["data.val_files=v.jsonl", "trainer.best_metric=val/mean@8"], "error", "no figure of validation at rollout.validation.n = 1"),
        ("misspelt", ["data.val_files=v.jsonl", "trainer.best_metric=val/gsm8k/maen@1"], "error", "val/gsm8k/maen@1"),
        ("of training", ["data.val_files=v.jsonl", "trainer.best_metric=reward/mean"], "error", "reward/mean"),
        ("no files", ["trainer.best_metric=val/mean@1"], "error", "data.val_files names no file"),
    ],
}  # fmt: skip
QUIET = {
    "offload_frees_nothing": [
        ["rollout.name=vllm", "runtime={name: inline, device: cpu}"],
        ["rollout.name=vllm", "rollout.offload=true", "runtime={name: ray, gpus_per_node: 2}"],
    ],
    "partial_rollout_unused": [[]],
    "best_metric_unknown": [
        [],
        ["data.val_files=v.jsonl", "trainer.best_metric=val/openai/gsm8k/pass@4", "rollout.validation.n=6"],
        ["data.val_files=v.jsonl", "trainer.best_metric=val/majority@6/low", "rollout.validation.n=6"],
        ["data.val_files=v.jsonl", "trainer.best_metric=val/response_length/mean"],
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "overrides", "severity", "words"),
    [
        pytest.param(rule, overrides, severity, words, id=f"{rule}: {title}")
        for rule, cases in CASES.items()
        for title, overrides, severity, words in cases
    ],
)
def test_it_is_found_named_and_can_be_mended(judge, rule, overrides, severity, words):
    (finding,) = judge(rule, {}, *overrides)
    assert finding.rule == rule
    assert finding.severity == severity
    assert words in finding.message
    assert finding.hint is not None
    assert "=" in finding.hint


@pytest.mark.parametrize(
    ("rule", "overrides"),
    [
        pytest.param(rule, overrides, id=f"{rule}: {' '.join(overrides) or 'defaults'}")
        for rule, cases in QUIET.items()
        for overrides in cases
    ],
)
def test_it_is_silent_where_all_is_well(judge, rule, overrides):
    assert judge(rule, {}, *overrides) == []


def test_the_best_metric_nearest_to_a_misspelt_one_is_named(judge):
    (finding,) = judge(
        "best_metric_unknown",
        {"data": {"val_files": ["v.jsonl"]}},
        "trainer.best_metric=val/gsm8k/maen@4",
        "rollout.validation.n=4",
    )
    assert finding.hint == "set trainer.best_metric=val/gsm8k/mean@4"


def test_every_rule_is_tried_here_and_says_what_it_catches():
    rules = [rule for rule in installed_rules() if rule.distribution == "dovetail-rollouts"]
    elsewhere = {"history_changes", "turn_end_not_stopped"}
    assert {rule.name for rule in rules} == CASES.keys() | elsewhere
    assert CASES.keys() == QUIET.keys()
    for rule in rules:
        assert len(rule.doc.split()) > 10
