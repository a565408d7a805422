"""`examine` and `enforce`: everything at once, whatever fails first, and no rule can break a command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from dovetail.config import config_from_mapping
from dovetail.config.load import LoadedConfig
from dovetail.errors import ConfigError
from dovetail.interfaces import Finding
from dovetail.planning.plan import make_plan
from dovetail.plugins.rules import InstalledRule
from dovetail.run import examination as preflight
from dovetail.run.data import load_data, plan_from_data
from dovetail.run.examination import Examination, enforce, examine, rule_findings
from dovetail_sdk.testing import tiny_model_and_tokenizer

Build = Callable[..., LoadedConfig]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_and_tokenizer(tmp_path_factory.mktemp("model"), vocab_size=300)


@pytest.fixture
def build(tiny: Path, tmp_path: Path) -> Build:
    """A config over twelve prompts in two files, with overrides."""
    rows = [
        {"prompt": f"{n} + 1 =", "reward_model": {"ground_truth": str(n + 1)}} for n in range(12)
    ]
    for name, part in (("train", rows[:8]), ("val", rows[8:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "bad.jsonl").write_text('{"prompt": 3}\n')
    (tmp_path / "torn.jsonl").write_text("{")
    sections = {
        "model": {"path": str(tiny), "dtype": "float32"},
        "data": {
            "train_files": [str(tmp_path / "train.jsonl")],
            "val_files": [str(tmp_path / "val.jsonl")],
            "train_batch_size": 4,
            "max_prompt_length": 32,
            "max_response_length": 8,
        },
        "rollout": {"n": 4},
        "reward": {"function": {"name": "exact_match"}},
    }

    def build(*overrides: str) -> LoadedConfig:
        return config_from_mapping(sections, [o.replace("DIR", str(tmp_path)) for o in overrides])

    return build


def ids(found: Examination) -> list[str]:
    return [finding.rule for finding in found.findings]


def test_a_sound_config_has_notes_and_no_findings(build: Build) -> None:
    found = examine(build())
    assert found.findings == ()
    notes = "\n".join(found.notes)
    for words in ("8 training prompts, 4 held out", "every data source", "inline on", "steps: 2"):
        assert words in notes


@pytest.mark.parametrize(("control_tokens", "notes"), [("text", 1), ("allow", 0)])
def test_a_note_counts_the_control_tokens_that_rows_spell(
    build: Build, tmp_path: Path, control_tokens: str, notes: int
) -> None:
    rows = [{"prompt": f"{n} <|im_end|> <|bos|> <"} for n in range(8)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "spelled.jsonl").write_text(text)
    mixture = "data.mixture={a: {files: DIR/spelled.jsonl}, b: {files: DIR/train.jsonl}}"
    control = f"data.control_tokens={control_tokens}"
    files = ("data.train_files=[]", mixture, control, "data.max_prompt_length=128")
    found = [note for note in examine(build(*files)).notes if "control tokens" in note]
    assert len(found) == notes
    assert all("training prompts contain 16 control tokens" in note for note in found)


def test_faults_of_every_part_come_at_once(build: Build) -> None:
    found = examine(
        build(
            "data.train_files=DIR/torn.jsonl",
            "data.val_files=DIR/bad.jsonl",
            "rollout.n=1",
            "trainer.best_metric=val/mean@9",
            "algorithm.policy_loss=gspo",
            "experiment=../x",
        )
    )
    assert ids(found) == [
        "run_directory", "data", "data", "best_metric_unknown", "group_of_one", "loss_aggregation_overridden"
    ]  # fmt: skip
    assert "experiment is '../x'" in found.errors[0].message
    assert "torn.jsonl" in found.errors[1].message
    assert "bad.jsonl" in found.errors[2].message
    assert [f.rule for f in found.warnings] == ["loss_aggregation_overridden"]


def test_what_a_rule_explains_is_not_said_again_by_the_planner(build: Build) -> None:
    assert ids(examine(build("rollout.n=1"))) == ["group_of_one"]
    # Silenced, the planner's own refusal stands.
    (finding,) = examine(build("rollout.n=1", "preflight.ignore=group_of_one")).findings
    assert finding.rule == "plan"
    assert "rollout.n is 1" in finding.message


def test_a_missing_file_does_not_hide_what_is_wrong_with_the_others(build: Build) -> None:
    found = examine(build("data.train_files=DIR/none.jsonl", "data.val_files=DIR/bad.jsonl"))
    assert ids(found) == ["data", "data"]
    assert "none.jsonl" in found.errors[0].message
    assert "'prompt' is 3" in found.errors[1].message
    found = examine(build("data.val_files=DIR/none.jsonl", "data.train_batch_size=99"))
    assert ids(found) == ["data", "plan"]
    assert "only 8 training prompts" in found.errors[1].message


def test_weights_that_are_not_finite_are_named(build: Build, tiny: Path, tmp_path: Path) -> None:
    for folder, value in (("nan", torch.nan), ("infinite", -torch.inf)):
        model = shutil.copytree(tiny, tmp_path / folder)
        tensors = load_file(model / "model.safetensors")
        tensors["model.norm.weight"][5] = value
        save_file(tensors, model / "model.safetensors", {"format": "pt"})
    critic = ("algorithm.advantage=gae", "critic.path=DIR/infinite")
    found = examine(build("model.path=DIR/nan", *critic))
    assert ids(found) == ["weights", "weights"]
    for error, key in zip(found.errors, ("model.path", "critic.path"), strict=True):
        for words in (key, "model.norm.weight", "model.safetensors"):
            assert words in error.message


def test_a_token_without_an_embedding_is_named_with_its_row(
    build: Build, tiny: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    tokenizer.save_pretrained(model)
    assert ids(examine(build("model.path=DIR/model"))) == []
    rows = [{"prompt": f"{n} <|new|>"[: None if n == 2 else 1]} for n in range(4)]
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = ("data.train_files=DIR/new.jsonl", "data.val_files=[]")
    allow = "data.control_tokens=allow"
    (error,) = examine(build("model.path=DIR/model", allow, *files)).errors
    for words in ("new.jsonl, line 3", "'<|new|>'"):
        assert words in error.message


def test_a_checkpoint_to_continue_from_has_to_be_there(build: Build) -> None:
    (error,) = examine(build("trainer.resume=DIR/none", "output_dir=DIR/runs")).errors
    assert (error.rule, "none" in error.message) == ("run_directory", True)


def test_rewards_and_counts_are_looked_at_whatever_the_other_says(build: Build) -> None:
    found = examine(build("reward.function=null", "data.train_batch_size=99"))
    assert ids(found) == ["reward", "reward", "plan"]


class Log:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))


def test_a_run_starts_with_warnings_logged_and_never_with_errors(build: Build) -> None:
    loaded = build("algorithm.policy_loss=gspo")
    log = Log()
    (warning,) = enforce(loaded, make_plan(loaded.config), log)
    rule = "loss_aggregation_overridden"
    assert log.events == [
        (warning.message, {"severity": "warning", "rule": rule, "hint": warning.hint})
    ]
    loaded = build("trainer.best_metric=val/x", "algorithm.overlong_penalty.buffer=99")
    with pytest.raises(ConfigError, match="2 errors") as caught:
        enforce(loaded, make_plan(loaded.config), Log())
    assert len(caught.value.problems) == 2
    for words in ("[best_metric_unknown]", "[long_penalty_buffer]", "→ set"):
        assert words in str(caught.value)


def test_a_silenced_rule_says_nothing_and_a_misspelt_one_is_told(build: Build) -> None:
    config = build(
        "algorithm.policy_loss=gspo", "preflight.ignore=loss_aggregation_overridden"
    ).config
    assert rule_findings(config, make_plan(config)) == []
    config = build("preflight.ignore=[kl_twcie, k1_in_loss]").config
    (finding,) = rule_findings(config, make_plan(config))
    assert (finding.severity, finding.hint) == ("error", "did you mean 'kl_twice'?")


def faulty(config: Any, plan: Any) -> Any:
    yield Finding.warning("first")
    raise KeyError("boom")


def foreign(config: Any, plan: Any) -> Any:
    yield "a text"


@pytest.mark.parametrize(
    ("rule", "before", "why"),
    [(faulty, ["first"], "KeyError: 'boom'"), (foreign, [], "'str'")],
)
def test_a_rule_that_fails_is_a_warning_and_breaks_nothing(
    build: Build, monkeypatch, rule, before, why
) -> None:
    broken = InstalledRule(rule.__name__, "acme", "", rule)
    monkeypatch.setattr("dovetail.run.examination.installed_rules", lambda: [broken])
    *others, finding = rule_findings(build().config, None)
    assert [f.message for f in others] == before
    assert finding.severity == "warning"
    name = rule.__name__
    assert f"the preflight rule {name} of acme failed on this config" in finding.message
    assert why in finding.message
    assert f"preflight.ignore={name}" in (finding.hint or "")
    config = build(f"preflight.ignore={name}").config
    assert rule_findings(config, None) == []


def test_a_finding_reads_as_message_id_and_mend() -> None:
    finding = Finding(rule="a_rule", severity="error", message="a = 1 is wrong", hint="set a=2")
    assert str(finding) == "a = 1 is wrong [a_rule]\n  → set a=2"
    assert str(preflight.refusal("c.yaml", [finding])) == (
        "c.yaml: 1 error\n  a = 1 is wrong [a_rule]\n    → set a=2"
    )


def test_the_command_prints_all_of_it_and_ends_with_2(build: Build, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from dovetail.cli.main import main
    from dovetail.config.serialise import dump_yaml

    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(build("algorithm.policy_loss=gspo").config))
    done = CliRunner().invoke(main, ["check", str(path)])
    assert done.exit_code == 0
    assert "data: 8 training prompts, 4 held out" in done.output
    assert "warning: algorithm.loss_aggregation = token_mean" in done.output
    assert f"OK: {path} is ready to train, with 1 warning" in done.output
    done = CliRunner().invoke(main, ["check", str(path), "rollout.n=1", "trainer.best_metric=x"])
    assert done.exit_code == 2
    assert f"error: {path}: 2 errors" in done.output
    assert "[group_of_one]\n    → set rollout.n=8" in done.output
    assert "[best_metric_unknown]" in done.output
    assert "warning: algorithm.loss_aggregation" in done.output
    assert "OK" not in done.output


def test_the_command_lists_an_environment_that_is_elsewhere_as_a_need(
    build: Build, tmp_path: Path
) -> None:
    from click.testing import CliRunner

    from dovetail.cli.main import main
    from dovetail.config.serialise import dump_yaml

    path = tmp_path / "config.yaml"
    gone = "runtime={name: ray, environments: {rollout: DIR/gone}}"
    path.write_text(dump_yaml(build(gone, "algorithm.policy_loss=gspo").config))
    done = CliRunner().invoke(main, ["check", str(path)])
    assert done.exit_code == 0
    assert "needs: runtime.environments.rollout=" in done.stdout
    assert done.stderr.count("warning: ") == 1
    assert f"OK: {path} is a valid run, with 1 warning; not ready on this machine: " in done.stdout


def test_the_plan_names_the_preset_and_ends_with_what_rules_find(
    build: Build, tmp_path: Path
) -> None:
    from click.testing import CliRunner

    from dovetail.cli.main import main
    from dovetail.config.serialise import dump_yaml

    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(build("algorithm.policy_loss=gspo").config))
    done = CliRunner().invoke(main, ["plan", str(path)])
    assert done.exit_code == 0
    assert "gspo (clip_low 0.0003, clip_high 0.0004), token_mean" in " ".join(done.stdout.split())
    assert "algorithm: preset" not in done.stdout
    warning, fix = done.stderr.splitlines()
    assert warning.startswith("warning: algorithm.loss_aggregation = token_mean")
    assert warning.endswith("[loss_aggregation_overridden]")
    assert fix.startswith("  → set algorithm.loss_aggregation=seq_mean_token_mean")
    done = CliRunner().invoke(main, ["plan", str(path), "--json", "trainer.best_metric=x"])
    assert done.exit_code == 2
    found = json.loads(done.stdout)["findings"]
    assert {f["rule"] for f in found} == {"loss_aggregation_overridden", "best_metric_unknown"}
    assert "[best_metric_unknown]" in done.stderr


def test_the_preset_stands_at_the_head_of_the_plan(build: Build, capsys) -> None:
    from dovetail.cli.plan_text import render_plan

    config = build("algorithm.preset=dapo").config
    render_plan(make_plan(config))
    assert capsys.readouterr().out.splitlines()[0] == "algorithm: preset 'dapo'"


def test_a_run_announces_its_warnings_as_check_prints_them(build: Build, capsys) -> None:
    from dovetail.cli.train import announce

    loaded = build("algorithm.policy_loss=gspo")
    announce(loaded, make_plan(loaded.config), Path("runs/x"))
    out, err = capsys.readouterr()
    assert out.endswith("run directory: runs/x\n")
    assert "[loss_aggregation_overridden]\n  → set algorithm.loss_aggregation=" in err


def test_what_the_chat_template_leaves_out_of_rows_is_named_by_check_plan_and_the_run(
    build: Build, tmp_path: Path, capsys
) -> None:
    from dovetail.cli.train import announce

    said = [{"role": "user", "content": "2 + 2 ="}, {"role": "assistant", "content": "4"}]
    thought = [said[0], {**said[1], "reasoning_content": "two and two"}]
    for name, rows in (("train", [said, thought]), ("val", [thought])):
        text = "".join(json.dumps({"messages": row}) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    supervised = ["trainer={name: supervised, examples: conversations}", "data.train_batch_size=1"]
    loaded = build(*supervised, "preflight.ignore=[rollout_unused]")
    found = examine(loaded)
    assert ids(found) == ["rows_left_out"] * 2
    train, val = found.warnings
    assert "'reasoning_content'" in train.message
    assert f"1 of 2 rows (the first: {tmp_path / 'train.jsonl'}, line 2)" in train.message
    assert "held-out rows: " in val.message
    assert "1 of 1 rows" in val.message
    plan = plan_from_data(loaded.config, load_data(loaded.config))
    log = Log()
    assert enforce(loaded, plan, log) == (train, val)
    announce(loaded, plan, Path("runs/x"))
    assert capsys.readouterr().err.count("[rows_left_out]\n  → set model.chat_template") == 2
    silenced = build(*supervised, "preflight.ignore=[rollout_unused, rows_left_out]")
    assert examine(silenced).findings == ()
