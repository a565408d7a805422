"""`dovetail data prepare`: the conformance suite on every recipe; what the command writes, prints and refuses; and training on its rows."""

from __future__ import annotations

import gzip
import hashlib
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from dovetail.cli.main import main
from dovetail_datasets.prepare.config import ReasoningGymRecipeConfig
from dovetail_datasets.prepare.reasoning_gym_reward import ReasoningGymReward
from dovetail_datasets.prepare.recipe import Split
from dovetail_datasets.prepare.recipes.dapo_math import DapoMathRecipe
from dovetail_datasets.prepare.recipes.geometry3k import Geometry3kRecipe
from dovetail_datasets.prepare.recipes.gsm8k import Gsm8kRecipe
from dovetail_datasets.prepare.recipes.hh_rlhf import HhRlhfRecipe
from dovetail_datasets.prepare.recipes.math import MathRecipe, last_boxed
from dovetail_datasets.prepare.recipes.preference_turns import pair
from dovetail_datasets.prepare.recipes.reasoning_gym import ReasoningGymRecipe
from dovetail_datasets.prepare.recipes.ultrafeedback import UltraFeedbackRecipe
from dovetail_datasets.prepare.recipes.xlam_function_calling import XlamFunctionCallingRecipe
from dovetail_datasets.testing import DataRecipeConformance, Files, Rows
from dovetail_demo.model import make_base
from dovetail_sdk.testing import square


class TestGsm8kRecipe(DataRecipeConformance):
    """Questions, and solutions with notes for a calculator."""

    plugin = Gsm8kRecipe
    rows: ClassVar[Files] = {
        "train": [
            {
                "question": f"Ann has {n} pens and buys {n}. How many has she?",
                "answer": f"She has {n}+{n} = <<{n}+{n}={2 * n}>>{2 * n} pens.\n#### {2 * n:,}",
            }
            for n in (4, 600)
        ],
        "validation": [{"question": "What is 2 plus 3?", "answer": "2+3 = <<2+3=5>>5\n#### 5"}],
    }


class TestMathRecipe(DataRecipeConformance):
    """Problems with solutions whose answer is in a box."""

    plugin = MathRecipe
    rows: ClassVar[Files] = {
        "train": [
            {
                "problem": "What is half of a third?",
                "level": "Level 1",
                "type": "Prealgebra",
                "solution": r"It is $\frac12\cdot\frac13=\boxed{\frac{1}{6}}$.",
            },
            {
                "problem": "What is $2^3$?",
                "level": "Level 2",
                "type": "Algebra",
                "solution": r"We have $2^3=\boxed 8$.",
            },
        ],
        "validation": [
            {
                "problem": "What is $1+1$?",
                "level": "Level 1",
                "type": "Algebra",
                "solution": r"It is $\boxed{2}$.",
            }
        ],
    }


class TestDapoMathRecipe(DataRecipeConformance):
    """Rows in verl's schema, each more than once."""

    plugin = DapoMathRecipe
    rows: ClassVar[Files] = {
        "train": [
            {
                "data_source": "math_dapo",
                "prompt": [
                    {
                        "content": f"Solve it, and end with a line `Answer: $Answer`.\n\nWhat is {n} + 1?",
                        "role": "user",
                    }
                ],
                "ability": "MATH",
                "reward_model": {"ground_truth": str(n + 1), "style": "rule-lighteval/MATH_v2"},
                "extra_info": {"index": f"problem-{n}"},
            }
            for n in (1, 2, 3, 1, 2)
        ]
    }
    unread = frozenset({"ability"})


class TestGeometry3kRecipe(DataRecipeConformance):
    """Problems with a picture each."""

    plugin = Geometry3kRecipe
    rows: ClassVar[Files] = {
        split: [
            {
                "images": [{"bytes": square(colour), "path": None}],
                "problem": f"<image>Find the side {name}.",
                "answer": r"2 \sqrt { 3 }",
            }
            for name, colour in zip(names, ((255, 0, 0), (0, 255, 0)), strict=True)
        ]
        for split, names in (("train", "ab"), ("validation", "cd"), ("test", "ef"))
    }


class TestUltraFeedbackRecipe(DataRecipeConformance):
    """Pairs with their scores."""

    plugin = UltraFeedbackRecipe
    rows: ClassVar[Files] = {
        split: [
            {
                "prompt": f"Name a colour of {thing}.",
                "prompt_id": f"id of {thing}",
                "chosen": [
                    {"content": f"Name a colour of {thing}.", "role": "user"},
                    {"content": "It is green.", "role": "assistant"},
                ],
                "rejected": [
                    {"content": f"Name a colour of {thing}.", "role": "user"},
                    {"content": "No.", "role": "assistant"},
                ],
                "messages": [
                    {"content": f"Name a colour of {thing}.", "role": "user"},
                    {"content": "It is green.", "role": "assistant"},
                ],
                "score_chosen": 8.5,
                "score_rejected": 4.0,
            }
            for thing in things
        ]
        for split, things in (("train", ("grass", "leaves")), ("validation", ("moss",)))
    }
    unread = frozenset({"prompt", "prompt_id", "messages"})


class TestHhRlhfRecipe(DataRecipeConformance):
    """Pairs of texts, as compressed lines of JSON."""

    plugin = HhRlhfRecipe
    rows: ClassVar[Files] = {
        "train": [
            {
                "chosen": f"\n\nHuman: Hello\n\nAssistant: Hi.\n\nHuman: How do I {act}?\n\nAssistant: Like this:\n\nslowly.",
                "rejected": f"\n\nHuman: Hello\n\nAssistant: Hi.\n\nHuman: How do I {act}?\n\nAssistant: No idea",
            }
            for act in ("swim", "sing")
        ],
        "validation": [
            {
                "chosen": "\n\nHuman: How do I cook?\n\nAssistant: Boil water.",
                "rejected": "\n\nHuman: How do I cook?\n\nAssistant: Go away.",
            }
        ],
    }

    def file_of(self, split: Split) -> str:
        """Return the file of one of the four parts."""
        return f"helpful-base/{'test' if split == 'validation' else split}.jsonl.gz"

    def write(self, path: Path, rows: Rows) -> None:
        """Write lines of JSON, compressed."""
        with gzip.open(path, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


class TestXlamFunctionCallingRecipe(DataRecipeConformance):
    """Queries with tools and calls as JSON text, in a JSON array."""

    plugin = XlamFunctionCallingRecipe
    rows: ClassVar[Files] = {
        "train": [
            {
                "id": number,
                "query": f"What is the weather in {city}, and at which hours is it dry?",
                "answers": json.dumps(
                    [
                        {"name": "weather", "arguments": {"city": city}},
                        {"name": "dry_hours", "arguments": {"city": city, "days": [1, 2]}},
                    ]
                ),
                "tools": json.dumps(
                    [
                        {
                            "name": "weather",
                            "description": "The weather of a city.",
                            "parameters": {
                                "city": {"description": "Its name.", "type": "str"},
                                "unit": {"description": "Of it.", "type": "str", "default": "C"},
                            },
                        },
                        {
                            "name": "dry_hours",
                            "description": "Hours without rain.",
                            "parameters": {
                                "city": {"description": "Its name.", "type": "str"},
                                "days": {"description": "Which.", "type": "List[int], optional"},
                            },
                        },
                    ]
                ),
            }
            for number, city in enumerate(("Rome", "Oslo", "Bern"))
        ]
    }
    unread = frozenset({"id"})

    def write(self, path: Path, rows: Rows) -> None:
        """Write a JSON array."""
        path.write_text(json.dumps([*rows]), encoding="utf-8")


class TestReasoningGymRecipe(DataRecipeConformance):
    """A task that is quickly made."""

    plugin = ReasoningGymRecipe
    config = ReasoningGymRecipeConfig(
        name="reasoning_gym", task="leg_counting", size=12, validation_size=4
    )


GSM8K, DAPO, HH, ULTRA = (
    TestGsm8kRecipe,
    TestDapoMathRecipe,
    TestHhRlhfRecipe,
    TestUltraFeedbackRecipe,
)
Prepare = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """Run a command in a folder of its own, and return what it prints."""
    monkeypatch.chdir(tmp_path)

    def make(*arguments: str, code: int = 0) -> str:
        done = CliRunner().invoke(main, [*arguments])
        assert done.exit_code == code, done.output
        return done.output

    return make


def repository(suite: type[DataRecipeConformance], folder: Path, rows: Any = None) -> str:
    """Write the rows of a suite as the hub has them, and return the folder."""
    return str(suite().repository(folder, rows))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def test_alone_it_lists_recipes_and_imports_none(run: Prepare, monkeypatch: Any) -> None:
    monkeypatch.setattr(
        "dovetail.plugins.load.load_entry", lambda entry: pytest.fail(f"{entry.name} is imported")
    )
    listed = run("data", "prepare")
    for name in ("gsm8k", "math", "dapo_math", "geometry3k", "ultrafeedback", "hh_rlhf", "xlam"):
        assert f"\n{name}" in f"\n{listed}"


def test_the_card_says_where_rows_come_from(run: Prepare, tmp_path: Path) -> None:
    folder = repository(GSM8K, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("---\nlicense: cc0-1.0\n---\n# GSM8K\n")
    run("data", "prepare", "gsm8k", "seed=3", "--from", folder)
    card = (tmp_path / "data" / "gsm8k" / "README.md").read_text()
    for fact in (
        "openai/gsm8k",
        "cc0-1.0",
        "dovetail data prepare gsm8k seed=3",
        hashlib.sha256((tmp_path / "copy/main/train-part.parquet").read_bytes()).hexdigest(),
        hashlib.sha256((tmp_path / "data/gsm8k/train.parquet").read_bytes()).hexdigest(),
        "| train.parquet | 2 |",
        "a local copy",
    ):
        assert fact in card, fact


def test_a_folder_of_the_hubs_cache_gives_the_revision(run: Prepare, tmp_path: Path) -> None:
    run("data", "prepare", "gsm8k", "--from", repository(GSM8K, tmp_path / ("ab" * 20)))
    assert f"| revision | {'ab' * 20} |" in (tmp_path / "data/gsm8k/README.md").read_text()


def test_prompts_are_held_out_as_a_share_and_never_divided(run: Prepare, tmp_path: Path) -> None:
    row = DAPO.rows["train"][0]
    rows = [
        {**row, "prompt": [{"content": f"What is {n // 2} + 1?", "role": "user"}]}
        for n in range(200)
    ]
    folder = repository(DAPO, tmp_path / "copy", {"train": rows})
    for seed in ("1", "2"):
        run("data", "prepare", "dapo_math", "held_out=0.1", f"seed={seed}", "--from", folder, "--output", seed)  # fmt: skip
    held = [rows_of(tmp_path / seed / "validation.parquet") for seed in ("1", "2")]
    train = rows_of(tmp_path / "1" / "train.parquet")
    assert (len(train), len(held[0])) == (90, 10)
    texts = [{row["prompt"][0]["content"] for row in rows} for rows in (train, *held)]
    assert texts[0].isdisjoint(texts[1])
    assert len(texts[0] | texts[1]) == 100
    assert texts[1] != texts[2]


def test_splits_that_overlap_are_an_error_or_dropped(run: Prepare, tmp_path: Path) -> None:
    rows = {**GSM8K.rows, "validation": [GSM8K.rows["train"][1]]}
    folder = repository(GSM8K, tmp_path / "copy", rows)
    said = run("data", "prepare", "gsm8k", "--from", folder, code=2)
    assert "train-part.parquet, row 1" in said
    assert "test-part.parquet, row 0" in said
    assert not (tmp_path / "data").exists() or not [*(tmp_path / "data").iterdir()]
    run("data", "prepare", "gsm8k", "overlap=drop", "--from", folder)
    assert len(rows_of(tmp_path / "data/gsm8k/train.parquet")) == 1
    assert len(rows_of(tmp_path / "data/gsm8k/validation.parquet")) == 1


def test_pairs_of_no_use_are_left_out_and_counted(run: Prepare, tmp_path: Path) -> None:
    good = HH.rows["train"][0]
    rows = {**HH.rows, "train": [*HH.rows["train"], {**good, "rejected": good["chosen"]}]}
    said = run("data", "prepare", "hh_rlhf:helpful-base", "--from", repository(HH, tmp_path / "copy", rows))  # fmt: skip
    assert "left out: 1, the" in said
    output = tmp_path / "data" / "hh_rlhf_helpful-base"
    assert len(rows_of(output / "train.parquet")) == 2
    assert "two answers" in (output / "README.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (("gsm8",), ("gsm8k",)),
        (("gsm8k", "sed=1"), ("seed",)),
        (("gsm8k", "seed=x"), ("seed", "'x'")),
        (("gsm8k", "held_out=2"), ("held_out", "2.0")),
        (("gsm8k:main",), ("gsm8k", "colon")),
        (("hh_rlhf:helpful",), ("helpful-base", "subset")),
        (("reasoning_gym:leg_count",), ("leg_counting",)),
        (("reasoning_gym",), ("reasoning_gym:leg_counting",)),
        (("gsm8k", "--from", "."), ("main/test-*",)),
        (("gsm8k",), ("openai/gsm8k", "--from")),
    ],
)
def test_what_is_wrong_is_named(run: Prepare, arguments: tuple[str, ...], facts: tuple[str, ...]) -> None:  # fmt: skip
    said = run("data", "prepare", *arguments, code=2)
    assert all(fact in said for fact in facts), said
    assert not Path("data").exists() or not [*Path("data").iterdir()]


def test_an_output_that_exists_is_left_alone(run: Prepare, tmp_path: Path) -> None:
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    said = run("data", "prepare", "gsm8k", "--from", repository(GSM8K, tmp_path / "copy"), code=2)
    assert "exists already" in said
    assert not [*(tmp_path / "data" / "gsm8k").iterdir()]


def test_a_value_of_another_type_is_named(run: Prepare, tmp_path: Path) -> None:
    rows = {**GSM8K.rows, "train": [{"question": 7, "answer": "#### 7"}]}
    said = run(
        "data", "prepare", "gsm8k", "--from", repository(GSM8K, tmp_path / "c", rows), code=2
    )
    assert all(fact in said for fact in ("train-part.parquet, row 0", "'question'", "int"))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} or \fbox{2}", "2"),
        (r"it is $\boxed 7$", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{open", ""),
        ("none", ""),
    ],
)
def test_the_answer_of_a_solution_is_in_its_last_box(text: str, answer: str) -> None:
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("chosen", "rejected", "reason"),
    [
        ("u:a a:b", "u:a a:b", "equal"),
        ("u:a a:b", "u:c a:d", "differ"),
        ("u:a a:", "u:a a:d", "empty"),
        ("u:a u:b", "u:a u:d", "alternate"),
        ("a:b", "a:d", "empty"),
        ("u:a a:b u:c", "u:a a:b u:d", "alternate"),
    ],
)
def test_what_is_no_pair_is_left_out(chosen: str, rejected: str, reason: str) -> None:
    roles = {"u": "user", "a": "assistant"}
    sides = [
        [{"role": roles[t[0]], "content": t[2:]} for t in side.split()]
        for side in (chosen, rejected)
    ]
    assert reason in pair(*sides).reason  # type: ignore[union-attr]


def test_a_task_is_scored_by_its_own_scorer(run: Prepare, tmp_path: Path) -> None:
    run("data", "prepare", "reasoning_gym:countdown", "size=3", "validation_size=1")
    row = rows_of(tmp_path / "data/reasoning_gym_countdown/train.parquet")[0]
    reward = ReasoningGymReward(ReasoningGymReward.Config(name="reasoning_gym"), None)  # type: ignore[arg-type]

    def score(text: str) -> float:
        found = reward.compute_score(None, text, row["reward_model"]["ground_truth"], row["extra_info"])  # fmt: skip
        return float(found["score"])

    answer = row["reward_model"]["ground_truth"]
    assert score(row["response"]) == 1
    # A right answer that differs from the row's answer.
    assert score(f"<answer>1</answer> <answer>({answer}) * 1 / 1</answer>") <= 1
    assert score(f"<answer>({answer})</answer>") == 1
    assert score("<answer>1 + 1</answer>") < 1
    assert score(answer) == 0


@pytest.mark.parametrize(
    ("suite", "name", "columns"),
    [
        (GSM8K, "gsm8k", {"reward/mean"}),
        (ULTRA, "ultrafeedback", {"actor/accuracy"}),
    ],
)
def test_the_printed_command_trains(
    run: Prepare, tmp_path: Path, suite: type[DataRecipeConformance], name: str, columns: set[str]
) -> None:
    said = run("data", "prepare", name, "--from", repository(suite, tmp_path / "copy"))
    [printed] = [line for line in said.splitlines() if line.strip().startswith("dovetail train ")]
    model = make_base(tmp_path / "model", 1)
    settings = {
        "model.path": model, "model.dtype": "float32", "data.train_batch_size": 2, "rollout.n": 2,
        "data.max_prompt_length": 192, "data.max_response_length": 64, "trainer.total_steps": 2,
        "actor.optim.lr": 1e-4, "runtime.device": "cpu", "output_dir": tmp_path / "runs",
    }  # fmt: skip
    if name != "gsm8k":
        del settings["rollout.n"]
    run(*shlex.split(printed)[1:], *(f"{key}={value}" for key, value in settings.items()))
    [directory] = (tmp_path / "runs").glob("*/*")
    assert json.loads((directory / "summary.json").read_text())["status"] == "completed"
    steps = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert columns <= {key for step in steps for key in step}


def test_types_that_differ_between_rows_become_one(tmp_path: Path) -> None:
    from dovetail_datasets.prepare.writing import _array

    types = [pa.schema(list(_array(rows, "x").type)) for rows in ([{"a": {"b": 1}}], [{"a": {"c": "x"}}])]  # fmt: skip
    assert pa.unify_schemas(types, promote_options="permissive").field("a").type.num_fields == 2
