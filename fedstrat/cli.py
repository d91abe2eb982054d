"""The command line ``fedstrat``."""

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from fedstrat.deploy.commands import keys
from fedstrat.errors import ConfigError, FedstratError
from fedstrat.experiments.commands import compare
from fedstrat.plainhelp import PlainCommand
from fedstrat.runs.inprocess import Engine

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(keys, name="keys")
app.command(cls=PlainCommand)(compare)


def main() -> None:
    """Run the command line: exit code 0 for success, 1 for a run that failed, 2 for a wrong request."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        app()
    except FedstratError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader of a pipe has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedstrat {version('fedstrat')}, flwr {version('flwr')}, torch {version('torch')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Show versions.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Federated-learning methods as Flower strategies with their client halves."""


@app.command(cls=PlainCommand)
def run(
    connection: Annotated[
        str | None,
        typer.Argument(),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--run-config", "-c", metavar="KEY=VALUE", help="Change the run config; a TOML file is possible too."
        ),
    ] = None,
    app_dir: Annotated[
        Path | None,
        typer.Option("--app", metavar="DIR", help="The Flower app; without it: the one here, else fedstrat's."),
    ] = None,
    results_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where to make the results folder; without it: ./results."),
    ] = None,
    ray_address: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Simulate on this Ray cluster; without it: on this machine alone."),
    ] = "",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the whole log.")] = False,
    engine: Annotated[
        Engine,
        typer.Option(help="Simulate several clients at a time (ray), or one after another in this process."),
    ] = Engine.RAY,
) -> None:
    """Run a federation, show a line per round, and print the results folder as the last line.

    CONNECTION is a SuperLink connection of Flower's config.toml, with nodes of its own; without one the clients are
    simulated here. Settings come with -c, as in -c "algorithm=fedavg num-clients=20".

    Ends with 0 only if the run is complete and at least one round succeeded.
    """
    if connection is not None and "=" in connection:
        raise ConfigError(f"'{connection}' is no SuperLink connection; did you mean -c \"{connection}\"?")
    from fedstrat.runs.launch import RunRequest, launch  # noqa: PLC0415  (needn't be read for --help)

    raise typer.Exit(launch(RunRequest(connection, config or (), app_dir, results_dir, verbose, ray_address, engine)))


@app.command(cls=PlainCommand)
def report(
    results: Annotated[list[Path], typer.Argument(metavar="RESULTS...", help="Results folders, or folders of them.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The page to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="The page's heading.")] = "",
) -> None:
    """Make one HTML page about one run or many; runs that differ in their seed alone are shown together."""
    from fedstrat.page.page import write  # noqa: PLC0415  (draws with matplotlib)

    for problem in write(results, out, title=title).problems:
        print(f"warning: {problem}", file=sys.stderr)
    print(out)


@app.command(cls=PlainCommand)
def partition(
    config: Annotated[
        list[str] | None,
        typer.Option("--run-config", "-c", metavar="KEY=VALUE", help="As for run."),
    ] = None,
    app_dir: Annotated[Path | None, typer.Option("--app", metavar="DIR", help="As for run.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write partition.png and partition.csv there.")
    ] = None,
) -> None:
    """Show which client of a simulation holds how many samples of which label; nothing is trained."""
    from fedstrat.runs.partition import show_partition  # noqa: PLC0415  (needn't be read for --help)

    typer.echo(show_partition(config or (), app_dir, out))


if __name__ == "__main__":
    main()
