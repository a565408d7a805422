"""A run directory with the files of a completed run of a few steps, for tests of programs that read such files."""

from __future__ import annotations

from dovetail.telemetry import RunDirectory
from dovetail.telemetry.jsonl import append_rows


def finished_run(run: RunDirectory) -> RunDirectory:
    """Write the files of a completed run of six steps into an empty run directory, and return the directory.

    The run has validation before and after training, one failed reward, and one non-finite value.
    """
    append_rows(run.metrics, [{"step": 0, "time": 0.0, "val/mean@1": 0.25}])
    for step in range(1, 7):
        metrics = {
            "reward/mean": 0.1 * step,
            "reward/failures": 1.0 if step == 2 else 0.0,
            "response_length/mean": 20.0 + step,
            "actor/kl": 0.001 * step,
            "actor/entropy": 2.0 / step,
            "actor/grad_norm": float("nan") if step == 3 else 0.5,
            "time/rollout": 0.4,
            "time/update_actor": 0.5,
            "time/step": 1.0,
            "perf/tokens_per_second": 1000.0 + step,
        }
        if step == 2:
            metrics["reward/failures/timeout"] = 1.0
        append_rows(run.metrics, [{"step": step, "time": float(step), **metrics}])
        rows = [
            {
                "prompt": [{"role": "user", "content": f"{step} + {number}"}],
                "response": str(step + number),
                "score": 1.0,
            }
            for number in range(3)
        ]
        run.write_samples(step, rows)
    append_rows(run.metrics, [{"step": 6, "time": 7.0, "val/mean@1": 0.75}])
    run.write_text("config.yaml", "seed: 3\nmodel:\n  path: tiny\n")
    run.write_json(
        "plugins.lock.json", {"plugins": [{"kind": "rollout", "name": "hf", "version": "0.1.0"}]}
    )
    run.write_json("summary.json", {"status": "completed", "seed": 3, "train_seconds": 90.0})
    return run
