"""Models outside of training: the model that a command's MODEL argument names, its config, and rollout replicas that serve it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs

from dovetail.checkpoint import CheckpointStore
from dovetail.config import LoadedConfig, config_from_mapping, load_config
from dovetail.errors import CheckpointError, ModelError
from dovetail.interfaces import PluginContext, Tokenizer, WorkerSpec
from dovetail.plugins import guard_exit, make_plugin, ref_for
from dovetail.random_streams import torch_seeded
from dovetail.sections import ModelSection, RunConfig
from dovetail.telemetry import RunDirectory
from dovetail_inference.export import export_checkpoint
from dovetail_rollouts import RolloutPool, replicas_in

_ROLLOUT = "rollout"
_NO_TRAINING = tuple(f"{role}.max_tokens_per_micro_batch={1 << 30}" for role in ("actor", "ref"))
"""Overrides that allow responses longer than a trainer's micro-batch."""


@attrs.frozen(kw_only=True)
class ModelSource:
    """A checkpoint of a run, a directory in Hugging Face format, or a hub id."""

    name: str
    """The name as given, or `RUN@STEP` for a checkpoint."""
    path: str
    """Path of the checkpoint or the directory, or the hub id."""
    run: RunDirectory | None = None
    """The run that the model comes from, whose config is the default; None for a hub id or a directory outside of a run."""
    checkpoint: Path | None = None
    revision: str | None = None
    """The revision of a model on the hub; None for the default branch, and for other sources."""

    @property
    def step(self) -> int | None:
        """The step of the checkpoint; None for other sources."""
        return None if self.checkpoint is None else int(self.checkpoint.name.removeprefix("step_"))

    def load_config(self, file: Path | None, overrides: Sequence[str] = ()) -> LoadedConfig:
        """Load the config for using this model. Its section `model` names this model, or for a checkpoint the base model of the run.

        Args:
            file: the config file; by default the config of the model's run, or the default config if the model comes from no run.
            overrides: `key=value` overrides of the config.

        Raises:
            ConfigError: the config is wrong.
        """
        file = file or (self.run.config if self.run else None)
        own = list(_NO_TRAINING)
        if self.checkpoint is None:
            own += [f"model.path={json.dumps(self.path)}", "model.tokenizer_path=null"]
            own.append(f"model.revision={json.dumps(self.revision)}")
        elif self.run is not None and file != self.run.config:
            model = attrs.asdict(load_config(self.run.config).config.model)
            own += [f"model.{key}={json.dumps(value)}" for key, value in model.items()]
        if file is None:
            return config_from_mapping(
                {"model": {"path": self.path}}, [*own, *overrides], name="config"
            )
        return load_config(file, [*own, *overrides])

    def fingerprint(self) -> str:
        """Return a digest of the names, sizes and times of the model's files, or the revision of a hub id."""
        path = Path(self.path)
        if not path.is_dir():
            return str(self.revision)
        files = [(f.relative_to(path), f.stat()) for f in sorted(path.rglob("*")) if f.is_file()]
        listed = "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in files)
        return hashlib.sha256(listed.encode()).hexdigest()[:16]

    @contextmanager
    def on_disk(self, config: RunConfig) -> Iterator[ModelSection]:
        """Yield the config's model section, from which engines can load the model.

        A checkpoint is first exported to a temporary directory, which is removed at the end of the block.

        Raises:
            CheckpointError: the checkpoint is damaged or can't be exported.
        """
        if self.checkpoint is None or self.run is None:
            yield config.model
            return
        with TemporaryDirectory(prefix="dovetail-") as folder:
            exported = Path(folder) / "model"
            export_checkpoint(self.run, self.checkpoint, exported, "actor")
            yield attrs.evolve(
                config.model,
                path=str(exported),
                tokenizer_path=None,
                chat_template=None,
                revision=None,
            )


def find_models(names: Sequence[str]) -> list[ModelSource]:
    """Find the model for each name; `RUN@all` stands for every checkpoint of a run. For errors see `find_model`."""
    found: list[ModelSource] = []
    for name in names:
        run, _, which = name.rpartition("@")
        if which == "all" and RunDirectory.begun(run):
            store = CheckpointStore(RunDirectory.open(run).checkpoints)
            store.find()
            steps = sorted(int(path.name.removeprefix("step_")) for path in store.saved())
            found += [find_model(f"{run}@{step}") for step in steps]
        else:
            found.append(find_model(name))
    return found


def find_model(name: str) -> ModelSource:
    """Find the model that a name refers to.

    Args:
        name: `RUN` (the latest checkpoint), `RUN@STEP` or `RUN@best`; a directory in Hugging Face format; or a hub id, optionally
            with `@REVISION`.

    Raises:
        CheckpointError: the run has no such checkpoint.
        ModelError: a directory holds neither a run nor a model.
        RunDirectoryError: the directory does not exist, and the name is not a hub id.
    """
    whole = "@" not in name or Path(name).exists()
    base, _, which = (name, "", "") if whole else name.rpartition("@")
    path = Path(base).expanduser()
    if RunDirectory.begun(path):
        return _of_run(RunDirectory.open(path), which)
    if (path / "config.json").is_file():
        above = path.absolute().parent
        run = RunDirectory.open(above) if RunDirectory.begun(above) else None
        return ModelSource(name=name, path=str(path), run=run)
    if path.exists():
        holds = ", ".join(sorted(e.name for e in path.iterdir())[:6]) if path.is_dir() else "a file"
        raise ModelError(
            f"{base} is neither a run directory nor a model: it has no run.json and no config.json (it holds {holds or 'nothing'})",
            hint="name a run (runs/<project>/<experiment>), a directory in Hugging Face format, or a hub id",
        )
    if base.startswith(("/", ".", "~")) or base.count("/") > 1:
        RunDirectory.open(path)  # raises, since the path does not exist
    return ModelSource(name=name, path=base, revision=which or None)


def _of_run(run: RunDirectory, which: str) -> ModelSource:
    try:
        checkpoint = _checkpoint(run, which)
    except CheckpointError as error:
        if error.hint is None and (run.final / "config.json").is_file():
            error.hint = f"name the run's exported model instead: {run.final}"
        raise
    step = checkpoint.name.removeprefix("step_")
    return ModelSource(
        name=f"{run.path}@{step}", path=str(checkpoint), run=run, checkpoint=checkpoint
    )


def _checkpoint(run: RunDirectory, which: str) -> Path:
    store = CheckpointStore(run.checkpoints)
    if which == "best":
        if (best := store.best()) is not None:
            return best.path
        raise CheckpointError(
            f"{run.path} has no best checkpoint",
            hint="name a step as RUN@STEP; for later runs, set trainer.best_metric",
        )
    if not which or which.isdecimal():
        return store.find(int(which) if which else None)
    raise CheckpointError(
        f"{run.path}@{which} does not name a checkpoint; expected a step or `best` after the @",
        hint=f"`dovetail checkpoint list {run.path}` lists the steps",
    )


@contextmanager
def serving(
    config: RunConfig, model: ModelSection, tokenizer: Tokenizer
) -> Iterator[tuple[RolloutPool, PluginContext]]:
    """Start rollout replicas that serve a model from disk, and close them after the block.

    Args:
        config: the config, with the engine and its placement.
        model: the model to load.
        tokenizer: the tokenizer of the model.

    Yields:
        The replicas, and the context with the runtime for further plugins.

    Raises:
        PlanError: the replicas do not fit their pool.
        DovetailError: an engine could not start.
    """
    guard_exit()
    with ExitStack() as started:
        folder = started.enter_context(TemporaryDirectory(prefix="dovetail-"))
        started.enter_context(torch_seeded(config.seed, "run"))
        context = PluginContext(
            seed=config.seed, run_directory=Path(folder), tokenizer=tokenizer, model=model
        )
        runtime: Any = make_plugin(ref_for("runtime", config.runtime), context)
        started.callback(runtime.close)
        runtime.start()
        pools = config.runtime.pools_for((_ROLLOUT,))
        runtime.place(pools)
        spec = WorkerSpec(
            role=_ROLLOUT,
            plugin=ref_for("rollout", config.rollout),
            context=attrs.evolve(context, role=_ROLLOUT),
        )
        pool = RolloutPool(runtime.rollout_replicas(spec, replicas_in(config, pools[0])))
        started.callback(pool.replicas.close)
        yield pool, attrs.evolve(context, runtime=runtime)
