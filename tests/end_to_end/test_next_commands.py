"""What a run prints under `Next:` runs as printed, for each kind of run, also in a folder whose name a shell would split."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from dovetail.cli.main import main
from dovetail.errors import DovetailError
from dovetail.run.run import train

SUMS = [(a, b) for a in range(3) for b in range(4)]
ROWS = {
    "sft": [{"prompt": f"{a} + {b}?", "response": str(a + b)} for a, b in SUMS],
    "pairs": [
        {"prompt": f"{a} + {b}?", "chosen": str(a + b), "rejected": f"{a + b}0"} for a, b in SUMS
    ],
}
GENERATES = {"eval", "chat", "train"}
PREFERENCES = ["trainer={name: supervised, examples: preferences}", "data.val_files=[]"]


@pytest.mark.parametrize(
    ("rows", "overrides", "expected"),
    [
        pytest.param("", [], GENERATES, id="checkpoints"),
        pytest.param("", ["trainer.save_every=0"], GENERATES, id="one-checkpoint"),
        pytest.param(
            "", ["trainer.save_every=0", "trainer.save_last=false"], GENERATES, id="only-final"
        ),
        pytest.param(
            "",
            ["trainer.save_every=0", "trainer.save_last=false", "trainer.export=none"],
            {"train"},
            id="nothing-kept",
        ),
        pytest.param("", ["data.val_files=[]"], {"chat", "train"}, id="no-validation"),
        pytest.param(
            "", ["actor.engine={name: fsdp2, lora: {rank: 2}}"], GENERATES, id="lora"
        ),
        pytest.param(
            "",
            ["algorithm={preset: ppo}", "critic.optim.lr=1e-3", "experiment=ppo_seed_3"],
            GENERATES,
            id="ppo",
        ),
        pytest.param(
            "sft", ["trainer=supervised", "data.val_files=[]"], {"chat", "train"}, id="sft"
        ),
        pytest.param("pairs", [*PREFERENCES, "actor.objective=dpo"], {"chat", "train"}, id="dpo"),
        pytest.param(
            "pairs", [*PREFERENCES, "actor.objective=bradley_terry"], {"train"}, id="reward-model"
        ),
    ],
)  # fmt: skip
def test_every_command_under_next_runs_as_printed(
    config: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    rows: str,
    overrides: list[str],
    expected: set[str],
) -> None:
    folder = tmp_path / "it's a $folder; ls"
    overrides = [f"output_dir={json.dumps(str(folder))}", *overrides]
    if rows:
        document = yaml.safe_load(config.read_text())
        for key in ("rollout", "reward", "algorithm"):
            del document[key]
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[rows]))
        document["data"]["train_files"] = str(file)
        config.write_text(yaml.safe_dump(document))
    train(config, overrides)
    commands = commands_in(capfd.readouterr().out)
    assert {command for command, *_ in commands} == expected
    printed = [run(command) for command in commands]
    # The last command has trained a variant in a run of its own, which names another one.
    name = next(one for one in commands[-1] if one.startswith("experiment="))
    [variant] = folder.glob(f"*/{name.removeprefix('experiment=')}")
    assert json.loads((variant / "summary.json").read_text())["seed"] == 4
    assert name not in commands_in(printed[-1])[-1]


@pytest.mark.parametrize(
    ("failing", "expected"), [(1, ["config"]), (2, ["resume", "config"])], ids=["at-once", "later"]
)
def test_a_run_that_failed_says_how_to_go_on(
    config: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    failing: int,
    expected: list[str],
) -> None:
    reward = tmp_path / "my_reward.py"
    sound = reward.read_text()
    reward.write_text(
        f"calls = []\n\n\ndef compute_score(solution_str):\n    calls.append(1)\n"
        f"    if len(calls) > {16 * (failing - 1)}:\n        raise ValueError\n    return 0.5\n"
    )
    with pytest.raises(DovetailError):
        train(config, ["data.val_files=[]"])
    commands = commands_in(capfd.readouterr().out)
    assert [command for command, *_ in commands] == expected
    reward.write_text(sound)
    for command in commands:
        run(command)


def commands_in(printed: str) -> list[list[str]]:
    """Return the words behind `dovetail` of each command under `Next:`."""
    lines = printed[printed.rindex("Next:") :].splitlines()[1:]
    words = [shlex.split(line) for line in lines if line.startswith("  ")]
    assert all(shutil.which(program) or Path(program).is_file() for program, *_ in words)
    return [rest for _, *rest in words]


def run(command: list[str]) -> str:
    done = CliRunner().invoke(main, command, input="2 + 2?\n" if command[0] == "chat" else None)
    assert done.exit_code == 0, (command, done.output, done.exception)
    return done.output
