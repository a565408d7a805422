"""`dovetail eval --served`: the run's validation against a server, a real vLLM with the exported model, and servers at fault."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from click.testing import Result

from dovetail.run.run import train
from dovetail.telemetry.jsonl import read_rows
from dovetail_sdk.testing import tiny_model_and_tokenizer
from dovetail_serving import free_port

STEPS = 2
TEMPLATE = "{% for m in messages %}{{ m.content }} !?!{% endfor %}"


@contextmanager
def vllm_with(model: Path) -> Iterator[str]:
    """The address of a vLLM server, by the command of the model's card."""
    card = (model / "README.md").read_text()
    (line,) = [line for line in card.splitlines() if line.startswith("vllm serve ")]
    port = free_port()
    # The command `vllm` asks for the metadata of a distribution that the CPU build does not have.
    arguments = line.removeprefix("vllm serve DIR").split()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += arguments
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    server = subprocess.Popen(
        [*command, "--enforce-eager", "--max-model-len", "96"], env={**os.environ, **environment}
    )
    try:
        while True:
            assert server.poll() is None
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


@pytest.mark.vllm
@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here")
def test_a_served_model_has_the_figures_of_the_runs_validation_or_the_command_fails(
    config: Path, inside: Callable[..., Result]
) -> None:
    # vLLM's attention on the CPU takes no smaller heads.
    model = tiny_model_and_tokenizer(config.parent / "model", vocab_size=300, hidden_size=128)
    files = f"data.val_files={config.parent / 'train.jsonl'}"
    train(config, [f"model.path={model}", f"trainer.total_steps={STEPS}", files])
    run = config.parent / "runs" / "tests" / "run"
    with vllm_with(run / "final") as url:
        done = inside("eval", str(run), "--served", url, "--json")
        [row] = json.loads(done.stdout)
        assert "in the run's 95% interval" in done.stderr
        validated = [r for r in read_rows(run / "metrics.jsonl") if "val/mean@1" in r][-1]
        assert validated["step"] == row["step"] == STEPS
        for name in ("val/mean@1", "val/mean@1/low", "val/response_length/mean"):
            assert row["metrics"][name] == pytest.approx(validated[name], abs=1e-3)
        other = inside(
            "eval", str(run), "--served", url, f"model.chat_template={TEMPLATE}", check=False
        )
        assert (other.exit_code, "chat template" in other.stderr) == (2, True)
        worse = {**validated, "val/mean@1/low": -2.0, "val/mean@1/high": -1.0}
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(worse) + "\n")
        failed = inside("eval", f"{run}@{STEPS}", "--served", f"{url}/v1", check=False)
        assert failed.exit_code == 1
        assert "val/mean@1 is " in failed.stderr
