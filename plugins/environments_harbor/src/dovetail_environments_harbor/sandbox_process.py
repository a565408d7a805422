"""Runs the shell of one task in the sandbox of dovetail-rewards: `python sandbox_process.py DESCRIPTOR LIMITS`, in the run's own interpreter.

The descriptor is a socket, by which `trials.py` sends commands to the program below.
"""

from __future__ import annotations

import json
import socket
import sys

from dovetail_rewards.sandbox import Program, ProgramLimits, Sandbox, SandboxError

FOLDERS = ("/app", "/tests", "/solution", "/logs")
"""The root folders that Harbor's tasks expect."""
_SHELL = r"""
import base64, io, json, os, signal, subprocess, tarfile, tempfile

for folder in ("app", "tests", "solution", "logs/agent", "logs/verifier", "logs/artifacts"):
    os.makedirs(folder, exist_ok=True)
# What a task starts must not read the commands, nor answer them.
os.set_inheritable(0, False)
channel = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(0), "w")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def run(command, folder, variables, seconds):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(["bash", "-c", command], cwd=folder, env={**os.environ, **variables}, stdout=out, stderr=err, start_new_session=True)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = None
        texts = [(each.seek(0), each.read(1 << 20).decode("utf-8", "replace"))[1] for each in (out, err)]
    return {"status": status, "out": texts[0], "err": texts[1]}


def put(data, folder):
    os.makedirs(folder, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(data))) as archive:
        archive.extractall(folder, filter="data")
    return {}


def get(path):
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w") as archive:
        archive.add(path, arcname=".")
    return {"data": base64.b64encode(found.getvalue()).decode()}


for line in channel[0]:
    asked = json.loads(line)
    try:
        answer = {"run": run, "put": put, "get": get}[asked.pop("do")](**asked)
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    channel[1].write(json.dumps(answer) + "\n")
    channel[1].flush()
"""


def main(descriptor: int, limits: dict[str, int]) -> None:
    """Run shell commands, received from a socket, in the sandbox until the socket is closed or a limit is reached.

    Exit with the reason on standard error if the shell fails.

    Args:
        descriptor: the file descriptor of the socket.
        limits: the fields of ProgramLimits.
    """
    with socket.socket(fileno=descriptor) as channel, Sandbox(folders=FOLDERS) as sandbox:
        result = sandbox.run(Program(source=_SHELL, channel=channel), ProgramLimits(**limits))
    if not result.ok:
        sys.exit(f"the sandbox's shell ended with {result.verdict}: {result.stderr.decode(errors='replace')[-500:]}")  # fmt: skip


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), json.loads(sys.argv[2]))
    except SandboxError as error:
        sys.exit(str(error))
