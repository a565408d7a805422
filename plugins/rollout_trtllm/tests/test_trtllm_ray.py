"""The Ray of a server's own is the real one here: TensorRT-LLM would take its workers from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("ray")

STARTS = """
import json
from dovetail_rollout_trtllm.engine_imports import start_ray

start_ray(2)
import ray
addresses = [node["NodeManagerAddress"] for node in ray.nodes()]
print(json.dumps([addresses, ray.cluster_resources()["GPU"]]))
"""


@pytest.mark.ray
@pytest.mark.nightly
def test_its_node_is_on_loopback_and_has_the_replicas_accelerators() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", STARTS],
        env={**clean, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [["127.0.0.1"], 2.0]
