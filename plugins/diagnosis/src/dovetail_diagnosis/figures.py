"""The key figures of a run: the metric, the title and the format of each."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from dovetail.telemetry import numbers

_ACCURACY = r"val/acc@\d+"
PLUS_MINUS = "± half of the 95% bootstrap interval over prompts"
"""Explanation of the sign ±."""


@dataclass(frozen=True)
class Figure:
    """A key figure (a number that logs and reports show): its metric, names, format and better direction."""

    label: str
    """Name for a table or a chart."""
    short: str
    """Name of one word for a log line."""
    metric: str
    """Name of the metric; a regular expression if `pattern` is set."""
    style: str = "number"
    """Format of the values: `number`, `percent`, `length`, `seconds`, or `gib` (GiB, for a metric in bytes)."""
    pattern: bool = False
    others: tuple[str, ...] = ()
    """Metrics to use if `metric` is absent, in order of preference."""
    unless: str = ""
    """Regular expression of more informative metrics. If a metric of the same step matches, this figure is not shown."""
    always: bool = True
    """Whether a report lists the figure as not measured if it has no values; if False, the report then leaves the figure out."""
    better: str = ""
    """The better direction, `up` or `down`; empty if neither direction is better in itself."""

    @property
    def title(self) -> str:
        """The label, followed by `(higher is better)` or `(lower is better)` if the figure has a better direction."""
        words = {"up": "higher is better", "down": "lower is better"}
        return f"{self.label} ({words[self.better]})" if self.better else self.label

    def find(self, names: Iterable[str]) -> str | None:
        """Return the first of the logged metrics `names` that has this figure's value; None if none has it, or if one matches `unless`."""
        known = list(names)
        if self.outdone(known):
            return None
        if self.pattern:
            return next((name for name in known if re.fullmatch(self.metric, name)), None)
        return next((name for name in (self.metric, *self.others) if name in known), None)

    def outdone(self, names: Iterable[str]) -> bool:
        """Return whether this figure is not shown because one of these metrics is more informative (matches `unless`)."""
        return bool(self.unless) and any(re.fullmatch(self.unless, name) for name in names)

    def short_for(self, name: str | None) -> str:
        """Return the figure's name for a log line.

        The name is the end of the metric's name, such as `acc@4` for `val/acc@4`. It is `short` if `pattern` is not set, if there is no metric,
        or if the metric's name ends with `@1` (the accuracy or score of single answers).

        Args:
            name: the metric that has the figure's value, from `find`; None if there is none.
        """
        kind = (name or "").rpartition("/")[2]
        return kind if self.pattern and kind and not kind.endswith("@1") else self.short

    def label_for(self, name: str | None) -> str:
        """Return the figure's label for a table or a chart.

        The label is `title`, or `Validation acc@4` if `short_for` returns `acc@4` instead of `short`.

        Args:
            name: the metric that has the figure's value, from `find`; None if there is none.
        """
        short = self.short_for(name)
        return self.title if short == self.short else f"Validation {short}"

    def value(self, metrics: Mapping[str, float | None]) -> float | None:
        """Return the figure's value in a step's metrics; None if the value is absent or not finite."""
        name = self.find(metrics)
        value = None if name is None else metrics[name]
        return value if value is not None and math.isfinite(value) else None

    def read(self, metrics: Mapping[str, float | None], name: str | None = None) -> str:
        """Return the figure's value in a step's metrics as text; empty if the value is absent.

        If the metrics have the value's 95% interval, the text ends with ± half of the interval's width.

        Args:
            metrics: the metrics of the step.
            name: the metric that `find` returned for the whole run; None searches the step's metrics.
        """
        name = name or self.find(metrics)
        value = None if name is None else metrics.get(name)
        if value is None:
            return ""
        text, ends = self.write(value), _interval(name, metrics)
        if ends is None or ends[0] == ends[1]:
            return text
        half = (ends[1] - ends[0]) / 2
        return f"{text} ± {100 * half:.1f}" if text.endswith("%") else f"{text} ± {half:.2g}"

    def write(self, value: float) -> str:
        """Return a value of the figure as text."""
        return numbers.write_figure(value, self.style)


def _interval(name: str | None, metrics: Mapping[str, float | None]) -> tuple[float, float] | None:
    low, high = (metrics.get(f"{name}/{end}") for end in ("low", "high"))
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return None
    return low, high


REWARD = Figure("Reward", "reward", "reward/mean")
ACCURACY = Figure(
    "Validation accuracy", "accuracy", _ACCURACY, "percent", pattern=True, always=False
)
"""Accuracy, for a reward that says whether a response is right (component `acc`, `accuracy` or `correct`)."""
SCORE = Figure("Validation score", "score", r"val/mean@\d+", pattern=True, unless=_ACCURACY)
"""Mean score, for a reward that does not say whether a response is right. It is shown as a number, since a score may exceed 1."""
LOSS = Figure(
    "Loss", "loss", "actor/loss", others=("actor/nll",), unless=r"reward/failures", always=False
)
"""Training loss, for runs without a reward."""
KL = Figure("KL to reference", "kl", "actor/kl", others=("reward/kl_penalty",))
"""KL in nats per token, from the loss's KL term or else from the penalty in the reward."""
POLICY_KL = Figure("KL of the update", "approx_kl", "actor/approx_kl")
ENTROPY = Figure("Entropy", "entropy", "actor/entropy")
LENGTH = Figure("Response length", "length", "response_length/mean", "length")
CUT_RESPONSES = Figure(
    "Cut responses", "cut", "response_length/clip_ratio", "percent", always=False
)
ZERO_SIGNAL_GROUPS = Figure(
    "Groups without signal", "no_signal", "advantage/zero_signal_groups", "percent", always=False
)
"""Groups whose samples all have an advantage of 0."""
LEARNING_RATE = Figure("Learning rate", "lr", "actor/lr", always=False)
PROBABILITY_DIFFERENCE = Figure(
    "Rollout against trainer: mean difference of probabilities",
    "prob_diff",
    "logprob_check/prob_diff_mean",
    always=False,
)
WEIGHT_CHECK = Figure(
    "Weight check: mean difference in nats a token",
    "weight_check",
    "weight_check/mean_difference",
    always=False,
)
GRAD_NORM = Figure("Gradient norm", "grad_norm", "actor/grad_norm")
PEAK_MEMORY = Figure(
    "Accelerator memory of the actor's update: peak of tensors, GiB",
    "peak_gib",
    "actor/max_memory_allocated_bytes",
    "gib",
    always=False,
)
RESERVED_MEMORY = Figure(
    "Accelerator memory of the actor's update: peak of torch's reserve, GiB",
    "reserved_gib",
    "actor/max_memory_reserved_bytes",
    "gib",
    always=False,
)
HOST_MEMORY = Figure(
    "Host memory of the actor's largest process, GiB",
    "rss_gib",
    "actor/rss_bytes",
    "gib",
    always=False,
)
VALUE_LOSS = Figure("Value loss", "value_loss", "critic/value_loss", always=False)
EXPLAINED_VARIANCE = Figure(
    "Explained variance", "expl_var", "critic/explained_variance", always=False
)
KEPT_GROUPS = Figure("Kept groups", "kept", "filter/kept_groups", "length", always=False)
ROUNDS = Figure("Rounds of generation", "rounds", "filter/rounds", "length", always=False)
SECONDS = Figure("Seconds a step", "step_time", "time/step", "seconds")
SPEED = Figure("Tokens a second", "tokens/s", "perf/tokens_per_second", "length")
LENGTH_CORRELATION = Figure(
    "Score and length", "length_corr", "reward/length_correlation", always=False
)
"""Correlation of score and length within groups. This figure and the next two are signs that the policy games the reward."""
REPEATED_TEXT = Figure("Repeated text", "repeated", "reward/repeated_text", "percent", always=False)
IDENTICAL_RESPONSES = Figure(
    "Identical answers", "identical", "reward/identical_responses", "percent", always=False
)
STALENESS = Figure(
    "Age of samples: mean over tokens, in versions",
    "staleness",
    "rollout/staleness_mean",
    always=False,
)
"""Age of samples, for runs that may train on samples from older weights than the rollout's current ones."""
FAILURES = Figure("Failed rewards", "failures", "reward/failures", "length")

KEY_FIGURES = (
    REWARD,
    ACCURACY,
    SCORE,
    LOSS,
    KL,
    ENTROPY,
    LENGTH,
    STALENESS,
    GRAD_NORM,
    VALUE_LOSS,
    EXPLAINED_VARIANCE,
    KEPT_GROUPS,
    ROUNDS,
    SECONDS,
    SPEED,
)
"""All key figures, in the order in which they are shown."""


def key_figure(metric: str, better: str) -> Figure:
    """Return the key figure (label, format and better direction) for a metric that `Plan.key_figures` names.

    Args:
        metric: the name of the metric.
        better: the metric's better direction, `up` or `down`.
    """
    known = next((figure for figure in KEY_FIGURES if figure.metric == metric), None)
    if known is not None:
        return replace(known, better=better, unless="")
    *owner, name = metric.split("/")
    held_out, role = owner[:1] == ["val"], owner[-1] if owner else "actor"
    label = f"{'held-out ' if held_out else ''}{name.replace('_', ' ')}".capitalize()
    short = f"{'val_' if held_out else ''}{name}"
    if role not in ("actor", "val"):
        label, short = f"{label} of {role}", f"{role}/{short}"
    style = "percent" if name == "accuracy" else "number"
    return Figure(label, short, metric, style, better=better, always=False)


def validation_figure(metric: str | None) -> Figure:
    """Return the key figure for a validation metric: `ACCURACY` for an accuracy such as `val/acc@1`, else `SCORE`."""
    return ACCURACY if re.fullmatch(_ACCURACY, metric or "") else SCORE


def bucket_means(values: Sequence[float], count: int) -> list[float]:
    """Return at most `count` values that summarise a series: the means of equally long parts."""
    if len(values) <= count:
        return list(values)
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    return [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Render a series as at most `width` characters, from ▁ (lowest) to █ (highest)."""
    points = bucket_means([value for value in values if math.isfinite(value)], width)
    if not points:
        return ""
    low, high = min(points), max(points)
    if high <= low:
        return "▄" * len(points)
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * (point - low) / (high - low)))] for point in points)


def write_best(best: object) -> str:
    """Return the best checkpoint of `summary.json` as text: `step 3, val/mean@4 64.8%`; empty without a best checkpoint."""
    if not isinstance(best, Mapping) or not isinstance(best.get("value"), int | float):
        return ""
    metric = str(best.get("metric", ""))
    return f"step {best.get('step')}, {metric} {numbers.write_figure(float(best['value']), numbers.style_of(metric))}"
