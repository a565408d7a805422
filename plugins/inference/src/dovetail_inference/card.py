"""The card of an exported model, `README.md` beside its weights: its origin, its training, its evaluation, and how to serve it."""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from dovetail.config import read_file
from dovetail.errors import DovetailError, PluginError
from dovetail.hooks import hookimpl
from dovetail.interfaces import PluginRef
from dovetail.plugins import load_plugin_class
from dovetail.telemetry import RunDirectory, numbers, read_rows, step_of

_LICENCE = ("license", "license_name", "license_link")
"""Keys of a card's front matter that name the licence."""
_NAMED = ("kind", "name", "distribution", "path", "attribute")
"""Keys of a plugin's entry in `plugins.lock.json` that are also arguments of `PluginRef`, by which the plugin is loaded."""
_PACKAGES = ("dovetail-core", "torch", "transformers", "vllm", "sglang", "megatron-core")


class CardWriter:
    """Observer that writes the model card of the model that a run exports at the end."""

    @hookimpl
    def model_exported(self, step: int, path: Path) -> None:
        """Write the model card into the exported model's folder, which is in the run directory."""
        write_card(RunDirectory(path.parent), path, step)


def write_card(run: RunDirectory, directory: Path, step: int, role: str = "actor") -> Sequence[str]:
    """Write `README.md` into an exported model, with the front matter of the Hugging Face hub's model cards.

    If the run directory lacks a fact, for example because a file is damaged, logs a warning and writes no card.

    Args:
        run: the run directory.
        directory: the directory of the model, or of an adapter alone.
        step: the step of the exported weights.
        role: the role of the model.

    Returns:
        The commands that serve the model, with `DIR` for its directory; empty for a model that generates nothing.
    """
    import jinja2
    from huggingface_hub import ModelCard

    try:
        template = Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8")
        made = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)  # noqa: S701 - Markdown
        facts = _facts(run, directory, step, role)
        ModelCard(made.render(facts)).save(directory / "README.md")
    except (DovetailError, OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        message = f"the model card of {directory} can't be written: {type(error).__name__}: {error}"
        logging.getLogger("dovetail").warning(message)
        return ()
    lines: list[str] = facts["serve"]
    return lines


def _facts(run: RunDirectory, directory: Path, step: int, role: str) -> dict[str, Any]:
    """Return the variables of the card's template, `card.md.jinja`."""
    from huggingface_hub import ModelCardData

    written = read_file(run.config)
    config = written.tree
    plan, lock = run.read_json("plan.json"), run.read_json("plugins.lock.json")
    model = next(each for each in plan["models"] if each["role"] == role)
    shape = _json(directory / "adapter_config.json") or _json(directory / "config.json")
    adapter = "r" in shape
    architecture = next(iter(shape.get("architectures") or [""]))
    generates = architecture.endswith("ForCausalLM")
    path = str(model["path"])
    serve = []
    if adapter or generates:
        serve = _serve_lines(run, directory, shlex.quote(path), shape.get("r"), lock)
    base, described = _base(path, config["model"].get("revision"))
    made_from = f", made from `{base}`" if base not in (None, path) else ""
    parts = config["data"]["mixture"].values()
    kinds = {"advantage", "objective", "preset"}
    files = [*config["data"]["train_files"], *(file for part in parts for file in part["files"])]
    data = ModelCardData(
        base_model=base,
        **{key: described[key] for key in _LICENCE if key in described},
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation" if generates or adapter else None,
        datasets=list(dict.fromkeys(filter(None, (_hub_id(f, "datasets") for f in files)))) or None,
        tags=["dovetail", *sorted({p["name"] for p in lock["plugins"] if p["kind"] in kinds})],
    )
    return {
        "card_data": data.to_yaml(),
        "name": run.path.name,
        "run": run.name,
        "role": role,
        "step": step,
        "adapter": adapter,
        "architecture": architecture,
        "generates": generates,
        "chat_template": (directory / "chat_template.jinja").is_file(),
        "base": f"`{path}`{made_from}",
        "serve": serve,
        "licence": ", ".join(str(described[key]) for key in _LICENCE if key in described),
        "train_files": _in_code(files),
        "val_files": _in_code(config["data"]["val_files"]),
        "max_new_tokens": config["data"]["max_response_length"] or 512,
        "counts": plan["counts"],
        "evaluation": list(_evaluation(run, step)),
        "given": yaml.safe_dump(written.given(), sort_keys=False, allow_unicode=True).rstrip(),
        "python": lock["python"],
        "packages": ", ".join(f"{n} {v}" for n, v in lock["packages"].items() if n in _PACKAGES),
        "plugins": lock["plugins"],
    }


def _serve_lines(
    run: RunDirectory, directory: Path, base: str, rank: int | None, lock: Mapping[str, Any]
) -> list[str]:
    """Return the commands by which vLLM and SGLang serve the exported model, whose path is written as `DIR`, with the run's tool parser.

    If `rank` is given, the export is an adapter of that rank, served on top of the model `base`.
    """
    name = shlex.quote(run.path.name)
    vllm = f"vllm serve DIR --served-model-name {name}"
    sglang = f"python -m sglang.launch_server --model-path DIR --served-model-name {name}"
    if rank is not None:
        vllm = f"vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules {name}=DIR"
        sglang = f"python -m sglang.launch_server --model-path {base} --lora-paths {name}=DIR"
    parsers = [
        PluginRef(**{key: item.get(key) for key in _NAMED})
        for item in lock["plugins"]
        if item["kind"] == "tool_parser"
    ]
    with suppress(PluginError):  # the parser is not installed here
        if len(parsers) == 1:
            template = directory / "chat_template.jinja"
            text = template.read_text(encoding="utf-8") if template.is_file() else ""
            vllm += _parser_options(parsers[0], "vllm", " --enable-auto-tool-choice", text)
            sglang += _parser_options(parsers[0], "sglang", "", text)
    return [vllm, sglang]


def _parser_options(ref: PluginRef, engine: str, before: str, template: str) -> str:
    """Return the command-line options with which a server parses turns like the run's `tool_parser`; empty if it has no such parser.

    Args:
        ref: the run's `tool_parser`.
        engine: the server, `vllm` or `sglang`.
        before: options that the server needs before the option for tool calls; may be empty.
        template: the model's chat template, which tells whether the model writes reasoning.
    """
    parser: Any = load_plugin_class(ref)
    options = ""
    if engine in parser.served_as:
        options = f"{before} --tool-call-parser {parser.served_as[engine]}"
    if engine in parser.reasoning_as and parser.reasoning_tag in template:
        options += f" --reasoning-parser {parser.reasoning_as[engine]}"
    return options


def _base(path: str, revision: str | None) -> tuple[str | None, Mapping[str, Any]]:
    """Return the hub id of the base model at `path`, a directory or a hub id, and the front matter of its model card.

    The hub id is None if it is unknown; the front matter is empty if there is no card.
    """
    from huggingface_hub import ModelCard, hf_hub_download

    folder = Path(path).expanduser()
    if folder.is_dir():
        card, base = folder / "README.md", _hub_id(str(folder.resolve()), "models")
    else:
        card, base = Path(), path
        with suppress(Exception):  # the hub can't be reached, or has no card
            # At most 5 s, so that a run without network still ends soon.
            card = Path(hf_hub_download(path, "README.md", revision=revision, etag_timeout=5))
    described = ModelCard.load(card).data.to_dict() if card.is_file() else {}
    found = described.get("base_model") if folder.is_dir() else None
    # The card of a model that an earlier run exported is written by this module, and names the base on the hub.
    return base or (found if isinstance(found, str) else None), described


def _hub_id(path: str, kind: str) -> str | None:
    """Return the hub repository of a path in the hub's local cache; None for any other path. `kind` is `models` or `datasets`."""
    match = re.search(rf"{kind}--([^/]+?)--([^/]+)/snapshots/", f"{path}/")
    return f"{match[1]}/{match[2]}" if match else None


def _in_code(files: Sequence[str]) -> str:
    return ", ".join(f"`{file}`" for file in files)


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _evaluation(run: RunDirectory, step: int) -> Iterator[tuple[str, str, str, str]]:
    """Yield the metrics of the validation after a step, as text: name, value before training, value after the step, 95% interval.

    A missing value or interval is an empty text.
    """
    by_step: defaultdict[float, dict[str, Any]] = defaultdict(dict)
    for row in read_rows(run.metrics):
        by_step[step_of(row)] |= row
    before, after = by_step[0], by_step[step]
    named = run.read_json("plan.json")["key_figures"]
    for name in after:
        values = [before.get(name), *map(after.get, (name, f"{name}/low", f"{name}/high"))]
        if name.startswith("val/") and (values[3] is not None or name in named):
            style = numbers.style_of(name)
            first, last, low, high = (
                "" if value is None else numbers.write_figure(value, style) for value in values
            )
            yield name.removeprefix("val/"), first, last, f"{low} … {high}" if low else ""
