"""Whatever text a model, a reward or a tool makes, a run writes it down and goes on."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path

import pytest

from dovetail.errors import ConfigError
from dovetail.run.run import resume, train

REWARD = r"""
import itertools

class Silent:
    def __str__(self):
        raise RuntimeError("no text")

nested = []
for _ in range(2000):
    nested = [nested]
calls = itertools.count()

def compute_score(solution_str):
    number = next(calls)
    if number % 5 == 4:
        raise ValueError("half \ud800")
    found = {"pred": "\ud800", "joined": "\ud83d\ude00", "part\udfff": 1.0, "text\udfff": "x"}
    return {"score": number % 3, **found, "nested": nested, "big": -(10**5000), "silent": Silent()}
"""
LOOP = r'''
from dovetail.interfaces import AgentLoop
from dovetail.sections import EpisodeSection

class Chat(AgentLoop):
    """Shows the policy half a surrogate pair, as a message and as text, in two sequences."""

    name = "chat"
    api = ">=1.0,<2"
    Config = EpisodeSection
    capabilities = frozenset({"forks"})
    transitions = frozenset({"user"})

    async def run(self, session):
        for fork in (None, [{"role": "user", "content": "\udbff"}]):
            session = session if fork is None else session.fork(fork)
            await session.generate(max_new_tokens=3)
            await session.observe([{"role": "user", "content": "half \ud800"}])
            await session.generate(max_new_tokens=3)
            await session.observe("\udc00")
            await session.generate(max_new_tokens=3)
'''
TRACKER = '''
import json
from dovetail.interfaces import Tracker

class Strict(Tracker):
    """Writes what it is given, as a library does that takes UTF-8 alone."""

    name = "strict"
    api = ">=1.0,<2"

    def metrics_logged(self, step, metrics):
        self._write({"names": list(metrics)})

    def samples_logged(self, step, rows):
        self._write({"rows": list(rows)})

    def _write(self, value):
        with open(self.context.run_directory / "strict.jsonl", "ab") as file:
            file.write(json.dumps(value, ensure_ascii=False).encode() + b"\\n")
'''


@pytest.mark.usefixtures("report")
@pytest.mark.parametrize("loop", [None, LOOP], ids=["single_turn", "agent_loop"])
def test_a_run_writes_what_a_reward_returns_and_an_episode_shows(config, loop):
    for name, text in (("my_reward", REWARD), ("tracker", TRACKER), ("loop", loop or "")):
        (config.parent / f"{name}.py").write_text(text)
    tracker = f"{{path: {config.parent}/tracker.py, attribute: Strict}}"
    chosen = [f"rollout.agent_loop={{path: {config.parent}/loop.py, attribute: Chat}}"]
    overrides = [
        f"tracking=[console,jsonl,{tracker}]",
        "trainer.total_steps=1",
        "data.max_response_length=64",
        "reward.max_failure_share=1.0",
        *(chosen if loop else []),
    ]
    summary = train(config, overrides)
    assert summary["status"] == "completed"
    run = Path(summary["directory"])
    assert resume(run, ["trainer.total_steps=2"])["status"] == "completed"

    rows = [json.loads(line) for line in (run / "samples" / "step_2.jsonl").open(encoding="utf-8")]
    extras = next(row["extras"] for row in rows if "extras" in row)
    assert (extras["pred"], extras["joined"]) == ("\ud800", "😀")
    assert int(extras["big"], 16) == -(10**5000)
    assert extras["text\ufffd"] == "x"
    assert json.dumps(extras["nested"]).count("[") < 200
    assert any("half \ud800" in row["failure"]["message"] for row in rows if "failure" in row)
    logged = [json.loads(line) for line in (run / "metrics.jsonl").open(encoding="utf-8")]
    assert any("part\ufffd" in name for row in logged for name in row)
    given = [json.loads(line) for line in (run / "strict.jsonl").open(encoding="utf-8")]
    shown = next(entry["rows"] for entry in reversed(given) if "rows" in entry)
    assert "\ufffd" in [row["extras"]["pred"] for row in shown if "extras" in row]
    assert any("part\ufffd" in name for entry in given for name in entry.get("names", ()))
    packed = (run / "report" / "step_2.js").read_text().split('"')[3]
    assert "half \\ud800" in gzip.decompress(base64.b64decode(packed)).decode()
    if loop:
        [observed] = rows[0]["trajectory"]["turns"][0]["observed"]
        assert observed["content"] == "half \ufffd"
        assert {turn["sequence"] for turn in rows[0]["trajectory"]["turns"]} == {0, 1}


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"data_source": "\ud800"}, "data_source"),
        ({"reward_model": {"ground_truth": "\udc00"}}, "reward_model.ground_truth"),
        ({"prompt": [{"role": "user", "content": "a\ud800"}]}, "prompt[0].content"),
        ({"extra_info": {"notes": [{"\ud800": 1}]}}, "extra_info.notes[0]"),
        ({"response": "\ude00\ud83d"}, "response"),
    ],
)
def test_a_row_that_no_file_can_keep_is_named(config, row, key):
    file = config.parent / "train.jsonl"
    first, *others = file.read_text().splitlines()
    file.write_text("\n".join([first, json.dumps(json.loads(others[0]) | row), *others[1:]]))
    with pytest.raises(Exception, match="line 2") as caught:
        train(config)
    assert key in str(caught.value)
    assert not (config.parent / "runs" / "tests" / "run").exists()


@pytest.mark.parametrize(
    ("override", "key"),
    [
        (r'output_dir="a\0b"', "output_dir"),
        (r'model.path="\0"', "model.path"),
        (r'experiment="a\0"', "experiment"),
        (r'data.train_files=["x", "y\0"]', "data.train_files[1]"),
        (r'reward.function={path: "f\0.py"}', "reward.function.path"),
        (r'rollout.stop=["\ud800"]', "rollout.stop[0]"),
        (r'tracking=[{name: console, metrics: ["\udfff"]}]', "tracking[0].metrics[0]"),
        (r'data.mixture={"\ud800": {files: [x]}}', "data.mixture"),
    ],
)
def test_a_config_that_no_path_or_service_takes_is_refused(config, override, key):
    with pytest.raises(ConfigError) as caught:
        train(config, [override])
    assert any(problem.startswith(key) for problem in caught.value.problems)
