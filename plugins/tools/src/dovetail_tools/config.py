"""Settings of tools."""

from __future__ import annotations

from typing import Literal

import attrs

from dovetail.sections import PluginSection


@attrs.frozen(kw_only=True)
class SearchConfig(PluginSection):
    """Settings of search."""

    documents: str = attrs.field(validator=attrs.validators.min_len(1))
    """File with a document a row: `.jsonl` or `.parquet`."""
    text: str = "text"
    """Column with a document's text."""
    title: str | None = None
    """Column with a document's title, which is searched and shown too."""
    results: int = attrs.field(default=3, validator=attrs.validators.ge(1))
    """Documents that a search returns at most."""
    max_characters: int = attrs.field(default=1000, validator=attrs.validators.ge(1))
    """Characters of a document's text that are shown."""
    description: str = "Search documents by words, and return the texts that fit best."
    """The function's description in the prompt."""


@attrs.frozen(kw_only=True)
class HttpConfig(PluginSection):
    """Settings of http."""

    hosts: tuple[str, ...] = attrs.field(validator=attrs.validators.min_len(1))
    """Hosts that may be asked, such as `api.example.org`, `*.example.org` or, at a port, `127.0.0.1:8000`; no other is."""
    methods: tuple[Literal["GET", "POST"], ...] = ("GET",)
    """Methods that the policy may use."""
    headers: dict[str, str] = attrs.field(factory=dict, repr=False)
    """Sent with every request, such as a key that the policy does not see."""
    retries: int = attrs.field(default=2, validator=attrs.validators.ge(0))
    """Further tries of a request where the host can't be reached, refuses it for now (425, 429, 503) or fails for a while (408, 502, 504);
    the latter not of a POST. They count as the call's time."""
    max_kb: int = attrs.field(default=256, validator=attrs.validators.ge(1))
    """KiB of an answer that are read."""


@attrs.frozen(kw_only=True)
class McpConfig(PluginSection):
    """Settings of mcp: a server that is started by a command, or one at an address."""

    command: str | None = None
    """The program of a server that speaks on standard input and output; it is started, and ended, with each episode."""
    args: tuple[str, ...] = ()
    """Its arguments."""
    env: dict[str, str] = attrs.field(factory=dict, repr=False)
    """Its environment variables, besides a few that are safe (PATH, HOME, …)."""
    cwd: str | None = None
    """Its working directory."""
    url: str | None = None
    """The address of a server that speaks streamable HTTP, such as `http://127.0.0.1:8000/mcp`, in place of a command."""
    headers: dict[str, str] = attrs.field(factory=dict, repr=False)
    """Sent to it with every request."""
    functions: tuple[str, ...] | None = None
    """The server's tools that the policy may call; None means all."""
    prefix: str = ""
    """Put before the names of its tools, where two servers have tools of one name."""
    shared: bool = False
    """Whether all episodes share one connection, and so what the server keeps for it: for servers without a state. One that ends is started
    again."""
    max_connections: int = attrs.field(default=64, validator=attrs.validators.ge(1))
    """Episodes that have the tool at once, where it is not shared; others wait, which counts as their time."""
    fail_on: Literal["crash", "error", "never"] = "crash"
    """Which answers that say `isError` fail the episode; all others are shown to the policy. `crash`: where a tool raised what its server
    did not expect, for which servers of the Python SDK say `Error executing tool NAME` and no more; `error`: all; `never`: none."""
    start_timeout: float = attrs.field(default=30.0, validator=attrs.validators.gt(0))
    """Seconds to connect, and to start the server."""


@attrs.frozen(kw_only=True)
class VerlConfig(PluginSection):
    """Settings of verl."""

    tools_config: str = attrs.field(validator=attrs.validators.min_len(1))
    """verl's YAML file of tools: `tools`, each with `class_name`, `config` and perhaps `tool_schema`."""
