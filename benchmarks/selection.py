"""From finished runs to a table: the cell of each method that validation chose, and its test scores over seeds."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SCORES = ("mean", "best10", "worst10", "std")

Knob = float | str


@dataclass(frozen=True, eq=False)
class Method:
    """One row of the table.

    Attributes:
        label: Its name in the table.
        algorithm: Its name in the run config.
        knob: The hyper-parameter that is searched, as the run config spells it without the algorithm's name.
        values: The knob's values, in order.
        lrs: Its learning rates, in order.
        fixed: Further run-config keys of this method alone.
    """

    label: str
    algorithm: str
    knob: str
    values: tuple[Knob, ...]
    lrs: tuple[float, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """The chosen cell of one method.

    Attributes:
        lr: Learning rate.
        value: The knob's value.
        validation: Mean validation accuracy that chose it.
        test: Score -> (mean over seeds, sample standard deviation over seeds).
        mb: Megabytes of a run, mean over seeds.
        grid: Score -> mean over all cells and seeds, on test.
        edges: Which of "lr" and the knob lie at an end of their range.
    """

    lr: float
    value: Knob
    validation: float
    test: Mapping[str, tuple[float, float]]
    mb: float
    grid: Mapping[str, float]
    edges: tuple[str, ...]


def choose(method: Method, seeds: Sequence[int], runs: Sequence[Mapping[str, Any]]) -> Row | None:
    """Choose the cell with the best validation accuracy, mean over clients and seeds; ties go to the first.

    Args:
        method: Whose cells.
        seeds: The seeds of every cell.
        runs: Finished runs, of this and other methods, in any order.

    Returns:
        None while a run of this method is missing.
    """
    found = {(r["lr"], r["value"], r["seed"]): r for r in runs if r["method"] == method.label}
    cells = [(lr, value) for lr in method.lrs for value in method.values]
    if any((*cell, seed) not in found for cell in cells for seed in seeds):
        return None
    by_cell = {cell: [found[*cell, seed] for seed in seeds] for cell in cells}
    validation = {cell: statistics.fmean(r["validation"]["mean"] for r in rs) for cell, rs in by_cell.items()}
    lr, value = best = max(cells, key=validation.__getitem__)
    edges = ["lr"] if lr in (method.lrs[0], method.lrs[-1]) else []
    if not isinstance(value, str) and value in (method.values[0], method.values[-1]):
        edges.append(method.knob)
    return Row(
        lr=lr,
        value=value,
        validation=validation[best],
        test={score: _over_seeds([r["test"][score] for r in by_cell[best]]) for score in SCORES},
        mb=statistics.fmean(r["mb"] for r in by_cell[best]),
        grid={score: statistics.fmean(r["test"][score] for rs in by_cell.values() for r in rs) for score in SCORES},
        edges=tuple(edges),
    )


def markdown(rows: Mapping[Method, Row | None], seconds: Mapping[str, float]) -> str:
    """Return the table; methods that aren't finished are left out.

    Args:
        rows: What :func:`choose` gave for each method.
        seconds: Label -> CPU seconds of one run of the chosen cell, where that was measured.
    """
    lines = [
        "| method | chosen cell | mean | best 10 % | worst 10 % | std | MB | CPU s | all cells: mean / worst 10 % |",
        "|---|---|---|---|---|---|--:|--:|---|",
    ]
    for method, row in rows.items():
        if row is None:
            continue
        names = {"lr": f"lr {row.lr:g}", method.knob: f"{method.knob} {row.value}"}
        cell = ", ".join(text + ("\\*" if name in row.edges else "") for name, text in names.items())
        scores = " | ".join(f"{_short(mean)} ± {_short(std)}" for mean, std in row.test.values())
        taken = f"{seconds[method.label]:.1f}" if method.label in seconds else "–"
        grid = f"{_short(row.grid['mean'])} / {_short(row.grid['worst10'])}"
        lines.append(f"| {method.label} | {cell} | {scores} | {row.mb:.1f} | {taken} | {grid} |")
    return "\n".join(lines) + "\n"


def _over_seeds(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan


def _short(number: float) -> str:
    """Three decimals without the leading zero, as tables of accuracies have it."""
    return f"{number:.3f}".removeprefix("0")
