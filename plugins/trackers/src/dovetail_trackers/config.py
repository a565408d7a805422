"""Settings of the trackers."""

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
    """Whether the samples of each step (`trainer.samples_per_step`) are logged as a table."""
    queue_size: int = attrs.field(default=10_000, validator=attrs.validators.ge(1))
    """Log calls that may wait to be written; further ones are dropped and counted."""
    retry_seconds: float = attrs.field(default=30.0, validator=attrs.validators.gt(0))
    """Seconds after which a failed call is tried again, and after which a call that has not returned is reported."""
    close_seconds: float = attrs.field(default=60.0, validator=attrs.validators.ge(0))
    """Seconds at the end of the run for writing the calls that still wait; all trackers share them."""


@attrs.frozen(kw_only=True)
class WandbConfig(TrackerConfig):
    """Weights & Biases."""

    mode: Literal["online", "offline"] = "online"
    """offline: write below the run directory, for `wandb sync`."""
    entity: str | None = None
    """User or team; None: the default one of the account."""


@attrs.frozen(kw_only=True)
class MlflowConfig(TrackerConfig):
    """MLflow."""

    uri: str | None = None
    """Address of the tracking server, or `file:` and a folder; None: `MLFLOW_TRACKING_URI`, or the folder `mlruns` in `output_dir`."""


@attrs.frozen(kw_only=True)
class TensorboardConfig(TrackerConfig):
    """TensorBoard: event files in the folder `tensorboard` of the run directory. `project` and `run_name` do nothing."""


@attrs.frozen(kw_only=True)
class SwanlabConfig(TrackerConfig):
    """SwanLab."""

    mode: Literal["online", "offline"] = "online"
    """offline: write below the run directory, for `swanlab sync`."""
    workspace: str | None = None
    """User or organisation; None: the default one of the account."""


@attrs.frozen(kw_only=True)
class TrackioConfig(TrackerConfig):
    """trackio: a SQLite store on this machine, or a Space."""

    space_id: str | None = None
    """A Hugging Face Space to log to; None: the local store (`TRACKIO_DIR`)."""


@attrs.frozen(kw_only=True)
class OpentelemetryConfig(TrackerConfig):
    """OpenTelemetry, over OTLP/HTTP, to the address in its environment variables. `samples`: whether episodes become spans; there is no
    table.
    """


Event = Literal["completed", "stopped", "failed", "stalled", "warning", "restarted", "given_up"]


def _someone(config: AlertsConfig, _attribute: object, _value: object) -> None:
    if not config.command and config.webhook_variable is None:
        raise ValueError("alerts have no destination: set command, webhook_variable, or both")


@attrs.frozen(kw_only=True)
class AlertsConfig(PluginSection):
    """Alerts by a command or a webhook."""

    command: tuple[str, ...] = ()
    """A program and its arguments, such as `[./alert.sh, --urgent]`. It gets the alert on its standard input, as JSON."""
    webhook_variable: str | None = None
    """The environment variable that holds the address to which the alert is posted, as JSON; the address is never written to a file."""
    on: tuple[Event, ...] = get_args(Event)
    """Events that cause an alert. `warning`: a warning of docs/diagnosis.md begins, such as a collapse of entropy or reward."""
    stall_seconds: float = attrs.field(default=1800.0, validator=attrs.validators.gt(0))
    """Seconds without a phase, a step or a metric after which the run counts as stalled; set it above the longest phase."""
    timeout: float = attrs.field(default=10.0, validator=[attrs.validators.gt(0), _someone])
    """Seconds for a command or a call of the webhook, and for the alerts that are left at the end of the run."""
