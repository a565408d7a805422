"""Commands stay light: a listing imports no plugin and nothing heavy, and each command has a budget of modules."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from dovetail.plugins.index import default_index
from dovetail.telemetry import drop_import_messages
from dovetail_sdk.testing import tiny_model_and_tokenizer, tiny_tokenizer

WATCHED = """
import json, sys, traceback
arguments, forbidden = json.loads(sys.argv[1])
guilty = []

def watch(event, details):
    # Looking for a package (`find_spec`) is not an import, and raises no such event.
    name = details[0] if event == "import" else ""
    if any(name == word or name.startswith(word + ".") for word in forbidden) and not guilty:
        frames = [f for f in traceback.extract_stack() if "importlib" not in f.filename][:-1]
        guilty.append(name + " is imported by\\n" + "".join(traceback.format_list(frames)))

sys.addaudithook(watch)
before = set(sys.modules)
from dovetail.cli.main import main
try:
    main(arguments, prog_name="dovetail")
except SystemExit:
    pass
print("\\0" + json.dumps({"guilty": guilty, "modules": sorted(set(sys.modules) - before)}))
"""
HEAVY = ("torch", "transformers", "ray", "numpy", "structlog", "omegaconf", "stevedore", "pluggy")
PLUGINS = sorted(
    {e.target.split(":")[0].split(".")[0] for e in default_index().entries()} - {"dovetail"}
)
OTHERS = [name for name in PLUGINS if name != "dovetail_console"]
"""Packages besides that of the commands `plan` and `plugins`."""
LISTINGS: dict[str, tuple[list[str], int]] = {
    "help": (["--help"], 200),
    "plugins help": (["plugins", "--help"], 200),
    "list": (["plugins", "list"], 250),
    "list as JSON": (["plugins", "list", "--json"], 250),
    "list of a kind": (["plugins", "list", "rollout"], 250),
}
"""Command → its arguments, and how many modules it may import beyond a bare interpreter's."""


def watched(arguments: list[str], forbidden: list[str]) -> dict[str, list[str]]:
    command = [sys.executable, "-c", WATCHED, json.dumps([arguments, forbidden])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.rpartition("\0")[2])


@pytest.mark.parametrize(("arguments", "budget"), LISTINGS.values(), ids=LISTINGS)
def test_a_listing_imports_no_plugin_nothing_heavy_and_few_modules(arguments, budget):
    found = watched(arguments, [*HEAVY, *PLUGINS])
    assert not found["guilty"], "\n".join(found["guilty"])
    count = len(found["modules"])
    assert count <= budget, f"{count} modules: {', '.join(found['modules'])}"


ENGINES = ("ray", "vllm", "sglang", "tensorrt_llm", "megatron", "deepspeed", "liger_kernel")
CONFIGS: dict[str, tuple[list[str], int]] = {
    "explain": (["config", "explain"], 360),
    "show": (["config", "show"], 360),
    "check": (["check", "--static"], 355),
}
"""Command on a config → its arguments before it, and how many modules it may import."""


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A config that selects heavy plugins."""
    path = tmp_path / "config.yaml"
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1 =", "reward_model": {"ground_truth": "2"}}\n')
    path.write_text(
        f"model: {{path: '{tmp_path}'}}\ndata: {{train_files: ['{rows}'], train_batch_size: 1}}\n"
        "rollout: vllm\nruntime: {name: ray}\nreward: {function: gsm8k}\nalgorithm: {preset: dr_grpo}\n"
    )
    return str(path)


@pytest.mark.parametrize("arguments", [["plugins", "show", "rollout/hf"], ["plugins", "show", "advantage/grpo"]])  # fmt: skip
def test_a_plugins_page_comes_from_its_manifest_alone(arguments):
    found = watched(arguments, [*HEAVY, *OTHERS])
    assert not found["guilty"], "\n".join(found["guilty"])
    assert len(found["modules"]) <= 300, ", ".join(found["modules"])


@pytest.mark.parametrize("command", ["plan", "train", "check"])
def test_a_command_starts_without_what_its_work_needs(command):
    found = watched([command, "--help"], [*HEAVY, *OTHERS])
    assert not found["guilty"], "\n".join(found["guilty"])
    assert len(found["modules"]) <= 200, ", ".join(found["modules"])


@pytest.mark.parametrize(("arguments", "budget"), CONFIGS.values(), ids=CONFIGS)
def test_a_config_of_heavy_plugins_is_read_without_them(config, arguments, budget):
    found = watched([*arguments, config], [*ENGINES, "torch", "transformers"])
    assert not found["guilty"], "\n".join(found["guilty"])
    count = len(found["modules"])
    assert count <= budget, f"{count} modules: {', '.join(found['modules'])}"
    assert "dovetail_rollout_vllm.config" in found["modules"]


MODULES = (
    *("batch", "config", "hooks", "interfaces.advantage", "interfaces.engine"),
    *("interfaces.policy_loss", "plugins.load", "random_streams", "workers.inline"),
)


def test_what_commands_and_plugins_import_first_needs_neither_torch_nor_jaxtyping():
    code = (
        "import importlib, sys\n"
        "for module in sys.argv[1:]:\n"
        "    importlib.import_module(f'dovetail.{module}')\n"
        "    heavy = {'torch', 'transformers', 'ray', 'jaxtyping'} & sys.modules.keys()\n"
        "    assert not heavy, (module, heavy)\n"
    )
    subprocess.run([sys.executable, "-c", code, *MODULES], check=True)


def test_a_plan_needs_tokens_and_tensors_but_no_engine(config):
    tiny_tokenizer(Path(config).parent)
    found = watched(["plan", config, "runtime.name=inline"], list(ENGINES))
    assert not found["guilty"], "\n".join(found["guilty"])
    assert "dovetail.planning.plan" in found["modules"]


def test_the_stack_of_whoever_imports_is_shown():
    found = watched(["plugins", "list"], ["dovetail.plugins.index"])
    [guilty] = found["guilty"]
    assert guilty.startswith("dovetail.plugins.index is imported by")
    assert "cli/plugins.py" in guilty or "cli/main.py" in guilty


BLOCKED = """
import contextlib, json, sys
for library in ("filelock", "psutil", "ray"):  # which have other code for Windows
    with contextlib.suppress(ImportError):
        __import__(library)
commands, blocked = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(blocked))  # a None there makes an import raise ModuleNotFoundError
from dovetail.cli.main import main
for arguments in commands:
    try:
        main(arguments, prog_name="dovetail")
    except SystemExit as end:
        print(end.code, end="\\0", flush=True)
        print(end="\\0", file=sys.stderr, flush=True)
"""
SECONDS = re.compile(r"[\d.]+ s\)")
POSIX = ("fcntl", "resource", "termios", "pwd")
"""Modules that Windows lacks."""
PORTABLE = [
    ["--help"],
    ["plugins", "list"],
    ["plugins", "list", "preset"],
    ["plugins", "show", "rollout/vllm"],
    ["config", "show", "CONFIG"],
    ["config", "explain", "CONFIG"],
    ["check", "CONFIG", "--static"],
    ["plan", "CONFIG", "runtime.name=inline"],
]


def without(modules: Sequence[str], *commands: Sequence[str]) -> list[tuple[str, str]]:
    """What each command prints where these modules are missing, its exit code behind it, and what to standard error."""
    command = [sys.executable, "-c", BLOCKED, json.dumps([commands, modules])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    printed, errors = (text.split("\0")[:-1] for text in (done.stdout, done.stderr))
    return list(zip(printed, errors, strict=True))


@pytest.mark.parametrize(
    "commands",
    [
        PORTABLE,
        pytest.param([["plan", "CONFIG", "runtime.workers_per_node=2"]], marks=pytest.mark.nightly),
    ],
    ids=["here", "ray"],
)
def test_commands_that_only_read_need_no_posix_module_and_hide_what_libraries_say(config, commands):
    """Among them torchao, which transformers imports where it is installed."""
    tiny_model_and_tokenizer(Path(config).parent)
    given = [[config if word == "CONFIG" else word for word in command] for command in commands]
    found = zip(given, without(POSIX, *given), without((), *given), strict=True)
    for command, (there, quiet), (here, silent) in found:
        assert (quiet, silent, here[-1]) == ("", "", "0"), command
        assert SECONDS.sub("", there) == SECONDS.sub("", here), command


def test_other_warnings_of_the_libraries_are_shown(caplog):
    drop_import_messages()
    torchao, pytree = (logging.getLogger(name) for name in ("torchao", "torch.utils._pytree"))
    torchao.warning("Failed to load %s: Could not load this library", "_C_cutlass_90a.abi3.so")
    torchao.warning("Skipping import of cpp extensions due to incompatible torch version")
    pytree.warning("%s cannot be registered", "A")
    assert [record.name for record in caplog.records] == ["torchao", "torch.utils._pytree"]


def test_training_refuses_a_system_without_locks_on_files(config, tmp_path):
    directory = tmp_path / "runs"
    train = ["train", config, "runtime.name=inline", f"output_dir={directory}"]
    [(printed, error)] = without(POSIX, train)
    assert printed[-1] == "1"
    assert "run needs Linux" in error
    assert not directory.exists()
