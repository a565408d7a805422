"""The card of an exported model, `README.md` beside its weights: what it is made from and how, its evaluation, how to serve it."""

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

from dovetail.config.keys import parse_path
from dovetail.config.load import selection
from dovetail.config.plain_yaml import dump, parse
from dovetail.config.serialise import GIVEN
from dovetail.errors import DovetailError
from dovetail.telemetry import numbers
from dovetail.telemetry.jsonl import read_rows, step_of
from dovetail.telemetry.run_directory import RunDirectory

_LICENCE = ("license", "license_name", "license_link")
"""Keys of a card's front matter."""
_PACKAGES = ("dovetail-core", "torch", "transformers", "vllm", "sglang", "megatron-core")


def write_card(run: RunDirectory, directory: Path, step: int, role: str = "actor") -> None:
    """Write `README.md` into an exported model, with the front matter of the Hugging Face hub's model cards.

    What the run directory does not tell, as where a file is damaged, is a warning, and there is no card.

    Args:
        run: says what was trained on what.
        directory: of the model, or of an adapter alone.
        step: whose weights it has.
        role: of the model.
    """
    import jinja2
    from huggingface_hub import ModelCard

    try:
        template = Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8")
        made = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)  # noqa: S701 - Markdown
        ModelCard(made.render(_facts(run, directory, step, role))).save(directory / "README.md")
    except (DovetailError, OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        message = f"{directory} has no card: {type(error).__name__}: {error}"
        logging.getLogger("dovetail").warning(message)


def _facts(run: RunDirectory, directory: Path, step: int, role: str) -> dict[str, Any]:
    """Return what the template names."""
    from huggingface_hub import ModelCardData

    config = parse(run.config.read_text(encoding="utf-8"))[0]
    plan, lock = run.read_json("plan.json"), run.read_json("plugins.lock.json")
    model = next(each for each in plan["models"] if each["role"] == role)
    shape = _json(directory / "adapter_config.json") or _json(directory / "config.json")
    adapter = "r" in shape
    architecture = next(iter(shape.get("architectures") or [""]))
    generates = architecture.endswith("ForCausalLM")
    path = str(model["path"])
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
        "rank": shape.get("r"),
        "architecture": architecture,
        "generates": generates,
        "chat_template": (directory / "chat_template.jinja").is_file(),
        "base": f"`{path}`{made_from}",
        "base_path": shlex.quote(path),
        "served": shlex.quote(run.path.name),
        "licence": ", ".join(str(described[key]) for key in _LICENCE if key in described),
        "train_files": _in_code(files),
        "val_files": _in_code(config["data"]["val_files"]),
        "max_new_tokens": config["data"]["max_response_length"] or 512,
        "counts": plan["counts"],
        "evaluation": list(_evaluation(run, step)),
        "given": dump(selection(config, map(parse_path, config[GIVEN]))).rstrip(),
        "python": lock["python"],
        "packages": ", ".join(f"{n} {v}" for n, v in lock["packages"].items() if n in _PACKAGES),
        "plugins": lock["plugins"],
    }


def _base(path: str, revision: str | None) -> tuple[str | None, Mapping[str, Any]]:
    """Return the hub id of a base model, None where it has none, and the front matter of its card, empty where there is no card."""
    from huggingface_hub import ModelCard, hf_hub_download

    folder = Path(path).expanduser()
    if folder.is_dir():
        card, base = folder / "README.md", _hub_id(str(folder.resolve()), "models")
    else:
        card, base = Path(), path
        with suppress(Exception):  # the hub can't be reached, or has no card
            # Five seconds are waited: without network the run has ended all the same.
            card = Path(hf_hub_download(path, "README.md", revision=revision, etag_timeout=5))
    described = ModelCard.load(card).data.to_dict() if card.is_file() else {}
    found = described.get("base_model") if folder.is_dir() else None
    # A model that an earlier run exported has the card of this module: its base is the one that the hub knows.
    return base or (found if isinstance(found, str) else None), described


def _hub_id(path: str, kind: str) -> str | None:
    """Return the repository that a path in the hub's cache belongs to."""
    match = re.search(rf"{kind}--([^/]+?)--([^/]+)/snapshots/", f"{path}/")
    return f"{match[1]}/{match[2]}" if match else None


def _in_code(files: Sequence[str]) -> str:
    return ", ".join(f"`{file}`" for file in files)


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _evaluation(run: RunDirectory, step: int) -> Iterator[tuple[str, str, str, str]]:
    """Yield each figure of the validation after a step: name, before training, then, and its interval."""
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
