"""Config classes of the trackers."""

from __future__ import annotations

from typing import Literal, get_args

import attrs

from dovetail.sections import PluginSection


@attrs.frozen(kw_only=True)
class TrackerConfig(PluginSection):
    """Settings common to all trackers of this package."""

    project: str | None = None
    """The project (MLflow: experiment) to log to; None: the run's `project`."""
    run_name: str | None = None
    """The name of the run in the tracker; None: the run's `experiment`."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""
    notes: str = ""
    """A description of the run."""
    samples: bool = True
    """Log the samples of each step (`trainer.samples_per_step`) as a table."""
    queue_size: int = attrs.field(default=10_000, validator=attrs.validators.ge(1))
    """Maximum number of log calls that wait to be written; further calls are dropped and counted."""
    retry_seconds: float = attrs.field(default=30.0, validator=attrs.validators.gt(0))
    """Seconds after which a failed call is tried again, and after which a call that has not returned is reported."""
    close_seconds: float = attrs.field(default=60.0, validator=attrs.validators.ge(0))
    """Seconds at the end of the run for writing the waiting calls, for all trackers together."""


@attrs.frozen(kw_only=True)
class WandbConfig(TrackerConfig):
    """Settings of `wandb`, which logs to Weights & Biases."""

    mode: Literal["online", "offline"] = "online"
    """online: send to the server; offline: write below the run directory, for `wandb sync`."""
    entity: str | None = None
    """User or team; None: the account's default."""


@attrs.frozen(kw_only=True)
class MlflowConfig(TrackerConfig):
    """Settings of `mlflow`, which logs to MLflow."""

    uri: str | None = None
    """Address of the tracking server, or `file:` and a folder; None: `MLFLOW_TRACKING_URI`, or the folder `mlruns` in `output_dir`."""


@attrs.frozen(kw_only=True)
class TensorboardConfig(TrackerConfig):
    """Settings of `tensorboard`, which writes event files to the run directory's folder `tensorboard`.

    `project` and `run_name` have no effect.
    """


@attrs.frozen(kw_only=True)
class SwanlabConfig(TrackerConfig):
    """Settings of `swanlab`, which logs to SwanLab."""

    mode: Literal["online", "offline"] = "online"
    """online: send to the server; offline: write below the run directory, for `swanlab sync`."""
    workspace: str | None = None
    """User or organisation; None: the account's default."""


@attrs.frozen(kw_only=True)
class TrackioConfig(TrackerConfig):
    """Settings of `trackio`, which logs to a local SQLite store or to a Hugging Face Space."""

    space_id: str | None = None
    """A Hugging Face Space to log to; None: the local store (`TRACKIO_DIR`)."""


@attrs.frozen(kw_only=True)
class OpentelemetryConfig(TrackerConfig):
    """Settings of `opentelemetry`, which sends OTLP/HTTP to the address in OpenTelemetry's environment variables.

    `samples` turns spans for episodes on or off; OpenTelemetry has no tables.
    """


Event = Literal["completed", "stopped", "failed", "stalled", "warning", "restarted", "given_up"]


def _someone(config: AlertsConfig, _attribute: object, _value: object) -> None:
    if not config.command and config.webhook_variable is None:
        raise ValueError(
            "tracker `alerts` has no destination; set `command`, `webhook_variable` or both"
        )


@attrs.frozen(kw_only=True)
class AlertsConfig(PluginSection):
    """Settings of `alerts`, which reports events of the run to a command or a webhook."""

    command: tuple[str, ...] = ()
    """A program and its arguments, such as `[./alert.sh, --urgent]`. The program reads the alert from standard input, as JSON."""
    webhook_variable: str | None = None
    """The environment variable that holds the address of the webhook, to which the alert is posted as JSON. The address is never written to
    a file.
    """
    on: tuple[Event, ...] = get_args(Event)
    """Events that cause an alert. `warning`: the start of a warning from docs/diagnosis.md, such as a collapse of entropy or reward."""
    stall_seconds: float = attrs.field(default=1800.0, validator=attrs.validators.gt(0))
    """Seconds after which the run counts as stalled if no step and no phase of a step (such as rollout) started and no metric was logged.
    Set it above the longest phase."""
    timeout: float = attrs.field(default=10.0, validator=[attrs.validators.gt(0), _someone])
    """Seconds for one call of the command or the webhook, and for all waiting alerts at the end of the run."""
