"""Python: a tool that runs a policy's programs in the sandbox."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dovetail.errors import ToolError
from dovetail.interfaces import PluginConfig, PluginContext, Tool, ToolResult, ToolSchema
from dovetail_rewards.config_code import PythonToolConfig
from dovetail_rewards.functions.code_sandboxes import limits_of, runner_for
from dovetail_rewards.sandbox import (
    Program,
    ProgramLimits,
    ProgramVerdict,
    RemoteSandbox,
    Result,
    Runner,
    SandboxUnreachableError,
)

MAX_RUNNING = 64
"""Maximum number of programs that run at once; a thread waits for each program."""
_SCHEMA = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run a Python program and return what it prints. Every call runs in a new process: nothing is kept from earlier calls.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program."}},
            "required": ["code"],
        },
    },
}


class PythonTool(Tool):
    """Tool that runs a Python program and returns its output or its error. Programs have no network and see no files of the run."""

    name = "python"
    api = ">=2.0,<3"
    capabilities = frozenset({"sandboxed"})
    Config = PythonToolConfig

    @classmethod
    def longest_call(cls, config: PluginConfig) -> float:
        return limits_of(config).wall

    def __init__(self, config: PythonToolConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._runner: Runner | None = None
        self._threads: ThreadPoolExecutor | None = None

    def start(self) -> None:
        """Find a sandbox at the configured isolation level.

        Raises:
            SandboxError: the isolation level is not available on this machine.
        """
        self._runner = runner_for(self.config)
        self._threads = ThreadPoolExecutor(MAX_RUNNING, thread_name_prefix="tool-python")

    def close(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    def schemas(self) -> Sequence[ToolSchema]:
        return (_SCHEMA,)

    async def call(self, state: Any, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        assert self._runner is not None
        assert self._threads is not None
        program, limits = Program(source=arguments["code"]), limits_of(self.config)
        running = self._threads.submit(self._runner.run, program, limits)
        try:
            result = await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            await _end(self._runner, program, running)
            raise
        return ToolResult(content=_shown(result, limits))


async def _end(runner: Runner, program: Program, running: Any) -> None:
    """End a program and wait for its end. A program on a sandbox service can't be ended: return at once, and leave it to its time limit."""
    while not (running.done() or isinstance(runner, RemoteSandbox)):
        # Repeat, since `cancel` has no effect before the thread has begun the run.
        runner.cancel(program)
        await asyncio.sleep(0.02)
    if running.done() and not running.cancelled():
        with contextlib.suppress(SandboxUnreachableError):  # raised by a cancelled run
            running.result()


def _shown(result: Result, limits: ProgramLimits) -> str:
    """Return the program's output, as shown to the policy.

    Raises:
        ToolError: a limit or a signal ended the program.
    """
    printed = result.stdout.decode("utf-8", "replace").rstrip()
    errors = result.stderr.decode("utf-8", "replace").rstrip()
    ended = {
        ProgramVerdict.TIMEOUT: f"it took more than {limits.cpu_s:g} s of CPU time, or {limits.wall:g} s of wall-clock time",
        ProgramVerdict.MEMORY: f"it needed more than {limits.memory >> 20} MiB of memory",
        ProgramVerdict.OUTPUT_LIMIT: f"it printed more than {limits.output >> 10} KiB",
        ProgramVerdict.DISK_LIMIT: f"it wrote files of more than {limits.disk >> 20} MiB",
        ProgramVerdict.CRASHED: f"signal {result.signal} ended it",
    }.get(result.verdict)
    if ended is not None:
        raise ToolError(f"the program was stopped: {ended}" + _after(errors))
    return "\n".join(filter(None, (printed, errors))) or "(the program printed nothing)"


def _after(text: str) -> str:
    return f"\n{text[-1000:]}" if text else ""
