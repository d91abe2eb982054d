"""The page itself: pictures and tables of gathered runs, filled into one HTML file that stands alone."""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedstrat.errors import ConfigError
from fedstrat.page import charts, figures, partition, ranks, tables
from fedstrat.page.gather import Gathered, Group, gather
from fedstrat.page.numbers import mean_of, spread


def write(folders: Sequence[Path], out: Path, *, title: str = "") -> Gathered:
    """Write one page about the runs in ``folders``.

    Args:
        folders: Results folders, or folders that hold some.
        out: The HTML file; replaced where it is there.
        title: The page's heading; "" makes one.

    Returns:
        What the page is about, with the problems that it names.

    Raises:
        ConfigError: There is no run to report on, or the file can't be written.
    """
    gathered = gather(folders)
    text = render(gathered, title=title)
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(out)
    except OSError as error:
        raise ConfigError(f"can't write {out}: {error.strerror}; name another file with --out") from None
    return gathered


def render(gathered: Gathered, *, title: str = "") -> str:
    """Return the page about gathered runs."""
    environment = Environment(
        loader=PackageLoader("fedstrat.page", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        title=title or _title(gathered.groups),
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, fedstrat {version('fedstrat')}",
        **_contents(gathered),
    )


def _contents(gathered: Gathered) -> dict[str, Any]:
    groups = [group for alike in ranks.comparable(gathered.groups) for group in alike]
    shown = _drawn(groups)
    pictures, without_picture = partition.pictures(groups)
    runs = [run for group in groups for run in group.runs]
    early = [(group, run) for group in groups for run in group.runs if run.status != "completed"]
    looks = [figures.look(place) for place in range(len(shown))]
    legend = [
        (group.label, figures.COLOURS.index(colour), dash) for group, (colour, dash) in zip(shown, looks, strict=True)
    ]
    several = [table for table in (tables.personal(groups),) if table]
    return {
        "lead": _lead(groups),
        "note": gathered.note,
        "count": f"{len(runs)} run{'s' if len(runs) != 1 else ''}",
        "problems": [
            *gathered.problems,
            *(f"{group.label}, seed {run.seed}: {run.status.rstrip('.')}." for group, run in early),
        ],
        "omitted": f"Curves show the {len(shown)} best of {len(groups)} settings by final mean accuracy"
        f"{', as many of each kind that may be ranked' if ranks.unlike(groups) else ''}; the tables hold all."
        if len(shown) < len(groups) else "",
        "bands": any(len(group.runs) > 1 for group in shown),
        "legend": legend if len(legend) > 1 else [],
        "results": [tables.results(groups), *several],
        "published": tables.published(gathered.published, groups),
        "curves": _present(_curves(shown)),
        "clients": charts.clients(shown),
        "cost": charts.cost(shown),
        "costs": tables.costs(groups),
        "pictures": pictures,
        "without_picture": without_picture,
        "updates": _present(_updates(shown)),
        "diagnostics": tables.diagnostics(groups),
        "layers": _present([charts.layers(group) for group in shown[:6]]),
        "sharpness": _present([charts.sharpness(shown), _sharpness_curve(shown)]),
        "own_numbers": tables.own_numbers(groups),
        "differences": tables.differences(groups),
        "common": tables.common(groups),
        "own_settings": tables.own_settings(groups),
        "runs": tables.runs(groups),
    }  # fmt: skip


def _curves(groups: Sequence[Group]) -> list[charts.Chart | None]:
    single = len(groups) == 1 and len(groups[0].runs) == 1
    accuracy = "test accuracy"
    return [
        charts.single_accuracy(groups[0])
        if single
        else charts.curves(groups, "Mean accuracy over clients", accuracy, lambda line: line.get("mean"), unit=True),
        None
        if single
        else charts.curves(
            groups, "Accuracy of the worst tenth of the clients", accuracy, lambda line: line.get("worst10"), unit=True
        ),
        charts.curves(groups, "Loss on the clients' test data", "loss", lambda line: line.get("loss")),
        charts.curves(groups, "Loss while training", "loss", lambda line: line["train"].get("train-loss")),
    ]


def _updates(groups: Sequence[Group]) -> list[charts.Chart | None]:
    def number(name: str) -> charts.Value:
        return lambda line: line.get("diagnostics", {}).get(name)

    return [
        charts.curves(groups, "Conflict rate", "share of client pairs", number("conflict-rate"), unit=True),
        charts.curves(groups, "Smallest cosine between two updates", "cosine", number("min-cosine")),
        charts.curves(groups, "Client drift", "mean length of y − x", number("drift-mean")),
        charts.curves(groups, "Rank of the normalised updates", "rank", number("update-rank"), whole=True),
        charts.curves(groups, "Control variate", "length of c", number("control-norm")),
    ]


def _sharpness_curve(groups: Sequence[Group]) -> charts.Chart | None:
    def sharpness(line: Any) -> float | None:
        value: float | None = line.get("diagnostics", {}).get("sharpness")
        return value

    def often(group: Group) -> bool:
        return any(sum(sharpness(line) is not None for line in run.history) > 1 for run in group.runs)

    if not any(map(often, groups)):
        return None
    # A group keeps its place, and so its colour.
    kept = [group if often(group) else Group(group.label, ()) for group in groups]
    return charts.curves(kept, "Sharpness", "rise of the loss at distance 0.05", sharpness)


def _drawn(groups: Sequence[Group]) -> Sequence[Group]:
    if len(groups) <= figures.MOST_CURVES:
        return groups
    ranked = [
        (place, group)
        for alike in ranks.comparable(groups)
        for place, group in enumerate(sorted(alike, key=_final, reverse=True))
    ]
    kept = [group for _, group in sorted(ranked, key=lambda found: found[0])[: figures.MOST_CURVES]]
    return [group for group in groups if group in kept]


def _final(group: Group) -> float:
    mean = mean_of([tables.last_scored(run).get("mean") for run in group.runs])
    return -1.0 if mean is None else mean


def _lead(groups: Sequence[Group]) -> str:
    """What came out, in a sentence or two."""
    scored = [group for group in groups if _final(group) >= 0.0]
    if not scored:
        return "No round of these runs was evaluated."
    if unlike := ranks.unlike(scored):
        return _lead_apart(scored, unlike)
    best, *others = sorted(scored, key=_final, reverse=True)
    scores = {name: _told(best, name) for name in ("mean", "worst10")}
    who = f"Highest at the end: {best.label}, with a" if others else "The global model ends with a"
    next_best = f" Next: {others[0].label} with {_told(others[0], 'mean')}." if others else ""
    return (
        f"{who} mean test accuracy of {scores['mean']} over clients; the worst tenth of the clients have"
        f" {scores['worst10']}.{next_best}"
    )


def _lead_apart(groups: Sequence[Group], unlike: Sequence[str]) -> str:
    """What came out where not all groups may be ranked together."""
    told = " and ".join([", ".join(unlike[:-1]), unlike[-1]] if len(unlike) > 1 else unlike)
    several = [alike for alike in ranks.comparable(groups) if len(alike) > 1]
    if not several:
        return f"These runs differ in {told}, so none is ranked above another."
    sentences = [f"These runs differ in {told}; only those equal in {'these' if len(unlike) > 1 else 'it'} are ranked."]
    for alike in several[:3]:
        best, second = sorted(alike, key=_final, reverse=True)[:2]
        sentences.append(
            f"{ranks.basis_in_words(best, unlike)}: highest at the end {best.label}, with a mean test accuracy of"
            f" {_told(best, 'mean')} over clients; next {second.label} with {_told(second, 'mean')}."
        )
    return " ".join(sentences)


def _told(group: Group, name: str) -> str:
    return spread(tables.last_scored(run).get(name) for run in group.runs)


def _title(groups: Sequence[Group]) -> str:
    algorithms = list(dict.fromkeys(group.algorithm for group in groups))
    data = list(dict.fromkeys(str(group.config.get("dataset.name", "")) for group in groups))
    some = ", ".join(algorithms) if len(algorithms) <= 4 else f"{len(algorithms)} algorithms"
    return f"{some} on {', '.join(data)}" if any(data) else some


def _present(found: Sequence[charts.Chart | None]) -> list[charts.Chart]:
    return [chart for chart in found if chart is not None]
