"""Config classes of the tools."""

from __future__ import annotations

from typing import Literal

import attrs

from dovetail.sections import PluginSection


@attrs.frozen(kw_only=True)
class SearchConfig(PluginSection):
    """Settings of the tool `search`, which searches the documents of a file."""

    documents: str = attrs.field(validator=attrs.validators.min_len(1))
    """File with one document a row: `.jsonl` or `.parquet`."""
    text: str = "text"
    """Column with a document's text."""
    title: str | None = None
    """Column with a document's title, which is searched and shown too; None: documents have no title."""
    results: int = attrs.field(default=3, validator=attrs.validators.ge(1))
    """Maximum number of documents that a search returns."""
    max_characters: int = attrs.field(default=1000, validator=attrs.validators.ge(1))
    """Maximum characters of a document's text that are shown."""
    description: str = "Search documents by words, and return the texts that fit best."
    """The function's description in the prompt."""


@attrs.frozen(kw_only=True)
class HttpConfig(PluginSection):
    """Settings of the tool `http`, which sends HTTP requests to the configured hosts."""

    hosts: tuple[str, ...] = attrs.field(validator=attrs.validators.min_len(1))
    """Hosts to which requests may go, such as `api.example.org`, `*.example.org` or, with a port, `127.0.0.1:8000`."""
    methods: tuple[Literal["GET", "POST"], ...] = ("GET",)
    """Methods that the policy may use."""
    headers: dict[str, str] = attrs.field(factory=dict, repr=False)
    """Headers of every request, such as one that holds an API key; the policy does not see them."""
    retries: int = attrs.field(default=2, validator=attrs.validators.ge(0))
    """Retries of a request if the host can't be reached, refuses it for now (425, 429, 503) or, except for a POST, fails temporarily
    (408, 502, 504). Retries count toward the call's time."""
    max_kb: int = attrs.field(default=256, validator=attrs.validators.ge(1))
    """Maximum size of the text that the policy gets from an answer, in KiB; the rest is cut off."""


@attrs.frozen(kw_only=True)
class McpConfig(PluginSection):
    """Settings of the tool `mcp`, which uses an MCP server: one that `command` starts, or a running one at `url`."""

    command: str | None = None
    """The program of a server that communicates by standard input and output. The server starts and ends with each episode."""
    args: tuple[str, ...] = ()
    """The arguments of `command`."""
    env: dict[str, str] = attrs.field(factory=dict, repr=False)
    """The server's environment variables, in addition to a few safe ones (PATH, HOME, …)."""
    cwd: str | None = None
    """The working directory of the server that `command` starts; None: that of the run's process."""
    url: str | None = None
    """The address of a server that speaks streamable HTTP, such as `http://127.0.0.1:8000/mcp`, in place of a command."""
    headers: dict[str, str] = attrs.field(factory=dict, repr=False)
    """Headers of every request to the server at `url`."""
    functions: tuple[str, ...] | None = None
    """The server's tools that the policy may call; None means all."""
    prefix: str = ""
    """Prefix that is added to the server's tool names, for servers whose tools share names."""
    shared: bool = False
    """Whether all episodes share one connection, and thus any state that the server keeps for it; meant for stateless servers. If the
    server ends, it is restarted.
    """
    max_connections: int = attrs.field(default=64, validator=attrs.validators.ge(1))
    """Maximum number of episodes that have a connection at once; further episodes wait, which counts toward their time limit. Without
    effect if `shared` is true.
    """
    fail_on: Literal["crash", "error", "never"] = "crash"
    """Which error answers (`isError`) fail the episode; the policy is shown the others. `crash`: unexpected exceptions of a tool, for
    which servers of the Python SDK answer only `Error executing tool NAME`; `error`: all; `never`: none.
    """
    start_timeout: float = attrs.field(default=30.0, validator=attrs.validators.gt(0))
    """Seconds that connecting, or starting the server, may take."""


@attrs.frozen(kw_only=True)
class VerlConfig(PluginSection):
    """Settings of the tool `verl`, which runs tools that were written for the framework verl."""

    tools_config: str = attrs.field(validator=attrs.validators.min_len(1))
    """verl's YAML file of tools: `tools`, each with `class_name`, `config` and perhaps `tool_schema`."""
