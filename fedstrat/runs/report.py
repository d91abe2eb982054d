"""Pictures of a run, drawn from its results folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedstrat.runs.history import Recorded, load

# From Okabe and Ito's palette, which colour-blind readers can tell apart; for grey prints styles differ too.
_BLUE, _VERMILION, _GREEN, _GREY = "#0072B2", "#D55E00", "#009E73", "#555555"


def draw(folder: str | Path) -> list[Path]:
    """Draw ``accuracy.png`` and ``clients.png`` into a results folder.

    ``accuracy.png`` shows the mean client accuracy over rounds with a band from the worst to the best tenth
    of the clients, and the losses; ``clients.png`` the sorted accuracies of the clients in the last
    evaluation.

    Args:
        folder: A results folder; the run may still go on, or have failed.

    Returns:
        The paths of the two pictures.

    Raises:
        ConfigError: The folder holds no run.
        StateError: One of its files is damaged.
    """
    run = load(folder)
    pictures = {"accuracy.png": _draw_rounds(run), "clients.png": _draw_clients(run)}
    for name, figure in pictures.items():
        temporary = run.path / f".{name}"
        figure.savefig(temporary, format="png", dpi=150)
        temporary.replace(run.path / name)
    return [run.path / name for name in pictures]


def _draw_rounds(run: Recorded) -> Figure:
    figure = figure_of(7.5, 6.5, _title(run))
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _plot_accuracy(top, run)
    _plot_losses(bottom, run)
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    last = max((line["round"] for line in run.history), default=1)
    bottom.set_xlim(0.5, max(last, 1) + 0.5)
    return figure


def _plot_accuracy(axes: Axes, run: Recorded) -> None:
    scored = [line for line in run.history if line["mean"] is not None]
    rounds = [line["round"] for line in scored]
    series = {name: [line[name] for line in scored] for name in ("mean", "accuracy", "worst10", "best10")}
    axes.set_ylabel("test accuracy of the clients")
    axes.set_ylim(0.0, 1.02)
    if not scored:
        _note(axes, "no round was evaluated")
        return
    marker = _marker(scored)
    axes.fill_between(
        rounds,
        series["worst10"],
        series["best10"],
        color=_BLUE,
        alpha=0.18,
        linewidth=0.0,
        label="worst 10 % to best 10 %",
    )
    for edge in ("worst10", "best10"):
        axes.plot(rounds, series[edge], color=_BLUE, linewidth=0.8, marker=marker, markersize=3)
    axes.plot(
        rounds,
        series["mean"],
        color=_BLUE,
        linewidth=2.0,
        marker=marker,
        markersize=5,
        label="mean over clients",
    )
    axes.plot(
        rounds,
        series["accuracy"],
        color=_VERMILION,
        linewidth=1.2,
        linestyle="--",
        marker=marker,
        markersize=4,
        label="over all examples",
    )
    _legend(axes)


def _plot_losses(axes: Axes, run: Recorded) -> None:
    axes.set_xlabel("round")
    axes.set_ylabel("loss")
    curves = [
        ("on the clients' test data", _points(run, lambda line: line["loss"]), _BLUE, "-"),
        ("while training", _points(run, lambda line: line["train"].get("train-loss")), _GREEN, "--"),
    ]
    drawn = [curve for curve in curves if curve[1]]
    for label, points, color, style in drawn:
        rounds, losses = zip(*points, strict=True)
        axes.plot(rounds, losses, color=color, linestyle=style, marker=_marker(points), markersize=4, label=label)
    every = [loss for _, points, _, _ in drawn for _, loss in points]
    if every and 0.0 < 100.0 * min(every) < max(every):
        axes.set_yscale("log")
    failed = [line["round"] for line in run.history if not line["aggregated"]]
    if failed:
        # On the lower edge of the panel, whatever its scale is.
        axes.plot(
            failed,
            [0.03] * len(failed),
            transform=axes.get_xaxis_transform(),
            color=_VERMILION,
            linestyle="none",
            marker="x",
            label="round without an update",
        )
    if drawn or failed:
        _legend(axes)
    if not drawn:
        _note(axes, "no loss was reported")


def _draw_clients(run: Recorded) -> Figure:
    contents = run.clients or {"round": 0, "clients": {}}
    given = [client["accuracy"] for client in contents["clients"].values()]
    scores = np.sort(np.array([score for score in given if score is not None], dtype=float))
    count = scores.size
    title = f"{_title(run)}, each after round {contents['round']}" if count else _title(run)
    if count < len(given):
        title += f"\n{len(given) - count} without test data left out"
    figure = figure_of(7.5, 4.2, title)
    axes = figure.subplots()
    axes.set_ylim(-0.02, 1.02)  # room for the clients at 0
    axes.set_ylabel("test accuracy")
    axes.set_xlabel("clients, from the worst served to the best")
    if not count:
        _note(axes, "no client was evaluated")
        return figure
    edges = np.arange(count + 1) + 0.5
    tenth = (count + 9) // 10
    axes.stairs(scores[:tenth], edges[: tenth + 1], fill=True, color=_VERMILION, alpha=0.8, label="worst 10 %")
    if count > tenth:
        axes.stairs(scores[tenth:], edges[tenth:], fill=True, color=_BLUE, alpha=0.35, label="the others")
    # Clients at 0 have no area: the outline shows that they are there.
    axes.stairs(scores, edges, baseline=None, color=_BLUE, linewidth=1.2)
    mean = float(scores.mean())
    axes.axhline(mean, color=_GREY, linestyle="--", linewidth=1.5, label=f"mean {mean:.3f}")
    axes.set_xlim(edges[0], edges[-1])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    _legend(axes)
    return figure


def figure_of(width: float, height: float, title: str = "") -> Figure:
    """A figure of its own in inches: pyplot would keep it for ever, and choose a backend with a window."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def _legend(axes: Axes) -> None:
    """Above the axes, where it can't hide a curve."""
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4, frameon=False, fontsize=9)


def _title(run: Recorded) -> str:
    config, clients = run.config["run_config"], run.config.get("num_clients")
    data = f" on {config['dataset.name']}" if "dataset.name" in config else ""
    who = f", {clients} client{'s' if clients != 1 else ''}" if clients else ""
    return f"{config.get('algorithm', 'run')}{data}{who}"


def _points(run: Recorded, value: Callable[[dict[str, Any]], float | None]) -> list[tuple[int, float]]:
    """(round, value) of the rounds that have the value."""
    pairs = [(line["round"], value(line)) for line in run.history]
    return [(number, loss) for number, loss in pairs if loss is not None]


def _marker(points: list[Any]) -> str:
    """Single points, which a line alone hides, are marked while there is room."""
    return "o" if len(points) <= 12 else ""


def _note(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=_GREY)
