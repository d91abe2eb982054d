"""matplotlib figures as SVG that belongs to a page: its fonts, and its colours in light and dark."""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedstrat.runs.report import figure_of

_INK, _RULE, _PAPER = "#010203", "#040506", "#070809"
# Okabe and Ito's palette, which colour-blind readers can tell apart, without its second blue and its yellow, and
# with its black as a slate of its own; the page lightens it where it is dark.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#2B3138")
DASHES = ("solid", "dashed", "dotted", "dashdot")
MOST_CURVES = len(COLOURS) * 3
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9.5,
    "axes.edgecolor": _RULE,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _RULE,
    "grid.linewidth": 0.5,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "axes.axisbelow": True,
}
_THEMED = {_INK: "currentColor", _RULE: "var(--rule)", _PAPER: "var(--paper)"} | {
    colour.lower(): f"var(--c{i})" for i, colour in enumerate(COLOURS)
}


def look(index: int) -> tuple[str, str]:
    """Colour and line style of the group at this place."""
    row, column = divmod(index, len(COLOURS))
    # Each row of dashes begins half-way round the colours, so that a colour's two styles aren't near each other.
    return COLOURS[(column + row * len(COLOURS) // 2) % len(COLOURS)], DASHES[row % len(DASHES)]


@contextmanager
def style() -> Iterator[None]:
    """Draw as the page looks."""
    with mpl.rc_context(_STYLE):
        yield


def axes(width: float = 5.4, height: float = 3.3) -> Axes:
    """Axes of a figure of its own, in inches; 72 units of the SVG are an inch."""
    made: Axes = figure_of(width, height).subplots()
    return made


def rounds_axis(drawn: Axes) -> None:
    """Whole rounds along x."""
    drawn.set_xlabel("round")
    drawn.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def maybe_log(drawn: Axes, values: Sequence[float], factor: float = 50.0) -> bool:
    """Make y logarithmic where positive values spread by more than a factor; returns whether it did."""
    wide = len(values) > 0 and 0.0 < factor * min(values) < max(values)
    if wide:
        drawn.set_yscale("log")
    return wide


def heatmap(drawn: Axes, values: np.ndarray, label: str, *, smallest: float = 0.0, largest: float = 1.0) -> None:
    """Show a matrix as colours, darker for more, with a scale beside it; NaN is white."""
    shades = mpl.colormaps["Blues"](np.linspace(0.15, 1.0, 256))
    drawn.grid(visible=False)
    image = drawn.imshow(
        np.ma.masked_invalid(values),
        aspect="auto",
        cmap=ListedColormap(shades).with_extremes(bad="white"),
        vmin=smallest,
        vmax=largest,
        interpolation="nearest",
    )
    scale = drawn.figure.colorbar(image, ax=drawn, pad=0.02)
    scale.set_label(label)
    scale.outline.set_visible(False)


def svg(figure: Figure, title: str) -> Markup:
    """The figure as an inline SVG element.

    Args:
        figure: What was drawn within :func:`style`.
        title: What it shows, for readers who can't see it.
    """
    # Ids must be unique on the page, and the same each time it is made.
    mpl.rcParams["svg.hashsalt"] = title
    file = io.StringIO()
    figure.patch.set_visible(False)
    for drawn in figure.axes:
        drawn.patch.set_visible(False)
    canvas: Any = FigureCanvasSVG(figure)
    canvas.print_svg(file, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r"#[0-9a-fA-F]{6}\b", lambda found: _THEMED.get(found[0].lower(), found[0]), text)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, 'DejaVu Sans', sans-serif", text)
    head = Markup('<svg role="img" aria-label="{}"').format(title)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    size = re.search(r'<svg[^>]*?(viewBox="[^"]*")[^>]*>', text)
    assert size is not None
    return Markup(f"{head} {size[1]}>{text[size.end() :]}")  # noqa: S704 - matplotlib escapes what it writes
