"""A student reaches its teacher's accuracy on the demo's task, trained on the teacher's log-probabilities of the student's samples."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from dovetail import train
from dovetail.cli.main import main

pytest.importorskip("dovetail_demo", reason="needs dovetail-demo")
COMMON = ["seed=1", "project=runs", "tracking=[jsonl]"]


def accuracy(model: str, config: Path, *overrides: str) -> float:
    """Return the share of held-out sums that a model answers right."""
    arguments = ["eval", model, "--config", str(config), "--json", *overrides]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)
    return row["metrics"]["val/mean@1"]


@pytest.mark.nightly
def test_a_student_reaches_its_teachers_accuracy(tmp_path: Path) -> None:
    from dovetail_demo import CONFIG, SFT_CONFIG
    from dovetail_demo.data import make_data, problems
    from dovetail_demo.model import make_base
    from dovetail_demo.warm_start import warm_start, worked_answer

    train_file, val_file = make_data(tmp_path / "data", 1)
    student = warm_start(make_base(tmp_path / "base", 1), train_file, tmp_path / "student", 1)
    # The teacher is the student, which forgets most carries, trained further on right answers.
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{a}+{b}=?"}],
            "response": worked_answer(a, b, carries=True),
        }
        for _ in range(2)
        for a, b in problems(1)[0]
    ]
    right = tmp_path / "right.parquet"
    pq.write_table(pa.Table.from_pylist(rows), right)
    common = [*COMMON, f"output_dir={tmp_path}"]
    taught = train(
        SFT_CONFIG,
        [
            *common,
            "experiment=teacher",
            f"model.path={student}",
            f"data.train_files={right}",
            "trainer.total_steps=150",
        ],
    )
    files = [f"data.train_files={train_file}", f"data.val_files={val_file}"]
    teacher = accuracy(str(taught["model"]), CONFIG, *files)
    summary = train(
        CONFIG,
        [
            *common,
            *files,
            "experiment=distilled",
            f"model.path={student}",
            f"roles.teacher.path={taught['model']}",
            "actor.objective={name: distill, divergence: jsd, top_k: 8}",
            "actor.optim.lr=1e-3",
            "algorithm.kl.in_loss=null",
            "rollout.n=4",
            "trainer.total_steps=40",
            "trainer.validate_every=100",
        ],
    )
    assert teacher > 0.9
    assert summary["accuracy_before"] < 0.5 * teacher
    assert summary["accuracy_after"] >= 0.95 * teacher
