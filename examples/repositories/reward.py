"""Scores a repository by its tests: they run afterwards, in a sandbox of their own, over what the agent left of the package."""

from __future__ import annotations

import json
import secrets
from typing import Any

from dovetail_rewards.sandbox import Program, ProgramLimits, Sandbox

RUN = """
import pathlib, sys, unittest
word = sys.stdin.read()
found = unittest.TestLoader().discover("tests", top_level_dir=".")
result = unittest.TextTestRunner(stream=sys.stderr).run(found)
print(word, result.testsRun - len(result.failures) - len(result.errors), result.testsRun)
"""
_SANDBOX = Sandbox()


def compute_score(ground_truth: str, trajectory: dict[str, Any]) -> dict[str, float]:
    """Return 1 where all tests pass: those of the ground truth. Of what the agent left only the package counts."""
    truth = json.loads(ground_truth)
    left = trajectory["output"]["files"].items()
    files = {path: text for path, text in left if path.startswith(f"{truth['package']}/")}
    files = {path: text.encode() for path, text in {**files, **truth["tests"]}.items()}
    word = secrets.token_hex()  # which a package that ends the process does not print
    result = _SANDBOX.run(Program(source=RUN, stdin=word.encode(), files=files), ProgramLimits())
    last = result.stdout.decode("utf-8", "replace").splitlines()[-1:]
    said, passed, count = last[0].split() if last and last[0].startswith(word) else ("", "0", "1")
    return {"score": float(said == word and passed == count), "passed": int(passed)}
