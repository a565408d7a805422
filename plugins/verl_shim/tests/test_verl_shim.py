"""Files written for verl run without verl: reward functions, dataset classes, tools; and the error of a broken verl on the path."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner

from dovetail.cli.main import main
from dovetail.errors import DataError, PluginBrokenError, PluginNeedsError
from dovetail.interfaces import PluginContext, PluginRef
from dovetail.plugins import make_plugin, plugin_section

pytestmark = pytest.mark.skipif(
    "dovetail_verl_shim" not in str(getattr(importlib.util.find_spec("verl"), "origin", "")),
    reason="verl itself is installed, or the shim is not",
)

REWARD = """
from verl.utils.reward_score import default_compute_score, math_dapo
from verl.utils.reward_score.math_dapo import last_boxed_only_string, normalize_final_answer, remove_boxed
from verl.utils.ray_utils import get_event_loop

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return math_dapo.compute_score(solution_str, ground_truth, strict_box_verify=True)

async def verified(data_source, solution_str, ground_truth, extra_info=None):
    loop = get_event_loop()
    box = last_boxed_only_string(solution_str)
    pred = normalize_final_answer(remove_boxed(box)) if box else "[INVALID]"
    right = await loop.run_in_executor(None, lambda: pred == normalize_final_answer(ground_truth))
    return {"score": float(right)}

def batched(data_sources, solution_strs, ground_truths, extra_infos):
    return [default_compute_score(*row) for row in zip(data_sources, solution_strs, ground_truths)]
"""


@pytest.fixture
def reward_file(tmp_path: Path) -> Path:
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path / "reward.py"


def run_of(folder: Path, model: Path, *overrides: str) -> list[dict[str, Any]]:
    """Train for one step on boxed sums, and return the samples."""
    rows = [
        {
            "prompt": f"{a} + 1",
            "data_source": "openai/gsm8k",
            "reward_model": {"ground_truth": str(a + 1)},
        }
        for a in range(4)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = (
        f"model.path={model}",
        "model.dtype=float32",
        f"data.train_files={folder / 'rows.jsonl'}",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        "rollout.n=2",
        f"output_dir={folder / 'runs'}",
        "trainer.total_steps=1",
        "trainer.export=none",
        "tracking=[jsonl]",
    )
    done = CliRunner().invoke(main, ["train", *keys, *overrides])
    assert done.exit_code == 0, done.output
    (found,) = (folder / "runs/dovetail/default/samples").glob("step_1.jsonl")
    return [json.loads(line) for line in found.read_text().splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from dovetail_sdk.testing import tiny_model_and_tokenizer

    return tiny_model_and_tokenizer(tmp_path_factory.mktemp("tiny"), vocab_size=300)


@pytest.mark.parametrize(
    "manager", ["{name: naive}", "{name: batch}"], ids=["one by one", "batched"]
)
def test_reward_files_train_without_verl(reward_file: Path, model: Path, manager: str) -> None:
    name = "batched" if "batch" in manager else "compute_score"
    samples = run_of(
        reward_file.parent,
        model,
        f"reward.manager={manager}",
        f"reward.function={{path: {reward_file}, attribute: {name}}}",
    )
    # An untrained model writes no box and no answer after ####.
    assert {sample["score"] for sample in samples} == {0.0 if name == "batched" else -1.0}


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("math_dapo.compute_score(r'so \\boxed{34}', '34', strict_box_verify=True)['score']", 1.0),
        (
            "math_dapo.compute_score(r'so \\boxed{34.0}', '34', strict_box_verify=True)['acc']",
            False,
        ),
        ("math_dapo.compute_score('Answer: $34$', '34')['score']", 1.0),
        ("math_dapo.compute_score('Answer: 35', '34')['score']", -1.0),
        ("math_reward.compute_score(r'\\boxed{\\frac12}', r'\\frac{1}{2}')", 1.0),
        ("math_reward.compute_score('1/2', r'\\frac{1}{2}')", 0.0),
        ("gsm8k.extract_solution('#### 1,234')", "1234"),
        ("gsm8k.compute_score('#### 5', '6', format_score=0.1)", 0.1),
        ("gsm8k.compute_score('it is 6', '6', method='flexible')", 1.0),
        ("default_compute_score('aime_2024', 'Answer: 7', '7')['score']", 1.0),
        ("math_dapo.last_boxed_only_string(r'\\boxed{a} \\boxed{b{c}} d')", "\\boxed{b{c}}"),
        ("math_dapo.last_boxed_only_string(r'\\boxed{a')", None),
    ],
)
def test_scores(call: str, expected: Any) -> None:
    from verl.utils.reward_score import default_compute_score, gsm8k, math_dapo, math_reward

    names = {"default_compute_score": default_compute_score, "gsm8k": gsm8k}
    assert eval(call, names | {"math_dapo": math_dapo, "math_reward": math_reward}) == expected


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("x = 5", "5", True),
        (r"\dfrac12", r"\frac{1}{2}", True),
        ("1,234", "1234", True),
        (r"\text{Monday}.", "Monday", True),
        (r"90^\circ", "90", True),
        ("1,23", "123", False),
        ("12", "21", False),
    ],
)
def test_answers_in_one_notation(one: str, other: str, same: bool) -> None:
    from verl.utils.reward_score.math_dapo import normalize_final_answer

    assert (normalize_final_answer(one) == normalize_final_answer(other)) is same


def test_what_is_not_there_says_so() -> None:
    with pytest.raises(ImportError, match=r"no verl\.DataProto"):
        from verl import DataProto  # noqa: F401
    from verl.utils.reward_score import default_compute_score

    with pytest.raises(NotImplementedError, match="'nothing'"):
        default_compute_score("nothing", "a", "b")


DATASET = """
import datasets
from verl.utils.dataset import RLHFDataset
from verl.utils.dataset.rl_dataset import collate_fn

class Maths(RLHFDataset):
    def _read_files_and_tokenize(self):
        rows = [{"problem": f"{a} + 1", "answer": a + 1} for a in range(3)]
        self.dataframe = datasets.Dataset.from_list(rows).map(self.made, remove_columns=["problem", "answer"])

    def made(self, row):
        return {"data_source": "maths", "prompt": [{"role": "user", "content": row["problem"]}],
                "reward_model": {"ground_truth": str(row["answer"])}, "index": row["answer"]}

class Own:
    def __init__(self, data_files, tokenizer, config=None, processor=None):
        self.files, self.mark = data_files, config.get("mark")

    def __len__(self):
        return 2

    def __getitem__(self, item):
        import torch
        return {"raw_prompt": [{"role": "user", "content": self.mark}], "files": self.files, "ids": torch.zeros(2)}

class Failing(RLHFDataset):
    def _read_files_and_tokenize(self):
        raise KeyError("column")
"""


def dataset(folder: Path, name: str, **settings: Any) -> Any:
    (folder / "verl_data.py").write_text(DATASET)
    config = plugin_section(
        "dataset", "verl", file=str(folder / "verl_data.py"), class_name=name, settings=settings
    )
    return make_plugin(PluginRef(kind="dataset", name="verl", config=config), PluginContext())


def test_a_dataset_class_gives_its_rows(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed")
    rows = dataset(tmp_path, "Maths").read(["some.parquet"])
    assert [row["prompt"][0]["content"] for row in rows] == ["0 + 1", "1 + 1", "2 + 1"]
    assert [row["reward_model"] for row in rows] == [{"ground_truth": str(n)} for n in (1, 2, 3)]
    assert [row["extra_info"]["index"] for row in rows] == [1, 2, 3]
    own = dataset(tmp_path, "Own", mark="hello").read(["some.parquet"])
    asked = {"role": "user", "content": "hello"}
    assert own == [{"prompt": [asked], "extra_info": {"files": ["some.parquet"]}}] * 2


def test_a_dataset_class_that_fails_is_named(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed")
    with pytest.raises(
        DataError, match=r"Failing of .*verl_data\.py failed on x\.parquet: KeyError"
    ):
        dataset(tmp_path, "Failing").read(["x.parquet"])
    with pytest.raises(PluginBrokenError, match="no attribute 'Absent'"):
        dataset(tmp_path, "Absent").read(["x.parquet"])


class Sandbox(BaseHTTPRequestHandler):
    """Answers like SandboxFusion, without running code."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = {"stdout": f"ran {asked['code']} in {asked['language']}", "stderr": ""}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"status": "Success", "run_result": said}).encode())

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def test_code_goes_to_the_sandbox_that_the_config_names() -> None:
    from verl.tools.sandbox_fusion_tools import SandboxFusionTool
    from verl.tools.schemas import OpenAIFunctionToolSchema

    schema = OpenAIFunctionToolSchema.model_validate({"function": {"name": "code"}})
    server = HTTPServer(("127.0.0.1", 0), Sandbox)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/run_code"
    tool = SandboxFusionTool({"sandbox_fusion_url": url, "num_workers": 2}, schema)
    try:
        answer, reward, _ = asyncio.run(tool.execute("i", {"code": "print(1)"}))
    finally:
        server.shutdown()
        server.server_close()
    assert answer.text == "ran print(1) in python"
    assert reward is None
    assert "failed" in asyncio.run(tool.execute("i", {"code": "1"}))[0].text
    with pytest.raises(ValueError, match="sandbox_fusion_url"):
        SandboxFusionTool({}, schema)


@pytest.mark.parametrize("what", ["tool", "reward"])
def test_a_verl_without_its_packages_is_named_without_a_traceback(
    tmp_path: Path, model: Path, reward_file: Path, what: str
) -> None:
    broken = tmp_path / "broken" / "verl"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("import tensordict_that_is_absent\n")
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"prompt": "a", "data_source": "x", "reward_model": {"ground_truth": "1"}})
        + "\n"
    )
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: some_tools.Some, config: {}}]")
    tool = f"{{name: verl, tools_config: {tmp_path / 'tools.yaml'}}}"
    asked = {
        "tool": f"rollout.agent_loop={{name: tool_agent, tools: [{tool}]}}",
        "reward": f"reward.function={{path: {reward_file}, attribute: compute_score}}",
    }[what]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "dovetail", "check", f"model.path={model}"),
            *(f"data.train_files={tmp_path / 'rows.jsonl'}", asked),
        ],
        capture_output=True,
        check=False,
        text=True,
        env={**os.environ, "PYTHONPATH": str(broken.parent)},
    )
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    assert "tensordict_that_is_absent" in said
    if what == "tool":
        assert str(broken) in said
        assert "dovetail-tools[verl]" in said


def test_a_tool_names_the_package_where_there_is_no_verl(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not p.endswith("stand-in")])
    for name in [n for n in sys.modules if n.partition(".")[0] == "verl"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: some_tools.Some, config: {}}]")
    config = plugin_section("tool", "verl", tools_config=str(tmp_path / "tools.yaml"))
    made: Any = make_plugin(PluginRef(kind="tool", name="verl", config=config), PluginContext())
    with pytest.raises(PluginNeedsError) as error:
        made.start()
    assert "dovetail-tools[verl]" in str(error.value.hint)
