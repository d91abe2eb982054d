"""A comparison as text, CSV and LaTeX."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedstrat.experiments.cells import spell
from fedstrat.experiments.recipe import Recipe
from fedstrat.experiments.selection import Outcome, Paired, Reached, Row, Spread, pair

_SCORES = {"mean": "final mean", "best10": "best 10 %", "worst10": "worst 10 %", "std": "std"}
_LATEX = {"%": r"\%", "±": r"$\pm$", "*": r"$^{*}$", "_": r"\_", "&": r"\&", "#": r"\#", "−": "$-$", "–": "--"}


@dataclass(frozen=True)
class Grid:
    """A table of texts.

    Attributes:
        header: Its columns.
        rows: Its rows, as wide as the header.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def text(self) -> str:
        """Columns aligned with spaces, for a terminal."""
        widths = [max(len(row[i]) for row in (self.header, *self.rows)) for i in range(len(self.header))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
                 for row in (self.header, *self.rows)]  # fmt: skip
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]]) + "\n"

    def markdown(self) -> str:
        """A table of Markdown."""
        lines = [self.header, ("---",) * len(self.header), *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("*", "\\*") for cell in line) + " |" for line in lines) + "\n"

    def latex(self) -> str:
        """A ``tabular`` with the rules of the package booktabs."""
        lines = [" & ".join(map(_escape, row)) + r" \\" for row in (self.header, *self.rows)]
        columns = "l" * len(self.header)
        body = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"]
        return "\n".join([*body, r"\end{tabular}"]) + "\n"


def scores_grid(recipe: Recipe, rows: Sequence[Row]) -> Grid:
    """Per method: chosen setting, test scores, whole grid, what it cost."""
    searched = any(len(row.method.settings) > 1 for row in rows)
    header = ["method", *(["chosen setting"] if searched else []), *_SCORES.values(), "best round"]
    header += [*(["grid mean"] if searched else []), *(f"to {_share(t)}: rounds / MB" for t in recipe.targets)]
    header += ["MB up", "MB down", "s", "runs"]
    lines = []
    for row in rows:
        setting = [_setting(row)] if searched else []
        grid = [_share(row.grid_mean) if row.grid_mean is not None else "–"] if searched else []
        if row.setting is None:
            blank = ["–"] * (len(_SCORES) + 1)
            line = [row.method.label, *(setting or []), *blank, *grid, *["–"] * (len(recipe.targets) + 3)]
        else:
            scores = [_spread(row.scores[name]) for name in _SCORES]
            best = _share(row.best.mean) if row.best else "–"
            line = [row.method.label, *setting, *scores, best, *grid]
            line += [_reached(seeds) for seeds in row.reached]
            line += [_megabytes(row.up_bytes), _megabytes(row.down_bytes), f"{row.seconds:.0f}"]
        lines.append((*line, _counts(row)))
    return Grid(tuple(header), tuple(lines))


def pairs_grid(rows: Sequence[Row]) -> Grid:
    """Differences of the final mean to the first method, seed by seed."""
    header = ("method", f"minus {rows[0].method.label}", "95 % t-interval", "seeds", "wins", "losses")
    lines = []
    for row in rows[1:]:
        found = pair(rows[0], row)
        if found is None:
            lines.append((row.method.label, "–", "–", "0", "–", "–"))
        else:
            lines.append(
                (
                    row.method.label,
                    f"{_signed(found.spread.mean)} ± {_share(found.spread.std)}",
                    _interval(found),
                    str(found.spread.n),
                    str(found.wins),
                    str(found.losses),
                )
            )
    return Grid(header, tuple(lines))


def published_grid(recipe: Recipe) -> Grid | None:
    """What the paper printed; None where the recipe holds nothing."""
    if recipe.published is None:
        return None
    columns = list(dict.fromkeys(column for row in recipe.published.rows.values() for column in row))
    lines = [
        (label, *(_published(row.get(column)) for column in columns)) for label, row in recipe.published.rows.items()
    ]
    return Grid(("published", *columns), tuple(lines))


def notes(recipe: Recipe, rows: Sequence[Row]) -> str:
    """What a reader must know to read the table."""
    seeds = ", ".join(map(str, recipe.seeds))
    whose = "global model" if recipe.model == "global" else "clients' personal models"
    text = (
        f"Test accuracy of the {whose} over clients after the last round, mean ± standard deviation over seeds {seeds};"
        " 'std' is over clients; 'best round' is the highest mean of any round, which test data chose."
    )
    if any(len(row.method.settings) > 1 for row in rows):
        text += (
            " Settings were chosen by mean validation accuracy, on training data that was held back; * marks a value at"
            " an end of its grid; 'grid mean' averages the final means of all runs of a method, failed ones with their"
            " last evaluation."
        )
    if recipe.targets:
        text += " Rounds and MB to a target are means over the seeds that reached it (k/n: k of n did)."
    text += " MB are the payloads of all training messages."
    troubled = [
        f"{row.method.label} {count} {what}"
        for row in rows
        for count, what in (
            (row.num_failed, "failed"), (row.num_diverged, "diverged"), (row.num_missing, "not made yet"),
        )
        if count
    ]  # fmt: skip
    return text + (f" Of the runs: {'; '.join(troubled)}." if troubled else "")


def scores_csv(recipe: Recipe, rows: Sequence[Row]) -> str:
    """The table with all digits, one row per method."""
    header = ["method", "algorithm", "setting", "seeds", "validation"]
    for name in (*_SCORES, "best_round_mean", "difference"):
        header += [name, f"{name}_std"]
    header += ["difference_low", "difference_high", "wins", "losses", "grid_mean"]
    header += [f"{what}_to_{t:g}" for t in recipe.targets for what in ("seeds", "rounds", "bytes")]
    header += ["up_bytes", "down_bytes", "seconds", "runs", "failed", "diverged", "missing"]
    lines = []
    for row in rows:
        nothing = Spread(math.nan, math.nan, 0)
        spreads = [*(row.scores.get(name, nothing) for name in _SCORES), row.best or nothing]
        paired = pair(rows[0], row) if row is not rows[0] else None
        spreads.append(paired.spread if paired else nothing)
        line: list[object] = [
            row.method.label,
            row.method.algorithm,
            row.why_none or ", ".join(spell(row.setting or ())),
        ]
        line += [len(row.chosen), row.validation, *(v for s in spreads for v in (s.mean, s.std))]
        line += [paired.low, paired.high, paired.wins, paired.losses] if paired else [None] * 4
        line.append(row.grid_mean)
        for seeds in row.reached or [()] * len(recipe.targets):
            there = [r for r in seeds if r is not None]
            line += [len(there), _mean([r.round for r in there]), _mean([r.bytes for r in there])]
        line += [row.up_bytes, row.down_bytes, row.seconds]
        line += [row.num_runs, row.num_failed, row.num_diverged, row.num_missing]
        lines.append(line)
    return _csv(header, lines)


def runs_csv(recipe: Recipe, outcomes: Sequence[Outcome]) -> str:
    """Every run, one a row."""
    header = ["method", "setting", "seed", "status", "diverged", "validation", *_SCORES, "best_round_mean"]
    header += [f"{what}_to_{t:g}" for t in recipe.targets for what in ("rounds", "bytes")]
    header += ["up_bytes", "down_bytes", "seconds"]
    lines = []
    for run in outcomes:
        line: list[object] = [run.method, ", ".join(spell(run.setting)), run.seed, run.status, run.diverged]
        line += [run.validation, *((run.final or {}).get(name) for name in _SCORES), run.best]
        for reached in run.reached or [None] * len(recipe.targets):
            line += [None, None] if reached is None else [reached.round, reached.bytes]
        lines.append([*line, run.up_bytes, run.down_bytes, round(run.seconds, 2)])
    return _csv(header, lines)


def _csv(header: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([["" if _is_nan(value) else value for value in line] for line in lines])
    return file.getvalue()


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _setting(row: Row) -> str:
    if row.setting is None:
        return row.why_none
    names = zip(row.setting, spell(row.setting), strict=True)
    return ", ".join(text + "*" * (key in row.edges) for (key, _), text in names) or "–"


def _counts(row: Row) -> str:
    made = f"{row.num_runs - row.num_missing}" + (f"/{row.num_runs}" if row.num_missing else "")
    troubles = [f"{n} {what}" for n, what in ((row.num_failed, "failed"), (row.num_diverged, "diverged")) if n]
    return f"{made} ({', '.join(troubles)})" if troubles else made


def _spread(found: Spread) -> str:
    return f"{_share(found.mean)} ± {_share(found.std)}"


def _share(value: float) -> str:
    """Three decimals without the leading zero, as tables of accuracies have it."""
    if math.isnan(value):
        return "–"
    return f"{value:.3f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.3f}"


def _signed(value: float) -> str:
    return ("−" if value < 0 else "+") + _share(abs(value))


def _interval(found: Paired) -> str:
    return "–" if math.isnan(found.low) else f"{_signed(found.low)} to {_signed(found.high)}"


def _reached(seeds: Sequence[Reached | None]) -> str:
    there = [reached for reached in seeds if reached is not None]
    if not there:
        return "never"
    rounds, sent = _mean([r.round for r in there]), _mean([r.bytes for r in there])
    return f"{rounds:.0f} / {_megabytes(sent)}" + ("" if len(there) == len(seeds) else f" ({len(there)}/{len(seeds)})")


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.1f}"


def _published(value: float | str | None) -> str:
    return "–" if value is None else str(value)


def _escape(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)
