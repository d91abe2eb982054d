"""``fedstrat compare``: make the runs of a recipe that are missing, one after another, and the table of all of them."""

import contextlib
import dataclasses
import io
import json
import statistics
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedstrat.data.clients import shared
from fedstrat.errors import ConfigError
from fedstrat.experiments import table
from fedstrat.experiments.cells import (
    Cell,
    can_resume,
    clear,
    lighten,
    make_cells,
    read_outcome,
    standing,
)
from fedstrat.experiments.recipe import Recipe
from fedstrat.experiments.selection import Outcome, Row, make_row
from fedstrat.runs import history
from fedstrat.runs.inprocess import Engine
from fedstrat.runs.interrupts import Interrupted, signals_interrupt
from fedstrat.runs.launch import RunRequest, find_app, launch
from fedstrat.runs.overrides import Scalar, read_app
from fedstrat.runs.progress import format_seconds

_SIGNALLED = 128


@dataclass(frozen=True)
class Request:
    """How a recipe is run.

    Attributes:
        folder: Where the cells and the tables go.
        engine: What simulates the clients.
        app: Folder of the Flower app; None looks for it as ``fedstrat run`` does.
        data: Folder that holds the data sets by name; None leaves ``dataset.dir`` to the recipe.
        retry: Whether failed cells are run again.
        verbose: Whether the runs' own lines are shown.
    """

    folder: Path
    engine: Engine = Engine.RAY
    app: Path | None = None
    data: Path | None = None
    retry: bool = False
    verbose: bool = False


def compare(recipe: Recipe, request: Request) -> int:
    """Make what is missing, show progress and at last the table.

    Returns:
        0 if every method has a row of scores, 1 if one has none, 128 + the signal's number if a signal ended it; what
        was finished is kept then, and the next call goes on.

    Raises:
        ConfigError: A run config isn't valid; nothing was started.
        DataError: The data can't be read or shared out; nothing was started.
    """
    app = find_app(request.app)
    defaults = read_app(app)
    cells = make_cells(recipe, defaults, request.folder / "cells")
    _greet(recipe, request, cells)
    places = {cell.folder.name: _places(cell, request) for cell in cells}
    missing = [cell for cell in cells if _is_missing(cell, request)]
    if missing:  # a wrong folder shows now
        shared({**defaults, **missing[0].given, **places[missing[0].folder.name]})
    code = 0
    spent: list[float] = []
    try:
        with signals_interrupt():  # between two runs, too
            for number, cell in enumerate(missing, start=1):
                if not _is_missing(cell, request):
                    continue  # another call of this command has made it meanwhile
                begun = time.monotonic()
                code = _make(cell, places[cell.folder.name], request, app)
                if code > _SIGNALLED:
                    break
                spent.append(time.monotonic() - begun)
                left = statistics.fmean(spent) * (len(missing) - number)
                told = f"[{number}/{len(missing)}]"
                print(_line(cell, read_outcome(cell, recipe), told, spent[-1], left), flush=True)
                write(recipe, request.folder, cells)
    except Interrupted as interrupt:
        code = _SIGNALLED + interrupt.number
    if code > _SIGNALLED:
        print("ended by a signal; the same command goes on from here", flush=True)
    rows = write(recipe, request.folder, cells)
    print(f"\n{(request.folder / 'table.txt').read_text(encoding='utf-8')}\n{request.folder}", flush=True)
    return code if code > _SIGNALLED else int(any(row.setting is None for row in rows))


def write(recipe: Recipe, folder: Path, cells: Sequence[Cell]) -> list[Row]:
    """Write ``table.txt``, ``table.md``, ``table.tex``, ``table.csv``, ``runs.csv`` and ``recipe.json``."""
    outcomes = [read_outcome(cell, recipe) for cell in cells]
    rows = [make_row(method, recipe.seeds, outcomes) for method in recipe.methods]
    grids = [table.scores_grid(recipe, rows), *([table.pairs_grid(rows)] if len(rows) > 1 else [])]
    published = table.published_grid(recipe)
    notes = [recipe.title, table.notes(recipe, rows), *([recipe.about] if recipe.about else []), _made_with(cells)]
    source = [] if recipe.published is None else [f"Published: {recipe.published.source}"]
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, spell in (("txt", table.Grid.text), ("md", table.Grid.markdown), ("tex", table.Grid.latex)):
        mark = "% " if suffix == "tex" else ""
        texts = [textwrap.fill(mark + note, 120, subsequent_indent=mark) + "\n" for note in (*notes, *source)]
        grids_and_source = [*map(spell, grids), *([] if published is None else [texts.pop(), spell(published)])]
        _replace(folder / f"table.{suffix}", "\n".join([*texts, *grids_and_source]))
    _replace(folder / "table.csv", table.scores_csv(recipe, rows))
    _replace(folder / "runs.csv", table.runs_csv(recipe, outcomes))
    _replace(folder / "recipe.json", json.dumps(dataclasses.asdict(recipe), indent=1))
    return rows


def _greet(recipe: Recipe, request: Request, cells: Sequence[Cell]) -> None:
    counts = dict.fromkeys(("completed", "failed", "interrupted", "new"), 0)
    for cell in cells:
        counts[standing(cell.folder)] += 1
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    print(f"{recipe.title}\n{len(cells)} run{'s' * (len(cells) != 1)}: {told}", flush=True)
    known = {cell.folder.name for cell in cells}
    strange = sorted(path.name for path in (request.folder / "cells").glob("*") if path.name not in known)
    if strange:
        print(
            f"note: {len(strange)} earlier runs in {request.folder / 'cells'} aren't part of what was"
            f" asked for now, such as {strange[0]}; they are kept and not counted",
            flush=True,
        )


def _is_missing(cell: Cell, request: Request) -> bool:
    status = standing(cell.folder)
    return status in ("new", "interrupted") or (status == "failed" and request.retry)


def _places(cell: Cell, request: Request) -> dict[str, Scalar]:
    name = cell.given.get("dataset.name")
    if request.data is None or name in (None, "digits"):
        return {}
    folder = request.data.expanduser().absolute() / str(name)
    if not folder.is_dir():
        raise ConfigError(f"--data {request.data}: expected the data set '{name}' in {folder}, but there is no folder")
    return {"dataset.dir": str(folder)}


def _make(cell: Cell, places: Mapping[str, Scalar], request: Request, app: Path) -> int:
    settings = {**cell.given, **places}
    resumes = standing(cell.folder) == "interrupted" and can_resume(cell.folder)
    if resumes:
        settings |= {"resume": str(cell.folder.absolute())}
    else:
        clear(cell.folder)
    ask = RunRequest(
        app=app,
        verbose=False,
        engine=request.engine,
        settings=settings,
        folder=None if resumes else cell.folder,
    )
    with contextlib.nullcontext() if request.verbose else contextlib.redirect_stdout(io.StringIO()):
        code = launch(ask)
    if code <= _SIGNALLED and standing(cell.folder) == "completed":
        lighten(cell.folder)
    return code


def _line(cell: Cell, outcome: Outcome, number: str, seconds: float, left: float) -> str:
    what = f"mean {outcome.final['mean']:.3f}" if outcome.final else "not evaluated"
    if outcome.validation is not None:
        what += f", validation {outcome.validation:.3f}"
    if outcome.status != "completed" or outcome.diverged:
        what = f"{'diverged' if outcome.diverged else outcome.status}, {what}"
    rest = f"; about {format_seconds(left)} left" if left else ""
    return f"{number} {cell}: {what}, {format_seconds(seconds)}{rest}"


def _made_with(cells: Sequence[Cell]) -> str:
    """Versions and machines of the finished runs, all of them where they differ."""
    made = [history.load(c.folder).config for c in cells if standing(c.folder) in ("completed", "failed")]
    parts = []
    for package in ("fedstrat", "flwr", "torch"):
        found = sorted({str(config["versions"].get(package)) for config in made})
        parts.append(f"{package} {' and '.join(found)}")
    days = sorted({str(config["started"])[:10] for config in made})
    devices = sorted({str(config["run_config"]["train.device"]) for config in made})
    if not made:
        return "No run is finished."
    return f"Made with {', '.join(parts)} on {' and '.join(devices)}, {' to '.join(sorted({days[0], days[-1]}))}."


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
