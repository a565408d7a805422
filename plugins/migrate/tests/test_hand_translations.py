"""Jobs of verl, translated by hand: one of each kind that earlier releases could not express passes the full check."""

import json
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dovetail import check

pytestmark = pytest.mark.nightly
TRANSLATIONS = Path(__file__).parent / "seeds" / "translations"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with data, and with models of the jobs' shapes whose heads have two features."""
    pytest.importorskip("ray")
    made = pytest.importorskip("dovetail_demo.model", reason="needs dovetail-demo")
    folder = tmp_path_factory.mktemp("jobs")
    made.make_base(folder / "tokenizer", 1, 64)
    sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
    from shapes import make_model

    for name in ("Qwen2.5-Math-7B", "Qwen2.5-7B", "Qwen3-8B", "Qwen2.5-0.5B"):
        make_model(name, folder / "tokenizer", folder / "made").rename(folder / name)
    rows = [
        {"prompt": [{"role": "user", "content": "1+1="}], "data_source": source, "reward_model": {"ground_truth": "2"}}
        for source in ("openai/gsm8k", "hiyouga/geometry3k") * 300
    ]  # fmt: skip
    for name in ("train", "val"):
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    examples = [{"prompt": "1+1=", "response": "2"}] * 300
    pq.write_table(pa.Table.from_pylist(examples), folder / "examples.parquet")
    (folder / "tools.jinja").write_text(TEMPLATE)
    for file in TRANSLATIONS.iterdir():
        shutil.copy(file, folder)
    return folder


@pytest.mark.parametrize("name", sorted(path.stem for path in TRANSLATIONS.glob("*_*.yaml")))
def test_a_translation_by_hand_passes_the_full_check(name, here, monkeypatch):
    if name == "files_for_verl":
        pytest.importorskip("dovetail_verl_shim")
        pytest.importorskip("datasets", reason="verl's dataset class reads files by datasets")
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(str(here))
    # A missing engine or accelerator on this machine is not a fault of the config.
    found = check(f"{name}.yaml", ["tracking=[console]"]).errors
    assert not [str(each) for each in found if each.rule != "environment_missing"], json.dumps([str(e) for e in found])  # fmt: skip
