"""CRAFT's curve beside the one that its authors published: ``python -m benchmarks.parity LABEL=FOLDER ...``.

Each folder is a comparison of one run, such as ``fedstrat compare recipes/craft-parity-small.toml`` makes. Adds the
curves to those in ``benchmarks/results/craft-parity.csv``, and draws ``craft-parity.png`` beside it.
"""

import argparse
import csv
import json
from pathlib import Path

from matplotlib.figure import Figure

from fedstrat.experiments.recipe import read

RESULTS = Path(__file__).parent / "results"
RECIPE = Path(__file__).parents[1] / "recipes" / "craft-parity.toml"

Curve = list[tuple[int, float, float]]
"""(round, mean accuracy over clients, loss)."""


def published() -> Curve:
    """What the authors' log prints; their round t is our round t + 1."""
    recipe = read(RECIPE)
    assert recipe.published is not None
    rows = recipe.published.rows.items()
    return [(int(label.rpartition(" ")[2]) + 1, float(row["mean"]), float(row["loss"])) for label, row in rows]


def measured(folder: Path) -> Curve:
    (history,) = (folder / "cells").glob("*/history.jsonl")
    lines = [json.loads(line) for line in history.read_text(encoding="utf-8").splitlines()]
    return [(line["round"], line["mean"], line["loss"]) for line in lines if line["mean"] is not None]


def kept() -> dict[str, Curve]:
    """The curves of earlier calls."""
    curves: dict[str, Curve] = {}
    if (path := RESULTS / "craft-parity.csv").exists():
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                point = int(row["round"]), float(row["mean"]), float(row["loss"])
                curves.setdefault(row["curve"], []).append(point)
    return curves


def draw(curves: dict[str, Curve]) -> Figure:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for label, curve in curves.items():
        style = "ko--" if label == "published" else ".-"
        axes.plot([point[0] for point in curve], [point[1] for point in curve], style, label=label)
    axes.set(xlabel="round", ylabel="mean test accuracy over clients", ylim=(0, 1), xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", ncols=2)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="LABEL=FOLDER")
    curves = {**kept(), "published": published()}
    for run in parser.parse_args().runs:
        label, _, folder = run.partition("=")
        curves[label] = measured(Path(folder))
    with (RESULTS / "craft-parity.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["curve", "round", "mean", "loss"])
        table.writerows(
            (label, r, f"{m:.4f}", f"{loss:.4f}") for label, curve in curves.items() for r, m, loss in curve
        )
    draw(curves).savefig(RESULTS / "craft-parity.png", dpi=110)


if __name__ == "__main__":
    main()
