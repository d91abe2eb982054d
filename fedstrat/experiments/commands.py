"""``fedstrat compare`` on the command line."""

from pathlib import Path
from typing import Annotated

import typer

from fedstrat.errors import ConfigError
from fedstrat.runs.inprocess import Engine


def compare(
    recipe: Annotated[Path | None, typer.Argument()] = None,
    algorithms: Annotated[str, typer.Option(help="Algorithms to compare, comma-separated, instead of a recipe.")] = "",
    seeds: Annotated[str, typer.Option(help="Seeds, comma-separated; they replace a recipe's.")] = "",
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V1,V2", help="Search these values; an algorithm's own key for it alone."),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option("--run-config", "-c", metavar="KEY=VALUE", help="Change the run config of all runs."),
    ] = None,
    target: Annotated[
        list[float] | None, typer.Option(help="Also tell when this mean accuracy is first reached; may be repeated.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder that holds data sets by name; else $FEDSTRAT_DATA.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where runs and tables go; without it: ./results/RECIPE.")
    ] = None,
    engine: Annotated[
        Engine, typer.Option(help="Simulate several clients at a time (ray), or one after another in this process.")
    ] = Engine.RAY,
    app_dir: Annotated[
        Path | None, typer.Option("--app", metavar="DIR", help="The Flower app, as for fedstrat run.")
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Run failed runs again.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show a line per round of every run.")] = False,
) -> None:
    """Run algorithms x settings x seeds one after another and print a table; runs that are finished are kept.

    RECIPE is a recipe in TOML, such as recipes/craft-cifar10-small.toml; without one give --algorithms.

    Ends with 0 if every method has a row of scores. Interrupted, the same command goes on where it stopped.
    """
    from fedstrat.experiments import request as asked  # noqa: PLC0415  (needn't be read for --help)
    from fedstrat.experiments.compare import Request  # noqa: PLC0415
    from fedstrat.experiments.compare import compare as make  # noqa: PLC0415
    from fedstrat.runs.launch import find_app  # noqa: PLC0415

    app = find_app(app_dir)
    given = asked.Given(
        algorithms=asked.names(algorithms),
        seeds=asked.numbers(seeds),
        grid=grid or (),
        config=config or (),
        targets=target or (),
    )
    if recipe is None and not given.algorithms:
        raise ConfigError(
            "expected a recipe, such as recipes/craft-cifar10-small.toml, or --algorithms, such as fedavg,craft"
        )
    what = asked.build(recipe, given, app)
    name = recipe.stem if recipe is not None else "-".join(["compare", *given.algorithms])
    folder = out or Path("results") / name
    raise typer.Exit(make(what, Request(folder.expanduser(), engine, app, data, retry, verbose)))
