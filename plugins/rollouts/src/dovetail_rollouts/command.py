"""`dovetail pool`: shows, adds and drains the rollout replicas of an active run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dovetail.cli import render

_RUN = click.argument("run", type=click.Path(path_type=Path))
_NO_WAIT = click.option(
    "--no-wait",
    is_flag=True,
    help="Return once the run has accepted the command, and don't wait for its end.",
)


@click.group()
def pool() -> None:
    """Show and change the rollout replicas of an active run."""


@pool.command()
@_RUN
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(run: Path, as_json: bool) -> None:
    """Print the replicas of RUN, a run directory, and how many groups are queued, being generated, and ready to train on.

    STATE is `current` (the replica has the newest weights and gets requests), `starting` (added, without weights until the next
    update), `receiving` (an update), `behind` (other replicas have newer weights), `draining` or `failed`. REQUESTS is the number of
    unanswered requests. TOKENS is their load: the tokens of their prompts, plus the token limit of every response that has not finished.
    """
    from dovetail.telemetry import RunDirectory
    from dovetail_rollouts.pool_socket import ask

    directory = RunDirectory.open(run)
    if (state := directory.state) != "running":
        if as_json:
            render.dump_json({"state": state, "members": []})
        else:
            render.line(f"the run in {run} is not under way: its state is {state}")
        return
    (found,) = ask(directory, {"command": "status"})
    if as_json:
        render.dump_json({"state": state, **found})
        return
    rows = [
        (
            str(member["replica"]),
            member["state"],
            *(str(member[name]) for name in ("weight_version", "requests", "tokens")),
            member["address"] or "started by the run",
            (member["failure"] or "none").partition("\n")[0],
        )
        for member in found["members"]
    ]
    headers = ("REPLICA", "STATE", "WEIGHTS", "REQUESTS", "TOKENS", "SERVER", "LAST FAILURE")
    render.table(headers, rows)
    render.line(
        f"groups: {found['groups']} under way or queued, {found['ready']} ready to train on"
    )


@pool.command()
@_RUN
@click.argument("url")
@_NO_WAIT
def add(run: Path, url: str, no_wait: bool) -> None:
    """Add the server at URL to the replicas of RUN, and wait until it has the weights.

    Start the server by hand, like the servers of `rollout.urls`. The server gets requests after the next weight update was verified.
    """
    _ask(run, {"command": "add", "address": url}, "starting" if no_wait else None)


@pool.command()
@_RUN
@click.argument("replica")
@click.option(
    "--force",
    is_flag=True,
    help="Drain REPLICA even if it is the last one; the run then ends when it needs samples.",
)
@_NO_WAIT
def drain(run: Path, replica: str, force: bool, no_wait: bool) -> None:
    """Send no more requests to REPLICA (its number, or its server's URL, as `status` prints them), and wait for its unanswered requests.

    Running responses finish first; with `rollout.partial_rollout` they continue on other replicas, from their tokens so far. The server of
    a drained replica may be stopped.
    """
    request = {"command": "drain", "member": replica, "force": force}
    _ask(run, request, "draining" if no_wait else None)


def _ask(run: Path, request: dict[str, Any], enough: str | None) -> None:
    from dovetail.telemetry import RunDirectory
    from dovetail_rollouts.pool_socket import ask

    for answer in ask(RunDirectory.open(run), request):
        state = answer["state"]
        more = {
            "starting": ": its server answers and matches the run; it gets requests after the next weight update",
            "current": f": it holds version {answer.get('weight_version')} of the weights",
            "draining": f": {answer.get('requests')} requests are left",
            "drained": ": its server may be stopped",
        }[state]
        render.line(f"replica {answer['replica']} is {state}{more}")
        if state == enough:
            return
