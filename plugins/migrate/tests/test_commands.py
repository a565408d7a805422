"""Commands: the program of verl that they start, and its config and overrides."""

import pytest

from dovetail_migrate.verl.words import read_command

TRAIN = ["python3", "-m", "verl.trainer.main_ppo", "data.train_batch_size=8"]


@pytest.mark.parametrize(
    "before",
    [
        [],
        ["nohup"],
        ["VLLM_USE_V1=1", "python3"][:1],
        ["env", "A=1", "B=2"],
        ["ray", "job", "submit", "--address=http://h:8265", "--runtime-env", "env.yaml", "--no-wait", "--"],
        ["ray", "job", "submit", "--address", "http://h:8265", "--working-dir", "."],
        ["uv", "run", "--extra", "vllm"],
        ["timeout", "3600"],
    ],
)  # fmt: skip
def test_a_command_is_found_behind_what_launches_it(before):
    command = read_command([*before, *TRAIN])
    assert command is not None
    assert command.module == "verl.trainer.main_ppo"
    assert [o.key for o in command.overrides] == ["data.train_batch_size"]
    assert command.trains


def test_torchrun_gives_the_processes():
    words = "torchrun --standalone --nnodes=2 --nproc_per_node 4 -m verl.trainer.sft_trainer data.train_batch_size=8 engine=fsdp"
    command = read_command(words.split())
    assert command is not None
    assert (command.processes, command.nodes, command.finetunes) == (4, 2, True)
    assert [o.key for o in command.overrides] == ["data.train_batch_size", "engine"]


def test_hydras_options_and_positions_are_told_from_overrides():
    command = read_command(
        [*TRAIN, "--config-path=config", "--config-name", "mine.yaml", "save_here"]
    )
    assert command is not None
    assert (command.config_path, command.config_name, command.rest) == ("config", "mine", ("save_here",))  # fmt: skip


@pytest.mark.parametrize("words", [["wget", "x"], ["python3", "-c", "print(1)"], ["ray", "start", "--head"], ["bash", "x.sh"]])  # fmt: skip
def test_other_commands_start_no_program(words):
    assert read_command(words) is None


def test_programs_that_do_not_train_are_known():
    command = read_command(["python", "-m", "verl.model_merger", "merge", "--backend", "fsdp"])
    assert command is not None
    assert not command.trains
