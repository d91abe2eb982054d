"""The tables of the page: rows of text, made from groups of runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedstrat.page import ranks
from fedstrat.page.charts import final_sharpness
from fedstrat.page.gather import IGNORED, Group, Run, differing
from fedstrat.page.numbers import NONE, duration, mean_of, significant, size, spread, traffic

_SCORES = {
    "mean": "mean",
    "accuracy": "over examples",
    "best10": "best 10 %",
    "worst10": "worst 10 %",
    "worst": "worst client",
    "std": "std over clients",
    "loss": "loss",
}
_UPDATES = {
    "conflict-rate": "conflict rate",
    "min-cosine": "smallest cosine",
    "mean-cosine": "mean cosine",
    "update-rank": "rank",
    "drift-mean": "drift, mean",
    "drift-max": "drift, largest",
    "control-norm": "|c|",
}


# Columns of published tables -> the score that they speak of, its factor and digits.
_PUBLISHED = {name: (name, 1.0, 3) for name in _SCORES} | {"accuracy %": ("accuracy", 100.0, 2)}
_STACK = ("fedstrat", "flwr", "torch")


@dataclass(frozen=True)
class Table:
    """A table of the page.

    Attributes:
        caption: What it shows.
        head: Column titles.
        rows: Cells; the first of each row is its title.
        best: (row, column) of the best cells.
    """

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: frozenset[tuple[int, int]] = frozenset()


def results(groups: Sequence[Group]) -> Table:
    """The scores of the last evaluation."""
    finals = [[last_scored(run) for run in group.runs] for group in groups]
    names = list(_SCORES)
    rows = [
        [group.label, str(len(group.runs)), *(spread(line.get(name) for line in lines) for name in names)]
        for group, lines in zip(groups, finals, strict=True)
    ]
    best: set[tuple[int, int]] = set()
    for column, name in enumerate(names, start=2):
        means = [mean_of([line.get(name) for line in lines]) for lines in finals]
        for alike in ranks.comparable(groups):
            known = {row: mean for row, mean in enumerate(means) if groups[row] in alike and mean is not None}
            if len(set(known.values())) > 1:
                wanted = min(known.values()) if name in ("std", "loss") else max(known.values())
                best |= {(row, column) for row, mean in known.items() if mean == wanted}
    caption = (
        "Test accuracy of the global model in the last evaluation. Mean, best and worst: over clients, each on its own"
        " test data. ± is the standard deviation over seeds."
    )
    if best:
        among = " among runs with equal data set, partition and number of rounds" if ranks.unlike(groups) else ""
        caption += f" Bold: the best of a column{among}."
    return Table(caption, ["", "seeds", *_SCORES.values()], rows, frozenset(best))


def personal(groups: Sequence[Group]) -> Table | None:
    """The scores of the clients' own models, where there are some."""
    rows = []
    for group in groups:
        lines = [last_scored(run) for run in group.runs]
        own = [line.get("personal") or {} for line in lines]
        elsewhere = [line.get("personal_elsewhere") or {} for line in lines]
        if any(own):
            cells = [spread(scores.get(name) for scores in own) for name in ("mean", "best10", "worst10", "std")]
            rows.append([group.label, *cells, spread(scores.get("mean") for scores in elsewhere)])
    head = ["", "mean", "best 10 %", "worst 10 %", "std over clients", "mean on other clients' data"]
    return Table("Personal models: every client's own model on its own test data.", head, rows) if rows else None


def costs(groups: Sequence[Group]) -> Table:
    """Rounds, bytes and seconds."""
    targets = any(group.config.get("target-accuracy") for group in groups)
    head = ["", "rounds", "best mean", "in round", "up", "down", "of FedAvg's bytes", "time", "per round"]
    rows = []
    for group in groups:
        ends = [run.history[-1] for run in group.runs if run.history]
        best = [max(scored, key=lambda line: line["mean"]) for run in group.runs if (scored := scored_lines(run))]
        totals = [line["total_bytes"] for line in ends]
        share = [
            traffic(total) / total["train_dense_payload"] if total.get("train_dense_payload") else None
            for total in totals
        ]
        reached = [
            next((line["round"] for line in scored_lines(run) if line["mean"] >= target), None)
            for run in group.runs
            if (target := run.config.get("target-accuracy"))
        ]
        row = [
            group.label,
            _counts(line["round"] for line in ends),
            spread(line["mean"] for line in best),
            _counts(line["round"] for line in best),
            size(mean_of([total.get("train_up_payload") for total in totals])),
            size(mean_of([total.get("train_down_payload") for total in totals])),
            spread([mean_of(share)], 2),
            duration(mean_of([line.get("total_seconds") for line in ends])),
            duration(mean_of([line["total_seconds"] / line["round"] for line in ends if line.get("total_seconds")])),
        ]
        rows.append([*row, _counts(reached)] if targets else row)
    caption = (
        "Cost of a run, mean over seeds. Up and down: array data of training, all clients together. Times are those of"
        " the machine that the run was on, evaluation included."
    )
    return Table(caption, [*head, "rounds to target"] if targets else head, rows)


def diagnostics(groups: Sequence[Group]) -> Table | None:
    """Means over rounds of what was measured on the updates, and the final sharpness."""
    found = [
        (
            group,
            {name: [_over_rounds(run, name) for run in group.runs] for name in _UPDATES},
            final_sharpness(group.runs),
        )
        for group in groups
    ]
    present = [name for name in _UPDATES if any(v is not None for _, means, _ in found for v in means[name])]
    sharp = any(values for *_, values in found)
    if not present and not sharp:
        return None
    rows = [
        [group.label, *(significant(means[name]) for name in present), *([significant(values)] if sharp else [])]
        for group, means, values in found
    ]
    head = ["", *(_UPDATES[name] for name in present), *(["final sharpness"] if sharp else [])]
    caption = (
        "The clients' updates y − x, mean over rounds and seeds. Conflict rate: share of client pairs whose updates"
        " have a negative inner product. Rank: of the normalised updates. Drift: the length of an update."
    )
    return Table(caption, head, rows)


def own_numbers(groups: Sequence[Group]) -> Table | None:
    """What algorithms note about themselves, as of the last round, of each group's first run."""
    known = {*_UPDATES, "sharpness"}
    rows = []
    for group in groups:
        lines = [line for line in group.runs[0].history if line.get("diagnostics")]
        numbers = {n: v for n, v in (lines[-1]["diagnostics"] if lines else {}).items() if n not in known}
        told = ", ".join(f"{name} {significant([value])}" for name, value in numbers.items() if value is not None)
        if told:
            rows.append([group.label, told])
    caption = "What the algorithms note about themselves, in the last round of the first seed."
    return Table(caption, ["", "numbers"], rows) if rows else None


def published(contents: Mapping[str, Any], groups: Sequence[Group]) -> Table | None:
    """Published numbers, each with ours beside it where a group has that label or is the only one of that algorithm."""
    given: Mapping[str, Mapping[str, Any]] = contents.get("rows") or {}
    metrics = list(dict.fromkeys(metric for row in given.values() for metric in row))
    if not metrics:
        return None
    model = "personal" if contents.get("model") == "personal" else "global"
    head = [""]
    for metric in metrics:
        head += [f"{metric}: published", "here"] if metric in _PUBLISHED else [f"{metric}: published"]
    rows = []
    for label, row in given.items():
        group = _match(label, groups)
        lines = [last_scored(run) for run in group.runs] if group else []
        scores = [line.get("personal") or {} for line in lines] if model == "personal" else lines
        cells = [label]
        for metric in metrics:
            cells.append(_given(row.get(metric)))
            if metric in _PUBLISHED:
                name, factor, digits = _PUBLISHED[metric]
                known = [s[name] * factor for s in scores if s.get(name) is not None]
                cells.append(spread(known, digits))
        rows.append(cells)
    source = contents.get("source")
    caption = f"Published numbers{f' ({source})' if source else ''} beside those of this page, {model} models."
    return Table(caption, head, rows)


def differences(groups: Sequence[Group]) -> Table | None:
    """The settings that more than one group has, and not all alike."""
    names = [
        name
        for name in differing(groups)
        if name != "algorithm" and differing([group for group in groups if name in group.config], (name,))
    ]
    if not names:
        return None
    rows = [[group.label, *(_shown(group.config.get(name, NONE)) for name in names)] for group in groups]
    return Table("Settings in which the runs differ.", ["", *names], rows)


def own_settings(groups: Sequence[Group]) -> Table | None:
    """The algorithms' own settings."""
    rows = []
    for group in groups:
        table = f"{group.algorithm}."
        own = {n.removeprefix(table): v for n, v in group.config.items() if n.startswith(table)}
        if own:
            rows.append([group.label, ", ".join(f"{name} {_shown(value)}" for name, value in own.items())])
    return Table("Settings of the algorithms themselves.", ["", "settings"], rows) if rows else None


def common(groups: Sequence[Group]) -> Table:
    """The settings that all groups share, but for those of the algorithms themselves."""
    own = tuple(f"{group.algorithm}." for group in groups)
    left_out = {*differing(groups), *IGNORED}
    config = {name: value for name, value in groups[0].config.items() if name not in left_out}
    rows = [[name, _shown(value)] for name, value in config.items() if not name.startswith(own)]
    return Table("Settings that all runs share.", ["key", "value"], rows)


def runs(groups: Sequence[Group]) -> Table:
    """Every run with its folder, its end and what it stood on."""
    rows = []
    for group in groups:
        for run in group.runs:
            about = run.recorded.config
            versions = about.get("versions") or {}
            stack = ", ".join(f"{name} {versions[name]}" for name in _STACK if versions.get(name))
            rows.append([
                group.label, _shown(run.seed), run.status, str(about.get("started", NONE))[:16].replace("T", " "),
                f"{about['num_parameters']:,}" if isinstance(about.get("num_parameters"), int) else NONE,
                _shown(run.config.get("train.device", NONE)), stack or NONE, run.recorded.path.name,
            ])  # fmt: skip
    head = ["", "seed", "ended", "started", "parameters", "device", "versions", "folder"]
    return Table("The runs behind this page.", head, rows)


def scored_lines(run: Run) -> list[dict[str, Any]]:
    """The lines of rounds with an evaluation."""
    return [line for line in run.history if line.get("mean") is not None]


def last_scored(run: Run) -> Mapping[str, Any]:
    """The line of the last evaluation; empty without one."""
    lines = scored_lines(run)
    return lines[-1] if lines else {}


def _over_rounds(run: Run, name: str) -> float | None:
    return mean_of([line.get("diagnostics", {}).get(name) for line in run.history])


def _match(label: str, groups: Sequence[Group]) -> Group | None:
    wanted = label.casefold()
    for names in (
        [group.label for group in groups],
        [group.name for group in groups],
        [group.algorithm for group in groups],
    ):
        found = [group for group, name in zip(groups, names, strict=True) if name.casefold() == wanted]
        if len(found) == 1:
            return found[0]
    return None


def _counts(values: Any) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return NONE
    low, high = min(known), max(known)
    return f"{low}" if low == high else f"{low} to {high}"


def _given(value: Any) -> str:
    if value is None:
        return NONE
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return '""' if value == "" else str(value)
