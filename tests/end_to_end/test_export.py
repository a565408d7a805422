"""A run that completes leaves its model in `final/`, as any other Hugging Face model."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import PIPE
from threading import Thread
from typing import ClassVar

import pytest
import torch
from click.testing import Result
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dovetail.errors import ConfigError
from dovetail.run.run import train

BEST = ("trainer.best_metric=val/mean@1", "trainer.validate_every=1", "trainer.export=best")


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    """The actor's weights in a checkpoint."""
    [file] = (run / "checkpoints" / f"step_{step}" / "actor" / "weights").glob("*.safetensors")
    return load_file(file)


def exported(run: Path) -> dict[str, torch.Tensor]:
    """The weights in `final/`, as transformers loads them."""
    model = AutoModelForCausalLM.from_pretrained(run / "final", dtype=torch.float32)
    return model.state_dict()


def same(exported: dict[str, torch.Tensor], kept: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(exported[name], tensor) for name, tensor in kept.items())


def test_a_completed_run_leaves_its_model(config: Path, tiny: Path, tmp_path: Path) -> None:
    summary = train(config)
    run = tmp_path / "runs" / "tests" / "run"
    assert summary["model"] == str(run / "final")
    assert same(exported(run), weights(run, 3))
    before, after = (AutoTokenizer.from_pretrained(path) for path in (tiny, run / "final"))
    assert after.get_vocab() == before.get_vocab()
    assert after.chat_template == before.chat_template
    assert json.loads((run / "final" / "generation_config.json").read_text())


@pytest.mark.parametrize("extreme", ["max", "min"])
def test_the_best_checkpoint_is_exported(config: Path, tmp_path: Path, extreme: str) -> None:
    """Of the two extremes one at least is not the last step's."""
    summary = train(config, [*BEST, f"trainer.best_is={extreme}"])
    run = tmp_path / "runs" / "tests" / "run"
    step = summary["best"]["step"]
    assert same(exported(run), weights(run, step))
    assert step == 3 or not same(exported(run), weights(run, 3))
    said = "was best before the first step" in (run / "events.jsonl").read_text()
    assert said == (step == 0)


def test_no_model_is_left_where_none_is_asked_for(config: Path, tmp_path: Path) -> None:
    summary = train(config, ["trainer.export=none", "trainer.total_steps=1"])
    assert summary["model"] is None
    assert not (tmp_path / "runs" / "tests" / "run" / "final").exists()


def test_the_best_needs_a_metric(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"export = best needs .* trainer\.best_metric"):
        train(config, ["trainer.export=best"])


def test_a_checkpoint_is_exported_as_the_run_would(
    config: Path, tmp_path: Path, inside: Callable[..., Result]
) -> None:
    train(config, [*BEST, "algorithm.advantage=gae"])
    run = tmp_path / "runs" / "tests" / "run"
    for options, step in ((), 3), (("--step=1",), 1):
        out = tmp_path / f"step_{step}"
        inside("export", str(run), str(out), *options)
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        assert same(model.state_dict(), weights(run, step))
    inside("export", str(run), str(tmp_path / "best"), "--best")
    one, other = (load_file(d / "model.safetensors") for d in (tmp_path / "best", run / "final"))
    assert same(one, other)
    inside("export", str(run), str(tmp_path / "critic"), "--role=critic")
    assert "score.weight" in load_file(tmp_path / "critic" / "model.safetensors")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("OUT", "--step=7"), "checkpoint of step 7; it has: step_1, step_2, step_3"),
        (("OUT", "--best"), "no best checkpoint"),
        (("OUT", "--role=ref"), "does not train the role 'ref'; it trains actor"),
        ((".",), "already exists"),
    ],
)
def test_what_can_not_be_exported_is_one_error(
    finished: Path,
    tmp_path: Path,
    inside: Callable[..., Result],
    options: tuple[str, ...],
    problem: str,
) -> None:
    where, *rest = (
        str(tmp_path / option) if option in ("OUT", ".") else option for option in options
    )
    done = inside("export", str(finished), where, *rest, check=False)
    assert done.exit_code in (1, 2)
    assert problem in done.output
    assert not (tmp_path / "OUT").exists()


def snippet(card: str) -> str:
    """The Python of a card, with the model's folder as the variable `place`."""
    return card.partition("```python\n")[2].partition("```")[0].replace('"DIR"', "place")


def test_the_card_says_what_a_model_is_made_from_and_its_code_runs(
    config: Path, tiny: Path, tmp_path: Path, inside: Callable[..., Result]
) -> None:
    base, data = tmp_path / "base", tmp_path / "datasets--openai--gsm8k" / "snapshots" / "abc"
    shutil.copytree(tiny, base)
    (base / "README.md").write_text(
        "---\nlicense: other\nlicense_name: team-only\nbase_model: Qwen/Qwen2.5-0.5B\n---\n# base\n"
    )
    data.mkdir(parents=True)
    shutil.copy(tmp_path / "train.jsonl", data)
    given = [f"model.path={base}", f"data.train_files={data / 'train.jsonl'}"]
    train(config, [*given, "trainer.validate_every=1", "algorithm.advantage=gae"])
    run = tmp_path / "runs" / "tests" / "run"
    card = ModelCard.load(run / "final" / "README.md")
    assert card.data.base_model == "Qwen/Qwen2.5-0.5B"
    assert (card.data.license, card.data.license_name) == ("other", "team-only")
    assert card.data.datasets == ["openai/gsm8k"]
    assert {"dovetail", "gae"} <= set(card.data.tags)
    assert f"lr: {1e-2}" in card.text
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ends = [{}, {}, {}, {}]
    for row in rows:
        ends[row["step"]] |= row
    low, high = (ends[3][f"val/mean@1/{end}"] for end in ("low", "high"))
    score = [f"{value:.3f}" for value in (ends[0]["val/mean@1"], ends[3]["val/mean@1"])]
    assert f"| mean@1 | {' | '.join(score)} | {low:.3f} … {high:.3f} |" in card.text
    ran = {"place": run / "final"}
    exec(snippet(card.text), ran)
    assert len(ran["tokens"]) > ran["inputs"]["input_ids"].shape[1]

    out = tmp_path / "critic"
    inside("export", str(run), str(out), "--step=2", "--role=critic")
    critic = (out / "README.md").read_text()
    assert "after step 2" in critic
    assert "vllm" not in critic
    exec(snippet(critic), ran | {"place": out})

    (run / "plan.json").write_text("{")
    done = inside("export", str(run), str(tmp_path / "torn"))
    assert not (tmp_path / "torn" / "README.md").exists()
    assert (tmp_path / "torn" / "model.safetensors").exists()
    assert done.exit_code == 0


def test_checkpoints_are_listed_verified_and_removed(
    config: Path, tmp_path: Path, inside: Callable[..., Result]
) -> None:
    train(config, ["trainer.best_metric=val/mean@1", "trainer.validate_every=1"])
    run = tmp_path / "runs" / "tests" / "run"
    listed = json.loads(inside("checkpoint", "list", str(run), "--json").output)
    assert [row["step"] for row in listed] == [0, 1, 2, 3]
    assert [row["step"] for row in listed if row["latest"]] == [3]
    assert sum(row["best"] for row in listed) == 1
    assert "latest" in inside("checkpoint", "list", str(run)).output
    assert inside("checkpoint", "verify", str(run)).output.count("as they were written") == 4
    state = run / "checkpoints" / "step_2" / "state.json"
    state.write_text(state.read_text() + " ")
    damaged = inside("checkpoint", "verify", str(run), check=False)
    assert damaged.exit_code == 1
    assert "state.json" in damaged.output
    inside("checkpoint", "prune", str(run), "--keep=1")
    best = next(row["step"] for row in listed if row["best"])
    kept = json.loads(inside("checkpoint", "list", str(run), "--json").output)
    assert {row["step"] for row in kept} == {3, best}


def test_a_checkpoint_of_verl_is_exported_too(
    tiny: Path, tmp_path: Path, inside: Callable[..., Result]
) -> None:
    """In the form of one rank; those of several are tested with the engine that reads them."""
    saved = tmp_path / "global_step_3"
    shutil.copytree(
        tiny, saved / "actor" / "huggingface", ignore=shutil.ignore_patterns("*.safetensors")
    )
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    torch.save(model.state_dict(), saved / "actor" / "model_world_size_1_rank_0.pt")
    out = str(tmp_path / "out")
    done = inside("export", str(saved), out, "--step=3", check=False)
    assert "give no options" in done.output
    inside("export", str(saved), out)
    exported = AutoModelForCausalLM.from_pretrained(out)
    assert same(exported.state_dict(), model.state_dict())
    assert AutoTokenizer.from_pretrained(out).chat_template
    done = inside("export", str(saved), out, check=False)
    assert "already exists" in done.output
    other = tmp_path / "other"
    other.mkdir()
    done = inside("export", str(other), str(tmp_path / "none"), check=False)
    assert "run directory" in done.output


LORA = ["actor.engine={name: fsdp2, lora: {rank: 4, target_modules: [q_proj, v_proj]}}"]


def test_an_adapter_comes_out_alone_and_is_trained_further(
    config: Path, tiny: Path, tmp_path: Path, inside: Callable[..., Result]
) -> None:
    peft = pytest.importorskip("peft")
    train(config, LORA)
    run, adapter = tmp_path / "runs" / "tests" / "run", tmp_path / "adapter"
    inside("export", str(run), str(adapter), "--adapter")
    base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload()
    exported = load_file(run / "final" / "model.safetensors")
    for name, tensor in merged.state_dict().items():
        if name in exported:
            torch.testing.assert_close(tensor, exported[name])
    # Nothing is trained in a step without a learning rate: what comes out is what went in.
    further = [*LORA, f"actor.engine.lora.adapter_path={adapter}", "actor.optim.lr=0"]
    train(config, [*further, "experiment=further", "trainer.total_steps=1"])
    card = ModelCard.load(adapter / "README.md")
    assert card.data.library_name == "peft"
    assert f"vllm serve {tiny} --enable-lora --max-lora-rank 4 --lora-modules run=DIR" in card.text
    again = load_file(tmp_path / "runs" / "tests" / "further" / "final" / "model.safetensors")
    assert same(again, exported)


def test_the_commands_that_serve_a_model_name_the_parsers_that_the_run_used(
    config: Path, tiny_with_tools: Path, tmp_path: Path, inside: Callable[..., Result]
) -> None:
    loop = "rollout.agent_loop={name: tool_agent, tools: [calculator], max_turns: 1, max_turn_tokens: 6}"
    given = [f"model.path={tiny_with_tools}", loop, "data.max_prompt_length=600"]
    train(config, [*given, "trainer.total_steps=1"])
    out = tmp_path / "the model"
    run = str(tmp_path / "runs" / "tests" / "run")
    lines = inside("export", run, str(out)).output.splitlines()
    tools = "--tool-call-parser hermes"
    vllm = f"vllm serve DIR --served-model-name run --enable-auto-tool-choice {tools}"
    sglang = f"python -m sglang.launch_server --model-path DIR --served-model-name run {tools}"
    assert lines[-2:] == [line.replace("DIR", f"'{out}'") for line in (vllm, sglang)]
    assert f"\n{vllm}\n{sglang}\n" in (out / "README.md").read_text()
    thinking = tmp_path / "template"
    thinking.write_text((out / "chat_template.jinja").read_text() + "{# <think> #}")
    written = inside("export", run, str(tmp_path / "2"), f"model.chat_template={thinking}")
    assert written.output.count(f"{tools} --reasoning-parser qwen3") == 2


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as takes a folder of small files; `/denied` repositories are refused."""

    files: ClassVar[dict[str, bytes]] = {}
    made: ClassVar[list[dict[str, object]]] = []

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b"".join(self._chunks())
        repository = self.path.removeprefix("/api/models/")
        if self.path == "/api/repos/create":
            self.made.append(json.loads(body))
            answer = {"url": "http://127.0.0.1/me/model"}
        elif self.path == "/api/validate-yaml":  # of the card
            answer = {"errors": [], "warnings": []}
        elif "/preupload/" in repository:
            names = [file["path"] for file in json.loads(body)["files"]]
            answer = {
                "files": [
                    {"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names
                ]
            }
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    value = line["value"]
                    self.files[value["path"]] = base64.b64decode(value["content"])
            answer = {"commitUrl": "http://127.0.0.1/me/model/commit/1", "commitOid": "1"}
        self._answer(403 if "denied" in str(self.made) else 200, answer)

    def do_GET(self) -> None:
        self._answer(200, {"id": "me/model", "sha": "1", "siblings": []})

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _answer(self, status: int, answer: object) -> None:
        said = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_: object) -> None:
        pass


EXPORTS = """
import json, sys
from click.testing import CliRunner
from dovetail.cli.main import main

for repository, token in (("me/model", None), ("me/model", "hf_none"), ("me/denied", "hf_none")):
    command = ["export", sys.argv[1], repository, "--to=hub"]
    done = CliRunner(env={"HF_TOKEN": token}).invoke(main, command)
    print(json.dumps([done.exit_code, done.output, repr(done.exception)]), flush=True)
"""


@pytest.mark.nightly
def test_a_model_goes_to_the_hub(finished: Path, tmp_path: Path) -> None:
    """To a server that speaks the hub's protocol as its own client does; which server is read when its client is imported."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env |= {
        "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
        "HF_HUB_DISABLE_XET": "1",
    }

    try:
        command = [sys.executable, "-c", EXPORTS, str(finished)]
        printed = subprocess.run(command, env=env, stdout=PIPE, text=True, timeout=120, check=True)
    finally:
        server.shutdown()
        server.server_close()
    none, sent, denied = map(json.loads, printed.stdout.splitlines())
    assert none[0] != 0
    assert "no credentials" in none[1]
    assert sent[0] == 0, sent
    assert [made["visibility"] for made in Hub.made] == ["private"] * 2, "none without credentials"
    weights = (finished / "final" / "model.safetensors").read_bytes()
    assert Hub.files["model.safetensors"] == weights
    assert {"config.json", "tokenizer.json", "README.md"} <= Hub.files.keys()
    assert denied[0] != 0
    assert "refused the upload to me/denied" in denied[1]
    assert "Traceback" not in denied[1]
    assert denied[2].startswith("SystemExit")
