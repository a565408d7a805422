"""Charts of a run as inline SVG that follows the page's colours, light or dark."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SERIES_COLOURS = 8
"""The page's stylesheet names so many: `--series-1` …"""
SMOOTHED_FROM = 40
"""Series of at least so many points get a smoothed line over the measured one."""

_INK, _MUTED, _GRID, _PAGE = "#010101", "#020202", "#030303", "#040404"
_SERIES = [f"#0505{number:02x}" for number in range(1, SERIES_COLOURS + 1)]
# matplotlib writes fixed colours; the page needs variables. These stand in until the SVG is written.
_VARIABLES = {
    _INK: "var(--ink)",
    _MUTED: "var(--muted)",
    _GRID: "var(--grid)",
    _PAGE: "var(--card)",
    **{colour: f"var(--series-{number})" for number, colour in enumerate(_SERIES, start=1)},
}
_POINTS_PER_INCH = 72
_FEW_STEPS = 8
"""Up to so many steps are marked one by one on the axis."""


@dataclass(frozen=True)
class Line:
    """One line of a chart: finite values at ascending steps."""

    steps: Sequence[float]
    values: Sequence[float]
    low: Sequence[float] | None = None
    """Lower ends of an interval around the values, drawn as a band."""
    high: Sequence[float] | None = None
    """Upper ends."""


def line_chart(
    name: str, lines: Sequence[Line], *, percent: bool = False, markers: bool = False
) -> str:
    """Lines over steps, as SVG.

    Args:
        name: what the chart shows, for readers of the page that can't see it.
        lines: at least one value altogether.
        percent: label the y axis in percent.
        markers: mark the points, for series with few.
    """
    points = [value for line in lines for value in line.values]
    counts = all(float(value).is_integer() for value in points)

    def draw(axes: Axes) -> None:
        for line, colour in zip(lines, _cycle(len(lines)), strict=True):
            smoothed = len(line.values) >= SMOOTHED_FROM and not markers
            if line.low is not None and line.high is not None and len(line.values) > 1:
                axes.fill_between(
                    line.steps, line.low, line.high, color=colour, alpha=0.15, linewidth=0
                )
            axes.plot(
                line.steps,
                line.values,
                color=colour,
                linewidth=1.0 if smoothed else 1.8,
                alpha=0.35 if smoothed else 1.0,
                marker="o" if markers or len(line.values) == 1 else None,
                markersize=4,
                solid_joinstyle="round",
            )
            if smoothed:
                axes.plot(line.steps, smooth(line.values), color=colour, linewidth=2.0)
        if percent:
            low = min(min(line.low or line.values) for line in lines if line.values)
            high = max(max(line.high or line.values) for line in lines if line.values)
            margin = max(0.02, 0.06 * (high - low))
            axes.set_ylim(max(-0.02, low - margin), min(1.02, high + margin))
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
        elif counts and max(points) - min(points) < 2:
            axes.set_ylim(min(points) - 1, max(points) + 1)

    steps = {step for line in lines for step in line.steps}
    return _render(name, draw, steps, height=200, whole=counts and not percent)


def stacked_chart(name: str, steps: Sequence[float], parts: Mapping[str, Sequence[float]]) -> str:
    """Values that add up, stacked over steps, as SVG.

    Args:
        name: what the chart shows.
        steps: ascending.
        parts: for each part one value a step; drawn from below in this order, the last in grey.
    """

    def draw(axes: Axes) -> None:
        colours = [*_cycle(len(parts) - 1), _SERIES[-1]]
        if len(steps) <= 60:
            below = [0.0] * len(steps)
            for values, colour in zip(parts.values(), colours, strict=True):
                axes.bar(steps, values, bottom=below, width=0.8, color=colour, linewidth=0)
                below = [low + value for low, value in zip(below, values, strict=True)]
        else:
            axes.stackplot(steps, *parts.values(), colors=colours, linewidth=0)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} s")

    return _render(name, draw, set(steps), height=200, width=1040)


def smooth(values: Sequence[float]) -> list[float]:
    """Means over a window centred on each point, an eighth of the series wide, so that no trend is delayed."""
    half = max(1, len(values) // 16)
    windows = (values[max(0, at - half) : at + half + 1] for at in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _cycle(count: int) -> list[str]:
    return [_SERIES[index % SERIES_COLOURS] for index in range(count)]


def _render(
    name: str,
    draw: Any,
    steps: Collection[float],
    *,
    height: float,
    width: float = 500,
    whole: bool = False,
) -> str:
    """Draw on fresh axes over these steps and return the SVG element.

    Args:
        name: what the chart shows.
        draw: is called with the axes.
        steps: every step that has something; at least one.
        height: in CSS pixels at full width.
        width: likewise.
        whole: label the y axis at whole numbers alone.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, MaxNLocator

    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.size": 11,
        "path.simplify": True,
        "axes.formatter.useoffset": False,
        "axes.unicode_minus": False,
        "text.parse_math": False,
    }
    with mpl.rc_context(settings):
        figure = Figure(figsize=(width / _POINTS_PER_INCH, height / _POINTS_PER_INCH))
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        draw(axes)
        figure.patch.set_alpha(0)
        axes.patch.set_alpha(0)
        if len(steps) <= _FEW_STEPS and max(steps) - min(steps) < _FEW_STEPS:
            axes.xaxis.set_major_locator(FixedLocator(sorted(steps)))
            middle, half = (min(steps) + max(steps)) / 2, (max(steps) - min(steps)) / 2
            # A single bar or point stands in the middle, not as wide as the chart.
            axes.set_xlim(middle - max(half + 0.5, 2.0), middle + max(half + 0.5, 2.0))
        else:
            axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))
            axes.margins(x=0.015)
        nice = [1, 2, 5, 10] if whole else [1, 2, 2.5, 5, 10]
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=whole, steps=nice))
        axes.grid(axis="y", color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlabel("step", loc="right", color=_MUTED, fontsize=10, labelpad=1)
        axes.tick_params(length=0, labelcolor=_MUTED, pad=6)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(_GRID)
        # A layout engine would draw the chart once more, to measure its labels.
        form = axes.yaxis.get_major_formatter()
        longest = max(map(len, form.format_ticks(axes.yaxis.get_majorticklocs().tolist())))
        figure.subplots_adjust(
            left=(12 + 7 * longest) / width,  # a digit is 7 wide
            right=1 - 12 / width,
            bottom=36 / height,
            top=1 - (20 if form.get_offset() else 8) / height,  # above the axis: ×10⁸
        )
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _inline(buffer.getvalue(), name)


def _inline(svg: str, name: str) -> str:
    """The `<svg>` element alone: scalable, labelled, in the page's colours, without ids that could clash."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    label = re.sub(r"[^\w %-]", "", name)
    svg = re.sub(
        r'<svg[^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg \1 role="img" aria-label="{label}">', svg
    )
    svg = svg.replace("xlink:href", "href")
    used = set(re.findall(r"#([\w-]+)", svg))
    svg = re.sub(r' id="([\w.-]+)"', lambda match: match[0] if match[1] in used else "", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return re.sub(r"\n\s*", "\n", svg).strip()


def finite(values: Sequence[float | None]) -> list[float]:
    """The values with 0 for what is absent or not finite, so that they can be stacked."""
    return [value if value is not None and math.isfinite(value) else 0.0 for value in values]
