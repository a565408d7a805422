"""`dovetail doctor`: examines Python, torch and its devices, the dependencies of installed packages and the import of every
plugin, and runs the examinations that packages add.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from contextlib import suppress
from typing import Any

import click

from dovetail.cli import render
from dovetail.plugins import ask, default_index, torch_build
from dovetail_console import host
from dovetail_console.examinations import examine_extensions
from dovetail_console.probe import probed

SCHEMA = 1

_TORCH = """
import torch
cuda = torch.cuda.is_available()
answer({
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
    "threads": torch.get_num_threads(),
})
"""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Examine this environment and every plugin in it.

    Exits with 1 if something is broken. A plugin's missing requirement is shown, but does not count as broken.
    """
    torch, dependencies, plugins = examine_torch(), examine_dependencies(), examine_plugins()
    examined = examine_extensions()
    problems = [
        *([torch["problem"]] if torch["problem"] else []),
        *(item["problem"] for item in dependencies if item["problem"]),
        *(plugin["problem"] for plugin in plugins if plugin["problem"]),
        *(row["problem"] for row in examined if row["problem"]),
        *default_index().problems,
    ]
    report = {
        "schema": SCHEMA,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "host": host.described(),
        "engines": examine_engines(),
        "torch": torch,
        "dependencies": dependencies,
        "plugins": plugins,
        "examined": examined,
        "problems": problems,
    }
    if as_json:
        render.dump_json(report)
    else:
        print_report(report)
    ctx.exit(1 if problems else 0)


def examine_torch() -> dict[str, Any]:
    """Return the version, the build and the devices of the installed torch, and the problem with it (None if there is none)."""
    found: dict[str, Any] = {
        "version": host.torch_version(),
        "build": torch_build(),
        "gpus": host.gpu_names(),
        "devices": [],
        "threads": None,
        "problem": host.cpu_torch_on_gpu_host(),
    }
    if found["version"] is None:
        return {**found, "problem": "torch is not installed\n  → pip install torch"}
    answers, ended = ask(_TORCH, {}, timeout=120)
    if answers:
        found |= answers[0]
    else:
        found["problem"] = (
            f"torch {found['version']} can't be imported: {ended}\n"
            "  → pip install --force-reinstall torch"
        )
    if not found["problem"] and found["gpus"] and not found["devices"]:
        found["problem"] = (
            f"a GPU is here ({found['gpus'][0]}) and torch is built for {found['build']}, but it sees "
            "no device\n  → check the driver's version with nvidia-smi, and CUDA_VISIBLE_DEVICES"
        )
    return found


def examine_dependencies() -> list[dict[str, Any]]:
    """Return the third-party requirements of installed plugins' distributions, each once, with the installed version."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    owners = {canonicalize_name(each.name): each.name for each in default_index().distributions}
    found: dict[str, dict[str, Any]] = {}
    for owner in sorted(owners.values()):
        for text in importlib.metadata.requires(owner) or []:
            requirement = Requirement(text)
            left_out = requirement.marker and not requirement.marker.evaluate({"extra": ""})
            if left_out or canonicalize_name(requirement.name) in owners or text in found:
                continue
            version, lacking = None, "not installed"
            with suppress(importlib.metadata.PackageNotFoundError):
                version = importlib.metadata.version(requirement.name)
                fits = requirement.specifier.contains(version, prereleases=True)
                outside = f"{requirement.name} {version}, which is outside {requirement.specifier}"
                lacking = "" if fits else outside
            lacks = f"{owner} needs {text}; {lacking}\n  → pip install '{text}'"
            found[text] = {
                "name": requirement.name,
                "requirement": text,
                "version": version,
                "problem": lacks if lacking else None,
            }
    return sorted(found.values(), key=lambda item: str(item["name"]))


def examine_engines() -> list[dict[str, Any]]:
    """Return each requirement that plugins have at run time, such as vLLM, with the installed version and the plugins that need it."""
    wanted: dict[tuple[str, ...], dict[str, Any]] = {}
    for entry in default_index().entries():
        for need in entry.needs:
            found = {"any_of": list(need.any_of), "met": need.met, "found": need.found}
            engine = wanted.setdefault(need.any_of, {**found, "plugins": []})
            engine["plugins"].append(f"{entry.kind}/{entry.name}")
    return [engine for _, engine in sorted(wanted.items())]


def examine_plugins() -> list[dict[str, Any]]:
    """Return every plugin with its state after a trial import; `problem` is None if the plugin works or only lacks a requirement."""
    described = []
    for found in probed(default_index().entries()):
        problem = None
        if found.status not in ("compatible", "loadable"):
            problem = f"{found.entry.title} is {found.status}: {found.reason}"
            problem += f"\n  → {found.fix}" if found.fix else ""
        told = {"reason": found.reason, "fix": found.fix, "status": found.status}
        described.append({**found.entry.to_dict(), **told, "problem": problem})
    return described


def print_report(report: dict[str, Any]) -> None:
    """Print the report of `doctor` as text."""
    torch = report["torch"]
    devices = ", ".join(torch["devices"]) or f"CPU, {torch['threads']} threads"
    render.fields(
        [
            ("python", f"{report['python']} ({report['executable']})"),
            ("platform", report["platform"]),
            ("torch", f"{torch['version']} ({torch['build']} build)"),
            ("devices", devices),
            ("gpus", ", ".join(torch["gpus"]) or "none"),
            ("host", _host(report["host"])),
            ("variables", "\n".join(f"{k}={v}" for k, v in report["host"]["variables"].items())),
        ]
    )
    if report["engines"]:
        render.line()
        render.table(
            ("ENGINE", "HERE", "NEEDED BY"),
            [
                (" or ".join(e["any_of"]), e["found"], ", ".join(e["plugins"]))
                for e in report["engines"]
            ],
        )
    render.line()
    render.table(
        ("DEPENDENCY", "VERSION", "REQUIRED"),
        [(d["name"], d["version"] or "missing", d["requirement"]) for d in report["dependencies"]],
    )
    render.line()
    render.table(
        ("KIND", "NAME", "STATE", "DISTRIBUTION", "VERSION", "NEEDS"),
        [
            (p["kind"], p["name"], p["status"], p["distribution"], p["version"], _needs(p["needs"]))
            for p in report["plugins"]
        ],
    )
    if report["examined"]:
        render.line()
        render.table(
            ("EXAMINED", "HERE", "DETAIL"),
            [
                (r["what"], "yes" if r["available"] else "no", r["detail"])
                for r in report["examined"]
            ],
        )
    render.line()
    for problem in report["problems"]:
        render.line(problem, label=click.style("problem: ", fg="red", bold=True))
    render.line(_verdict(report))


def _verdict(report: dict[str, Any]) -> str:
    """Return the last line: the number of problems, or else the plugins that can't run here because of unmet needs."""
    count = len(report["problems"])
    if count:
        return f"{count} problem{'s' if count > 1 else ''}"
    lacking = [
        f"{plugin['kind']}/{plugin['name']}"
        for plugin in report["plugins"]
        if any(not need["met"] for need in plugin["needs"])
    ]
    if not lacking:
        return "all is well"
    return f"nothing is broken, but {', '.join(lacking)} can't run here: not all needs are met"


def _host(told: dict[str, Any]) -> str:
    memory = told["memory_bytes"]
    parts = [f"{told['processors']} processors"]
    parts += [f"{memory / 2**30:.0f} GiB of memory"] if memory else []
    return ", ".join([*parts, f"{told['free_disk_bytes'] / 2**30:.0f} GiB of disk free here"])


def _needs(needs: list[dict[str, Any]]) -> str:
    unmet = [" or ".join(need["any_of"]) for need in needs if not need["met"]]
    if unmet:
        return "unmet: " + ", ".join(unmet)
    return "met" if needs else "-"
