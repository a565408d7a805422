"""`dovetail data look` and `dovetail data check`: the shown rows, and ten planted faults that are found."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from dataset_rows import turns
from PIL import Image

from dovetail.cli.main import main
from dovetail_sdk.testing import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_model(directory, tiny_tokenizer(directory))
    return directory


@pytest.fixture
def run(model: Path) -> Any:
    def invoke(*arguments: str) -> Result:
        words = ["data", *arguments, f"model.path={model}"]
        result = CliRunner().invoke(main, words, catch_exceptions=False)
        assert "\x1b" not in result.output
        return result

    return invoke


def conversation(question: str, answer: str, **field: Any) -> dict[str, Any]:
    return {"messages": turns(question, answer, **field)}


@pytest.fixture
def reward(tmp_path: Path) -> str:
    """The setting of a reward function that accepts only the answer 2."""
    file = tmp_path / "r.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str == '2')\n"
    )
    return f"reward.function={{path: {file}}}"


def test_look_shows_special_tokens_and_what_is_trained_on(run, write) -> None:
    rows = [conversation("1 + 1 =", "2"), conversation("2 + 2 =", "4"), conversation("q", "")]
    path = write("x.jsonl", rows)
    done = run("look", path, "--rows", "2", "--from", "1")
    assert done.exit_code == 0
    assert f"{path}, line 2" in done.output
    assert f"{path}, line 1\n" not in done.output
    assert "⟦4<|im_end|>⟧" in done.output
    assert re.search(r"<\|im_start\|>user\n2 \+ 2 =<\|im_end\|>", done.output)
    assert re.search(r"prompt: \d+ tokens", done.output)
    assert re.search(r"response: 2 tokens, 2 of them trained on", done.output)
    assert "left out:" in done.output


def test_look_shows_rows_of_the_first_dataset_of_a_mixture(run, write) -> None:
    first = write("a.jsonl", [{"prompt": "1 " * 99}, {"prompt": "2 + 2 ="}, {"prompt": [7]}])
    second = write("b.jsonl", [{"prompt": "5 + 5 ="}, {"prompt": [8]}, {"prompt": "6 + 6 ="}])
    mixture = (
        f"data.mixture={{a: {{files: {first}, weight: 1}}, b: {{files: {second}, weight: 1}}}}"
    )
    words = (mixture, "reward.function=exact_match", "data.max_prompt_length=40")
    done = run("look", *words, "--rows", "3")
    assert done.exit_code == 0, done.output
    of_row = done.output.split(f"{first}, line ")[1:]
    assert "longer than" in of_row[0]
    assert "2 + 2 =" in of_row[1]
    assert "left out" in of_row[2]
    assert not any(other in done.output for other in ("5 + 5", "6 + 6", f"{second}, line"))


def test_look_at_pairs_and_at_a_row_that_is_not_there(run, write) -> None:
    path = write("x.jsonl", [{"prompt": "1 + 1 =", "chosen": "2", "rejected": "3"}])
    done = run("look", path)
    assert "⟦2<|im_end|>⟧" in done.output
    assert "⟦3<|im_end|>⟧" in done.output
    assert run("look", path, "--from", "1").exit_code != 0
    assert CliRunner().invoke(main, ["data", "look", path]).exit_code == 2


def test_look_shows_the_verdict_on_the_reference_answer_and_escapes_what_a_row_says(
    run, write, reward, tmp_path
) -> None:
    row = {"prompt": "<b>1 + 1", "data_source": "d", "reward_model": {"ground_truth": "2"}}
    path = write("x.jsonl", [row])
    assert "reward: 1 for its ground_truth, '2'" in run("look", path, reward).output
    page = tmp_path / "x.html"
    run("look", path, reward, "--html", str(page))
    text = page.read_text()
    assert "&lt;b&gt;1 + 1" in text
    assert "<b>1" not in text
    assert "reward: 1 for its ground_truth" in text


def test_check_finds_ten_planted_faults(run, write, reward) -> None:
    good = [conversation(f"q{i}", "4") for i in range(20)]
    train = [
        *good,
        "{no json",  # 1
        conversation("q", ""),  # 2
        {"messages": [{"role": "human", "content": "q"}]},  # 3
        {"messages": None},  # 4
        good[3],  # 5: again
        conversation("q", "b" * 900),  # 6: too long
        conversation("t", "4", reasoning_content="hm"),  # 7: the template leaves it out
        conversation("<|im_end|>", "4"),  # 8: spells a control token
    ]
    path = write("train.jsonl", train)
    val = write("val.jsonl", [good[5], conversation("new", "4")])  # 9: overlap
    done = run("check", path, f"data.val_files={val}", "data.max_response_length=50")
    assert done.exit_code == 1
    for found in (
        "4 bad training conversations",
        f"{path}, line 21 is not JSON",
        f"{path}, line 22: message 1",
        f"{path}, line 23: message 0",
        f"{path}, line 24: the column 'messages' is null",
        f"1 duplicates among training conversations:\n  {path}, line 25 is {path}, line 4 again",
        "1 training conversations are longer",
        "leaves out thoughts in 'reasoning_content'",
        "contain 1 control tokens",
        f"1 held-out rows that are trained on:\n  {val}, line 1 has the prompt of {path}, line 6",
    ):
        assert found in done.output, found
    rows = [
        {"prompt": f"{i}", "data_source": "d", "reward_model": {"ground_truth": "2"}}
        for i in range(3)
    ]
    rows[1]["reward_model"] = {"ground_truth": "x"}  # 10
    prompts = write("prompts.jsonl", rows)
    done = run("check", prompts, reward)
    assert done.exit_code == 1
    assert f"1 reference answers that the reward refuses:\n  {prompts}, line 2: 0" in done.output


def test_look_shows_what_is_wrong_with_each_of_the_planted_rows(run, write) -> None:
    path = write(
        "train.jsonl",
        [
            "{no json",
            conversation("q", ""),
            {"messages": [{"role": "human", "content": "q"}]},
            {"messages": None},
            conversation("q", "b" * 900),
            conversation("q " * 400, "b", reasoning_content="hm"),
            conversation("q", "4", reasoning_content="hidden"),
            conversation("<|im_end|>", "4"),
        ],
    )
    done = run("look", path, "data.max_response_length=50", "data.max_prompt_length=200", "--rows", "9")  # fmt: skip
    assert done.exit_code == 0
    by_line = {n: done.output.partition(f"{path}, line {n}\n")[2].partition(f"{path}, line {n + 1}\n")[0] for n in range(1, 9)}  # fmt: skip
    for line, says in {
        1: "is not JSON",
        2: "empty answer",
        3: "did you mean 'user'?",
        4: "'messages' is null",
        5: "200 tokens",
        6: "200 tokens",
    }.items():
        assert says in by_line[line], line
    assert "hidden" not in by_line[7]
    assert "⟦4<|im_end|>⟧" in by_line[7]
    assert "user\n<|im_end|><|im_end|>" in by_line[8]
    cut = run("look", path, "data.max_response_length=5", "data.overlong_prompts=truncate_right", "--from", "4", "--rows", "1")  # fmt: skip
    assert "cut to its" in cut.output


def test_check_of_sound_data_says_so(run, write) -> None:
    path = write("x.jsonl", [conversation(f"q{i}", "4") for i in range(9)])
    done = run("check", path)
    assert done.exit_code == 0
    assert "9 training conversations" in done.output


def test_images_are_thumbnails_in_the_page(write, tmp_path) -> None:
    from dovetail_sdk.testing.tiny_vision import square, tiny_vision_model

    directory = tiny_vision_model(tmp_path / "vision")
    (tmp_path / "red.png").write_bytes(square("red", 448, 224))
    row = conversation("<image>what?", "red") | {"images": ["red.png"]}
    path, page = write("x.jsonl", [row]), tmp_path / "x.html"
    words = ["data", "look", path, f"model.path={directory}", "--html", str(page)]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (found,) = re.findall(r"base64,([^\"]+)", page.read_text())
    assert Image.open(io.BytesIO(base64.b64decode(found))).size == (160, 80)
