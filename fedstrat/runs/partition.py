"""``fedstrat partition``: who holds what, before anything is trained."""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedstrat.data.clients import shared
from fedstrat.data.heterogeneity import Holdings, holdings
from fedstrat.errors import ConfigError
from fedstrat.runs.launch import check, find_app
from fedstrat.runs.overrides import read_app, read_pairs

MOST_ROWS = 30
"""Clients that are listed one by one; of more only the extremes are."""
EXTREMES = 3
MOST_IN_ORDER = 100
"""Clients that the picture shows in their own order."""
_MOST_LABELS = 6


def show_partition(pairs: Sequence[str] = (), app: Path | None = None, out: Path | None = None) -> str:
    """Describe the partition that a run with these settings would use.

    Args:
        pairs: The arguments of ``-c``, as ``fedstrat run`` takes them.
        app: Folder of the Flower app; None looks in the working directory, then where fedstrat lies.
        out: Folder for ``partition.png`` and ``partition.csv``; None writes nothing.

    Returns:
        The table.

    Raises:
        ConfigError: A wrong setting, or a folder that can't be written.
        DataError: The data can't be read, or the partition can't exist.
    """
    defaults = read_app(find_app(app))
    config = check(defaults, read_pairs(pairs, defaults))
    if config.num_clients < 1:
        raise ConfigError("num-clients=0: expected 1 or more, the clients that the data is shared out to")
    source, shares = shared(config.flat)
    held = holdings(source.y, shares, source.num_classes)
    title = f"{config.dataset.name}, partition {config.dataset.partition}, {config.num_clients} clients"
    lines = [f"{title}, seed {config.seed}", *table(held), *warnings(held)]
    if out is not None:
        out = out.expanduser()
        try:
            out.mkdir(parents=True, exist_ok=True)
            draw_partition(held, title).savefig(out / "partition.png", dpi=150)
            _write_csv(held, out / "partition.csv")
        except OSError as error:
            raise ConfigError(f"--out {out}: can't write there: {error.strerror}") from None
        lines += [str(out / "partition.png"), str(out / "partition.csv")]
    return "\n".join(lines)


def table(held: Holdings) -> list[str]:
    """Summarise a partition in lines of text: spread over the clients, then all clients or the extreme ones."""
    rows: dict[str, NDArray[np.int64] | NDArray[np.float64]] = {
        "train samples": held.sizes,
        "test samples": held.test.sum(axis=1),
        "labels": held.num_labels,
        "label entropy, nats": held.entropy,
        "distance to all, TV": held.distance,
    }
    used = "every sample is held" if not held.unused else f"{held.unused} samples belong to nobody"
    again = f", {held.repeated} training samples more than once" if held.repeated else ""
    totals = f"{held.train.sum()} training and {held.test.sum()} test samples with {held.train.shape[1]} labels"
    totals += f"; {held.held_back} samples are held back for validation" if held.held_back else ""
    lines = [
        f"{totals}; {used}{again}",
        f"{'over the clients':<20} {'mean':>9} {'min':>9} {'median':>9} {'max':>9}",
    ]
    for name, values in rows.items():
        known = values[~np.isnan(values)]
        numbers = [known.mean(), known.min(), np.median(known), known.max()] if known.size else [np.nan] * 4
        lines.append(f"{name:<20} " + " ".join(f"{number:>9.4g}" for number in numbers))
    lines.append(
        f"{'client':>8} {'train':>7} {'test':>7} {'labels':>7} {'entropy':>8} {'distance':>9}  samples by label"
    )
    if len(held.sizes) <= MOST_ROWS:
        return lines + [_row(held, client) for client in range(len(held.sizes))]
    by_size = np.argsort(held.sizes, kind="stable")
    by_distance = np.argsort(np.nan_to_num(held.distance, nan=-1.0), kind="stable")
    extremes = {
        "smallest": by_size[:EXTREMES],
        "largest": by_size[: -EXTREMES - 1 : -1],
        "farthest from all": by_distance[: -EXTREMES - 1 : -1],
        "nearest to all": by_distance[~np.isnan(held.distance[by_distance])][:EXTREMES],
    }
    for name, clients in extremes.items():
        lines += [f"{name}:", *(_row(held, int(client)) for client in clients)]
    return lines


def warnings(held: Holdings) -> list[str]:
    """Say what a run with this partition would suffer from."""
    empty = int((held.sizes == 0).sum())
    if not empty:
        return []
    text = (
        f"warning: {empty} of {len(held.sizes)} clients have no training samples and can't train; their entropy and"
        " distance are nan, and left out of the lines over the clients. Use fewer clients, a larger dataset.alpha or,"
        " where the partition takes it, a larger dataset.min-size"
    )
    return [text]


def draw_partition(held: Holdings, title: str = "") -> Figure:
    """Draw who holds what: the training samples of each client by label, and below the mix of its labels.

    Up to 100 clients stand in their own order. Of more, the upper panel shows the sizes from the largest to the
    smallest, and the lower one the mixes in the order of the clients' commonest labels.
    """
    count, num_labels = held.train.shape
    colors = _colors(num_labels)
    figure = Figure(figsize=(9.0, 6.0), layout="constrained")  # pyplot would keep it for ever
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=11)
    top, bottom = figure.subplots(2, 1)
    counts = held.train.astype(float)
    mix = counts / np.maximum(held.sizes, 1)[:, np.newaxis]
    if count <= MOST_IN_ORDER:
        _stack(top, counts, colors)
        _stack(bottom, mix, colors)
        step = max(1, count // 10)
        for axes in (top, bottom):
            axes.set_xticks(np.arange(0, count, step) + 0.5, [str(client) for client in range(0, count, step)])
        bottom.set_xlabel("client")
    else:
        _stack(top, np.sort(held.sizes)[::-1, np.newaxis].astype(float), [(0.3, 0.3, 0.3)])
        _stack(bottom, mix[np.lexsort((-mix.max(axis=1), mix.argmax(axis=1)))], colors)
        top.set_xlabel("clients, from the largest to the smallest")
        bottom.set_xlabel("clients, by their commonest label")
    top.set_ylabel("training samples")
    bottom.set_ylabel("share of the labels")
    top.set_ylim(bottom=0.0)
    bottom.set_ylim(0.0, 1.0)
    for axes in (top, bottom):
        axes.set_xlim(0, count)
    scale = ScalarMappable(BoundaryNorm(np.arange(num_labels + 1) - 0.5, num_labels), ListedColormap(colors))
    bar = figure.colorbar(scale, ax=[top, bottom], label="label", fraction=0.04, pad=0.02)
    bar.set_ticks(list(range(0, num_labels, max(1, num_labels // 20))))
    bar.minorticks_off()
    return figure


def _stack(axes: Axes, heights: NDArray[np.float64], colors: list[tuple[float, ...]]) -> None:
    """Bars of all clients without gaps, stacked label by label: one shape a label, so that 1000 clients are quick."""
    edges = np.arange(len(heights) + 1)
    levels = np.concatenate([np.zeros((len(heights), 1)), np.cumsum(heights, axis=1)], axis=1)
    for label, color in enumerate(colors):
        axes.stairs(levels[:, label + 1], edges, baseline=levels[:, label], fill=True, color=color)
    if len(heights) <= MOST_IN_ORDER:
        axes.vlines(edges, 0, 1, transform=axes.get_xaxis_transform(), color="white", linewidth=0.6)


def _colors(count: int) -> list[tuple[float, ...]]:
    """A colour per label: distinct ones for few labels, places of a scale for many."""
    if count <= 20:
        named = colormaps["tab10" if count <= 10 else "tab20"]
        return [named(label) for label in range(count)]
    scale = colormaps["turbo"]
    return [scale(label / (count - 1)) for label in range(count)]


def _row(held: Holdings, client: int) -> str:
    counts = held.train[client]
    largest = [int(label) for label in np.argsort(-counts, kind="stable")[:_MOST_LABELS] if counts[label]]
    mix = " ".join(f"{label}:{counts[label]}" for label in largest)
    rest = " …" if held.num_labels[client] > len(largest) else ""
    return (
        f"{client:>8} {held.sizes[client]:>7} {held.test[client].sum():>7} {held.num_labels[client]:>7}"
        f" {held.entropy[client]:>8.3f} {held.distance[client]:>9.3f}  {mix}{rest}"
    )


def _write_csv(held: Holdings, path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        labels = [f"label_{label}" for label in range(held.train.shape[1])]
        writer.writerow(["client", "train", "test", "labels", "entropy", "distance", *labels])
        for client, counts in enumerate(held.train):
            writer.writerow(
                [
                    client,
                    held.sizes[client],
                    held.test[client].sum(),
                    held.num_labels[client],
                    f"{held.entropy[client]:.6g}",
                    f"{held.distance[client]:.6g}",
                    *counts,
                ]
            )
