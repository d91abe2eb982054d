"""The pictures of the page, each with the sentence that says how to read it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from fedstrat.page import figures
from fedstrat.page.gather import Group, Run
from fedstrat.page.numbers import traffic

Value = Callable[[Mapping[str, Any]], float | None]


@dataclass(frozen=True)
class Chart:
    """A picture of the page.

    Attributes:
        title: What it shows.
        svg: The picture.
        caption: How to read it.
    """

    title: str
    svg: Markup
    caption: str = ""


def curves(
    groups: Sequence[Group], title: str, ylabel: str, value: Value, *, unit: bool = False, whole: bool = False
) -> Chart | None:
    """One line per group over rounds, the mean over seeds, with a band from the lowest to the highest.

    Args:
        groups: The groups, in the order of the legend.
        title: What is shown.
        ylabel: The quantity and its unit.
        value: Reads it from a line of the history; None where the round has none.
        unit: Whether it lies in [0, 1].
        whole: Whether it is a count, shown from 0.

    Returns:
        None if no run has the quantity, or a count never changes.
    """
    with figures.style():
        axes = figures.axes()
        every: list[float] = []
        for place, group in enumerate(groups):
            rounds, matrix = _by_round(group, value)
            if rounds.size == 0:
                continue
            every += _spread(axes, rounds, matrix, place).tolist()
        if not every or (whole and len(set(every)) == 1):
            return None
        axes.set_ylabel(ylabel)
        figures.rounds_axis(axes)
        caption = ""
        if unit:
            axes.set_ylim(-0.02, 1.02)
        elif whole:
            axes.set_ylim(0.0, 1.08 * max(every))
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        elif figures.maybe_log(axes, every):
            caption = "The vertical scale is logarithmic."
        return Chart(title, figures.svg(axes.figure, f"{title} over rounds"), caption)  # type: ignore[arg-type]


def single_accuracy(group: Group) -> Chart | None:
    """Mean accuracy of one run, with the band from the worst to the best tenth of the clients."""
    lines = [line for line in group.runs[0].history if line.get("mean") is not None]
    if not lines:
        return None
    with figures.style():
        axes = figures.axes()
        rounds = [line["round"] for line in lines]
        colour, _ = figures.look(0)
        axes.fill_between(
            rounds, [line["worst10"] for line in lines], [line["best10"] for line in lines],
            color=colour, alpha=0.18, linewidth=0.0,
        )  # fmt: skip
        axes.plot(rounds, [line["mean"] for line in lines], color=colour, linewidth=2.0, marker=_marker(rounds))
        axes.set_ylim(-0.02, 1.02)
        axes.set_ylabel("test accuracy")
        figures.rounds_axis(axes)
        return Chart(
            "Accuracy",
            figures.svg(axes.figure, "Accuracy over rounds"),  # type: ignore[arg-type]
            "Line: mean over clients. Band: from the mean of the worst tenth to that of the best tenth of the clients.",
        )


def clients(groups: Sequence[Group]) -> Chart | None:
    """Every client's accuracy in the last evaluation, sorted, seeds together."""
    with figures.style():
        axes = figures.axes()
        drawn = False
        for place, group in enumerate(groups):
            scores = np.sort([
                client["accuracy"]
                for run in group.runs
                for client in (run.recorded.clients or {}).get("clients", {}).values()
                if client["accuracy"] is not None
            ])  # fmt: skip
            if scores.size:
                drawn = True
                colour, dash = figures.look(place)
                axes.stairs(
                    scores, np.linspace(0.0, 100.0, scores.size + 1), baseline=None,
                    color=colour, linestyle=dash, linewidth=1.8,
                )  # fmt: skip
        if not drawn:
            return None
        axes.set_xlim(0.0, 100.0)
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlabel("share of clients, worst served first (%)")
        axes.set_ylabel("test accuracy of a client")
        return Chart(
            "Accuracy of the single clients",
            figures.svg(axes.figure, "Accuracies of the clients, sorted"),  # type: ignore[arg-type]
            "Every client's accuracy on its own test data in the last evaluation, sorted; all seeds together."
            " The left end shows who is left behind; a flat line is a fair model.",
        )


def cost(groups: Sequence[Group]) -> Chart | None:
    """Accuracy against the bytes of training so far."""
    with figures.style():
        axes = figures.axes()
        ends: list[float] = []
        for place, group in enumerate(groups):
            rounds, matrix = _by_round(group, lambda line: line.get("mean"))
            _, sent = _by_round(group, lambda line: None if line.get("mean") is None else traffic(line["total_bytes"]))
            if rounds.size and sent.shape == matrix.shape:
                megabytes = sent.mean(axis=0) / 1e6
                _spread(axes, megabytes, matrix, place)
                ends.append(float(megabytes[-1]))
        if not ends or max(ends) == 0.0:
            return None
        caption = "Array data of training, up and down, all clients together, as the messages were counted."
        if max(ends) > 8.0 * min(ends):
            axes.set_xscale("log")
            caption += " The horizontal scale is logarithmic."
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlabel("sent so far (MB)")
        axes.set_ylabel("mean test accuracy")
        return Chart("Accuracy against bytes", figures.svg(axes.figure, "Accuracy against bytes sent"), caption)  # type: ignore[arg-type]


def layers(group: Group) -> Chart | None:
    """The share of conflicting client pairs by layer and round, of the group's first run."""
    run = group.runs[0]
    lines = [line for line in run.history if line.get("layers")]
    names = list(dict.fromkeys(name for line in lines for name in line["layers"]))
    if not names:
        return None
    values = np.full((len(names), len(lines)), np.nan)
    for column, line in enumerate(lines):
        for row, name in enumerate(names):
            values[row, column] = line["layers"].get(name, {}).get("conflict-rate", np.nan)
    with figures.style():
        axes = figures.axes(5.4, max(1.9, min(7.0, 0.9 + 0.19 * len(names))))
        figures.heatmap(axes, values, "conflict rate")
        step = -(-len(names) // 30)
        axes.set_yticks(range(0, len(names), step))
        axes.set_yticklabels([_short(name) for name in names[::step]], parse_math=False, fontsize=8)
        ticks = np.unique(np.linspace(0, len(lines) - 1, min(6, len(lines))).round().astype(int))
        axes.set_xticks(ticks, [str(lines[tick]["round"]) for tick in ticks])
        axes.set_xlabel("round")
        title = f"Conflicts by layer: {group.label}"
        caption = f"Seed {run.seed}. First layer on top." if len(group.runs) > 1 else "First layer on top."
        return Chart(title, figures.svg(axes.figure, title), caption)  # type: ignore[arg-type]


def sharpness(groups: Sequence[Group]) -> Chart | None:
    """The sharpness of the final models side by side."""
    found = [(place, group, final_sharpness(group.runs)) for place, group in enumerate(groups)]
    shown = [(place, group, values) for place, group, values in found if values]
    if len(shown) < 2:
        return None
    with figures.style():
        axes = figures.axes(5.4, 1.0 + 0.28 * len(shown))
        for row, (place, _, values) in enumerate(shown):
            colour, _ = figures.look(place)
            axes.barh(row, float(np.mean(values)), color=colour, height=0.62)
            if len(values) > 1:
                axes.plot(values, [row] * len(values), color="#010203", marker="|", linestyle="none", markersize=9)
        axes.set_yticks(range(len(shown)))
        axes.set_yticklabels([_short(group.label, 34) for _, group, _ in shown], parse_math=False)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("rise of the loss at distance 0.05")
        return Chart(
            "Sharpness of the final model",
            figures.svg(axes.figure, "Sharpness of the final models"),  # type: ignore[arg-type]
            "F(w + 0.05 g/|g|) − F(w) on each client's test data, averaged over examples; smaller is flatter."
            " Marks are the single seeds.",
        )


def labels(counts: np.ndarray, title: str, caption: str) -> Chart:
    """Who holds which classes: samples per class (rows) and client (columns)."""
    with figures.style():
        axes = figures.axes(11.0, max(2.4, min(5.5, 1.0 + 0.2 * len(counts))))
        shown = np.where(counts > 0, counts, np.nan).astype(float)
        figures.heatmap(axes, shown, "samples", smallest=0.0, largest=float(counts.max()))
        axes.set_xlabel("client")
        axes.set_ylabel("class")
        return Chart(title, figures.svg(axes.figure, title), caption)  # type: ignore[arg-type]


def final_sharpness(runs: Sequence[Run]) -> list[float]:
    """The last sharpness of every run that measured one."""
    found = [[line["diagnostics"].get("sharpness") for line in run.history if "diagnostics" in line] for run in runs]
    return [last[-1] for values in found if (last := [value for value in values if value is not None])]


def _by_round(group: Group, value: Value) -> tuple[np.ndarray, np.ndarray]:
    """Rounds that every run has a value for, and the values, shape (runs, rounds); runs without any are left out."""
    tables = [{line["round"]: value(line) for line in run.history} for run in group.runs]
    tables = [{t: v for t, v in table.items() if v is not None} for table in tables]
    tables = [table for table in tables if table]
    shared = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    return np.array(shared), np.array([[table[t] for t in shared] for table in tables], dtype=float)


def _spread(axes: Axes, x: np.ndarray, matrix: np.ndarray, place: int) -> np.ndarray:
    """Draw the mean over rows and, with several, the band between lowest and highest."""
    colour, dash = figures.look(place)
    mean: np.ndarray = matrix.mean(axis=0)
    if len(matrix) > 1:
        axes.fill_between(x, matrix.min(axis=0), matrix.max(axis=0), color=colour, alpha=0.15, linewidth=0.0)
    axes.plot(x, mean, color=colour, linestyle=dash, linewidth=1.8, marker=_marker(x), markersize=4)
    return mean


def _marker(points: Sequence[Any] | np.ndarray) -> str:
    return "o" if len(points) <= 8 else ""


def _short(name: str, most: int = 26) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"
