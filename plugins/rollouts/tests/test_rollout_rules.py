"""The rules of this package: for each rule a config that it reports, its message, and a config that it accepts."""

from __future__ import annotations

from dovetail_sdk.testing.conformance import RulesConformance

FOUND = {
    "offload_frees_nothing": [
        (["rollout.offload=true", "rollout.name=vllm", "runtime={name: inline, device: cpu}"], "warning", "frees no memory"),
        (["rollout.offload=true", "rollout.name=vllm", "runtime.name=ray"], "warning", "frees no memory"),
    ],
    "partial_rollout_unused": [
        (["rollout.partial_rollout=true"], "warning", "has no effect: trainer on_policy waits"),
        (["rollout.keep_cache=true"], "warning", "rollout.keep_cache=true has no effect"),
    ],
    "best_metric_unknown": [
        (["data.val_files=v.jsonl", "trainer.best_metric=val/mean@8"], "error", "of validation at rollout.validation.n = 1"),
        (["data.val_files=v.jsonl", "trainer.best_metric=val/gsm8k/maen@1"], "error", "val/gsm8k/maen@1"),
        (["data.val_files=v.jsonl", "trainer.best_metric=reward/mean"], "error", "reward/mean"),
        (["trainer.best_metric=val/mean@1"], "error", "data.val_files names no file"),
    ],
}  # fmt: skip
SILENT = {
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


class TestRules(RulesConformance):
    distribution = "dovetail-rollouts"
    found = FOUND
    silent = SILENT
    elsewhere = frozenset({"history_changes", "turn_end_not_stopped"})


def test_the_best_metric_nearest_to_a_misspelt_one_is_named(judge):
    (finding,) = judge(
        "best_metric_unknown",
        {"data": {"val_files": ["v.jsonl"]}},
        "trainer.best_metric=val/gsm8k/maen@4",
        "rollout.validation.n=4",
    )
    assert finding.hint == "set trainer.best_metric=val/gsm8k/mean@4"
