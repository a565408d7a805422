"""mini-swe-agent on the repository of a row: it is as its package has it, and its commands run in the sandbox.

A command sees the repository's files, the system's programs, and no network; what it changes of the files is the next one's.
"""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models import get_model

from dovetail_rewards.sandbox import Program, ProgramLimits, Sandbox

RUN = """
import base64, json, pathlib, subprocess, sys
command = ["/bin/bash", "-c", sys.stdin.read()]
done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
files = [path for path in pathlib.Path().rglob("*") if path.is_file() and not path.is_symlink()]
made = {str(path): base64.b64encode(path.read_bytes()).decode() for path in files if "__pycache__" not in path.parts}
print(json.dumps([done.returncode, done.stdout.decode("utf-8", "replace"), made]))
"""
LIMITS = ProgramLimits(cpu_s=10, processes=64)


class SandboxEnvironment(LocalEnvironment):
    """mini-swe-agent's environment of local commands, in the sandbox.

    Args:
        files: of the repository, by path.
    """

    def __init__(self, files: dict[str, bytes], **settings: Any) -> None:
        super().__init__(**settings)
        self.files, self._sandbox = files, Sandbox()

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> Any:
        """Run a command; the agent is done where it says so."""
        program = Program(source=RUN, stdin=action.get("command", "").encode(), files=self.files)
        result = self._sandbox.run(program, LIMITS)
        try:
            status, output, made = json.loads(result.stdout)
            self.files = {path: base64.b64decode(data) for path, data in made.items()}
            found = {"output": output, "returncode": status, "exception_info": ""}
        except (ValueError, AttributeError):  # it was ended, or its command was
            why = f"the command ended with the verdict {result.verdict}"
            found = {"output": "", "returncode": -1, "exception_info": why}
        self._check_finished(found)
        return found


def main() -> None:
    """Let the agent work on the row, and leave the files as they then are."""
    row = json.loads(Path(os.environ["DOVETAIL_ROW_FILE"]).read_text())
    given = {path: text.encode() for path, text in row["extra_info"]["files"].items()}
    config = get_config_from_spec("mini.yaml")
    config["model"] |= {"model_name": f"openai/{os.environ['DOVETAIL_MODEL']}"}
    environment = SandboxEnvironment(given, **config["environment"])
    agent = DefaultAgent(get_model(config=config["model"]), environment, **config["agent"])
    ended = agent.run(row["prompt"][-1]["content"])
    files = {path: data.decode("utf-8", "replace") for path, data in environment.files.items()}
    left = {"exit_status": ended.get("exit_status"), "files": files}
    Path(os.environ["DOVETAIL_OUTPUT_FILE"]).write_text(json.dumps(left))


if __name__ == "__main__":
    main()
