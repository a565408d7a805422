"""`dovetail import verl|trl`: makes a config, the command to run it, and a report of every key."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import click

from dovetail.errors import ConfigError
from dovetail_migrate.draft import Draft, KeyOutcome
from dovetail_migrate.report import ImportReport, report_on
from dovetail_migrate.trl.read import read_trl
from dovetail_migrate.trl.translate import translate_trl
from dovetail_migrate.verl.compose import VERSIONS
from dovetail_migrate.verl.job import Job, job_of_command, job_of_file
from dovetail_migrate.verl.overrides import is_override, read_override
from dovetail_migrate.verl.script import may_do, run_script
from dovetail_migrate.verl.translate import translate
from dovetail_migrate.verl.words import OTHERS, VerlCommand, read_command

_OUTPUT = click.option("-o", "--output", default="config.yaml", show_default=True, help="File to write the config to; - prints it.")  # fmt: skip
_PARTIAL = click.option("--partial", is_flag=True, help="Write the config without the keys that are refused or unknown.")  # fmt: skip
_JSON = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")


@click.group(name="import")
def import_() -> None:
    """Make a Dovetail config from a command or a config of another system."""


@import_.command(context_settings={"ignore_unknown_options": True})
@click.argument(
    "words", nargs=-1, required=True, metavar="(CONFIG.yaml [KEY=VALUE]... | -- COMMAND...)"
)
@_OUTPUT
@click.option("--version", type=click.Choice([*VERSIONS]), help="verl's version, which gives the defaults of absent keys; by default the installed verl's, or else the newest supported.")  # fmt: skip
@_PARTIAL
@click.option("--arguments-only", is_flag=True, help="Read the words as arguments of verl's command, and run no script.")  # fmt: skip
@click.option("--env", "variables", multiple=True, metavar="NAME=VALUE", help="An environment variable for the script; may be repeated.")  # fmt: skip
@click.option("--rows", type=int, help="Number of rows in the training files; needed if the warm-up is a fraction of the steps.")  # fmt: skip
@_JSON
def verl(
    words: tuple[str, ...],
    output: str,
    version: str | None,
    partial: bool,
    arguments_only: bool,
    variables: tuple[str, ...],
    rows: int | None,
    as_json: bool,
) -> None:
    """Import a verl config, a verl command, or a script that starts verl.

    \b
      dovetail import verl config.yaml
      dovetail import verl -- python3 -m verl.trainer.main_ppo data.train_batch_size=256 …
      dovetail import verl -- bash run_qwen3_8b.sh

    A script runs in a sandbox: without network, in a temporary folder, with stand-ins for python and other programs that
    record their arguments and start nothing. If this machine can't sandbox the script, nothing is run. In that
    case, let the script print its verl command (by echo), and import that command with --arguments-only.
    """  # noqa: D301 - click's mark of a block that it leaves as it is
    version, found = _version(version)
    notes = [found]
    jobs = list(_jobs(words, version, arguments_only=arguments_only, variables=variables))  # fmt: skip
    for number, job in enumerate(jobs, start=1):
        path = Path(output)
        several = len(jobs) > 1 and output != "-"
        target = str(path.with_stem(f"{path.stem}-{number}")) if several else output
        draft = translate(job, rows)
        given = {key: (each.spelled, each.value) for key, each in job.given.items()}
        report = report_on(given, draft, [*notes, *job.twice, *_on_several_nodes(draft)])
        source = f"verl {job.version}, {job.config_name}"
        finish(draft, report, target, source, partial=partial, as_json=as_json)


def _on_several_nodes(draft: Draft) -> Iterator[str]:
    """Yield advice for runs on several nodes; verl's own layout is imported unchanged."""
    nodes, gpus = (int(draft.values.get(f"runtime.{key}") or 1) for key in ("nodes", "gpus_per_node"))  # fmt: skip
    if nodes == 1:
        return
    if draft.values.get("actor.engine.name") == "fsdp2" and "actor.engine.shard_size" not in draft.values:  # fmt: skip
        yield f"actor.engine.shard_size={gpus} gathers parameters only within a node, if the model's states fit on its {gpus} accelerators"


@import_.command()
@click.argument("config", type=click.Path(path_type=Path))
@_OUTPUT
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of processes that TRL would run on; TRL's batch sizes are per process.",
)
@_PARTIAL
@_JSON
def trl(config: Path, output: str, processes: int, partial: bool, as_json: bool) -> None:
    """Import TRL's GRPOConfig, SFTConfig or DPOConfig from CONFIG: a Python file, which is parsed but not run, or YAML."""
    job = read_trl(config)
    draft = translate_trl(job, processes)
    given = {key: (key, getattr(value, "source", value)) for key, value in job.given.items()}
    notes = [
        f"defaults are those of TRL 1.16, on {processes} process{'es' * (processes > 1)} (--processes)"
    ]
    report = report_on(given, draft, notes)
    finish(draft, report, output, f"TRL, {config.name}", partial=partial, as_json=as_json)


def finish(
    draft: Draft, report: ImportReport, target: str, source: str, *, partial: bool, as_json: bool
) -> None:
    """Print the report, and write the config if all keys can be imported or `partial` is set.

    Args:
        draft: the draft of the config.
        report: the report on the draft.
        target: the path of the config, or `-` for standard output.
        source: the origin of the config, for the comment on its first line.
        partial: whether to write the config without the keys that can't be imported.
        as_json: whether to print the report as JSON.

    Raises:
        ConfigError: keys are refused or unknown, or the job has other problems, and `partial` is not set.
    """
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=2))
    else:
        for line in report.lines():
            click.echo(line, err=target == "-")
    if not report.importable and not partial:
        count = report.count(KeyOutcome.REFUSED) + report.count(KeyOutcome.UNKNOWN)
        raise ConfigError(
            f"no config was written: {count} key{'s' * (count != 1)} can't be imported or are unknown{', and the job has other problems' if report.problems else ''}; see the report above",
            hint="correct these keys and problems, or use --partial to write a config without them",
        )
    command = f"dovetail check {target} && dovetail train {target}"
    header = f"Imported from {source} by dovetail import.\n  {command}"
    text = draft.yaml(header)
    if target == "-":
        click.echo(text, nl=False)
        return
    Path(target).write_text(text, "utf-8")
    if not as_json:
        click.echo()
        click.echo(f"wrote {target}. Next:")
        click.echo(f"  {command}")


def _version(asked: str | None) -> tuple[str, str]:
    """Return the version of verl whose defaults apply, and a sentence with the reason."""
    if asked is not None:
        return asked, f"defaults are those of verl {asked}"
    try:
        installed = metadata.version("verl")
    except metadata.PackageNotFoundError:
        return VERSIONS[0], f"defaults are those of verl {VERSIONS[0]}, the newest supported; choose another with --version"  # fmt: skip
    series = installed.split(".")[:2]
    near = next((known for known in VERSIONS if known.split(".")[:2] == series), VERSIONS[0])
    return near, f"verl {installed} is installed; defaults are those of verl {near}"


def _jobs(
    words: Sequence[str],
    version: str,
    *,
    arguments_only: bool,
    variables: Sequence[str],
) -> list[Job]:
    first = Path(words[0])
    if first.suffix in (".yaml", ".yml") and not first.is_file():
        raise ConfigError(f"the file {first} does not exist", hint="correct the path; to import a config that verl ships, import a command with --config-name NAME")  # fmt: skip
    if first.suffix in (".yaml", ".yml"):
        return [job_of_file(first, version, [read_override(word) for word in words[1:]])]
    if arguments_only and all(is_override(word) for word in words):
        words = ["python3", "-m", "verl.trainer.main_ppo", *words]
    words, given = _leading_variables(words, variables)
    if words and words[0] in ("bash", "sh") and not arguments_only:
        commands, places = _of_script(words, given)
    elif words and Path(words[0]).suffix == ".sh" and not arguments_only:
        commands, places = _of_script(["bash", *words], given)
    else:
        commands, places = [tuple(words)], [Path.cwd()]
    return [job_of_command(each, version, places) for each in _training(commands)]


def _leading_variables(
    words: Sequence[str], variables: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    left, given = list(words), dict(v.partition("=")[::2] for v in variables)
    while left and "=" in left[0] and left[0].partition("=")[0].isidentifier() and len(left) > 1:
        name, _, given[name] = left.pop(0).partition("=")
    return left, given


def _of_script(
    words: Sequence[str], variables: dict[str, str]
) -> tuple[list[tuple[str, ...]], list[Path]]:
    """Return the commands that a script starts, and the folders in which its programs may be."""
    rest = [word for word in words[1:] if word not in ("-x", "-e", "-ex", "-xe", "-l")]
    script = Path(rest[0]) if rest else Path()
    click.echo(may_do(script), err=True)
    run = run_script(script, rest[1:], variables)
    if not run.commands or run.status is None:
        last = run.errors.splitlines()[-1] if run.errors else f"it ended with status {run.status}"
        raise ConfigError(
            f"the script {script} started no command: {last}",
            hint="set the environment variables that the script needs by --env NAME=VALUE, and write its arguments after its name",
        )
    above = [folder for folder in script.resolve().parents if len(folder.parts) > 1]
    return list(run.commands), [Path.cwd(), *above]


def _training(commands: Sequence[tuple[str, ...]]) -> list[VerlCommand]:
    read = [(words, read_command(words)) for words in commands]
    found = [command for _, command in read if command is not None and command.trains]
    for _, command in read:
        if command is not None and command.module in OTHERS:
            click.echo(f"in place of {command.module}, use: {_other(command)}")
    if found or any(command is not None and command.module in OTHERS for _, command in read):
        return found
    shown = "; ".join(shlex.join(words)[:80] for words, _ in read[:3])
    raise ConfigError(
        f"none of the given commands starts a training with verl: {shown}",
        hint="give a command such as python3 -m verl.trainer.main_ppo key=value …",
    )


def _other(command: VerlCommand) -> str:
    """Return the Dovetail command that replaces a command of verl that does not train, such as `verl.model_merger`."""
    options = dict(zip(command.rest, command.rest[1:], strict=False))
    if command.module == "verl.model_merger" and "--local_dir" in options:
        return f"{OTHERS[command.module]} {options['--local_dir']} {options.get('--target_dir', 'DIRECTORY')}"
    return OTHERS[command.module]
