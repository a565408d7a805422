"""An example of an environment in one file, run by `worker.py`: the policy counts, one number per turn."""

from __future__ import annotations

from typing import Any


def tasks(_settings: dict[str, Any], count: int, held_out: bool) -> list[dict[str, Any]]:
    """Return tasks that ask the policy to count to 1, 2 or 3; held-out prompts have another wording."""
    names = ["Count aloud", "Count on"] if held_out else ["Count", "Please count"]
    return [
        {
            "prompt": f"{names[n % 2]} to {n % 3 + 1}, number {n}.",
            "task": {"to": n % 3 + 1},
            "ground_truth": n % 3 + 1,
        }
        for n in range(count)
    ]


def episode(_settings: dict[str, Any], task: dict[str, Any], model: Any) -> dict[str, Any]:
    """Let the policy count, and return the share of right numbers as reward."""
    messages, right = [{"role": "user", "content": "Say 1."}], 0
    for number in range(1, task["to"] + 1):
        answer = model.chat(messages)
        right += answer.strip() == str(number)
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": f"Say {number + 1}."})
    return {"reward": right / task["to"], "parts": {"turns": task["to"]}}
