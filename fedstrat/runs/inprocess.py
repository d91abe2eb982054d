"""A run in this process: both apps of a Flower app on an ``InProcessGrid``, without Ray.

Clients run one after another. For small models that is faster than starting Ray, whose workers take longer to start
than such a run takes; the results are the same to the bit.
"""

import contextlib
import importlib
import io
import logging
import signal
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from typing_extensions import override

from fedstrat.errors import ConfigError, RunFailedError
from fedstrat.runs.flowercli import Status
from fedstrat.runs.follow import LOG_NAME, Submission, judge
from fedstrat.runs.interrupts import Interrupted
from fedstrat.runs.overrides import read_app
from fedstrat.runs.relay import Relay, clean


class Engine(StrEnum):
    """What simulates the clients of a run; the results are the same."""

    RAY = "ray"
    """Flower's simulation engine: several clients at a time, each in a process of its own."""
    IN_PROCESS = "in-process"
    """This process: one client after another, which suits small models."""


def run_in_process(submission: Submission, num_clients: int) -> None:
    """Run a submission here, show its progress, and judge how it ended.

    Args:
        submission: What to run; it has a results folder.
        num_clients: How many clients there are.

    Raises:
        ConfigError: The app's code isn't the code that this process runs.
        RunFailedError: The run failed, or no round of it succeeded.
        Interrupted: A signal ended it; its results folder says so.
    """
    from flwr.app import Context, RecordDict  # noqa: PLC0415  (imports take seconds)

    from fedstrat.simulation import InProcessGrid  # noqa: PLC0415

    assert submission.folder is not None
    server_app, client_app = load_apps(submission.app)
    run_config = {**read_app(submission.app), **submission.given}
    grid = InProcessGrid(client_app, num_clients, run_config=run_config)
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run_config)
    screen = sys.stdout
    relay = Relay(lambda line: print(line, file=screen, flush=True), verbose=submission.verbose)
    with (submission.folder / LOG_NAME).open("a", encoding="utf-8") as log:

        def take(line: str) -> None:
            log.write(f"{clean(line)}\n")
            relay.feed(line)

        try:
            with _output_to(take):
                server_app(grid, context)
        except KeyboardInterrupt as stop:  # the ServerApp makes one of SIGTERM
            raise stop if isinstance(stop, Interrupted) else Interrupted(signal.SIGTERM) from None
        except Exception as error:
            log.write(traceback.format_exc())
            path = submission.folder / LOG_NAME
            raise RunFailedError(
                f"the run failed: {type(error).__name__}: {error}\nIts whole log is in {path}"
            ) from None
    judge(Status("finished:completed", ""), "", submission.folder, must_exist=True)


def load_apps(app: Path) -> tuple[Any, Any]:
    """Import the ServerApp and the ClientApp that an app's pyproject.toml names.

    Raises:
        ConfigError: It names none, or this process has modules of these names, or fedstrat, from elsewhere.
    """
    try:
        declared = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]
        references = [str(declared["components"][name]) for name in ("serverapp", "clientapp")]
    except KeyError as error:
        raise ConfigError(f"--app {app}: [tool.flwr.app.components] lacks {error}") from None
    found = []
    with import_from(app):
        for reference in references:
            module, _, name = reference.partition(":")
            found.append(getattr(importlib.import_module(module), name))
    bundled = ["fedstrat"] if (app / "fedstrat").is_dir() else []
    for name in [*(reference.partition(":")[0] for reference in references), *bundled]:
        file = Path(str(sys.modules[name].__file__)).resolve()
        if not file.is_relative_to(app.resolve()):
            raise ConfigError(
                f"--app {app}: expected its module '{name}' in this process, but that is {file}; the engine 'ray' runs"
                " an app's own code wherever it lies"
            )
    return found[0], found[1]


@contextlib.contextmanager
def import_from(folder: Path) -> Iterator[None]:
    """Let modules be imported that lie in ``folder``."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


@contextlib.contextmanager
def _output_to(take: Callable[[str], None]) -> Iterator[None]:
    """Give what is printed, and Flower's log, to ``take`` line by line, as Flower's own log stream has them."""
    logger = logging.getLogger("flwr")
    before = list(logger.handlers)
    handler = _Records(take)
    logger.handlers = [handler]
    try:
        with contextlib.redirect_stdout(_Lines(take)):
            yield
    finally:
        logger.handlers = before


class _Records(logging.Handler):
    def __init__(self, take: Callable[[str], None]) -> None:
        super().__init__()
        self._take = take

    @override
    def emit(self, record: logging.LogRecord) -> None:
        for line in f"{record.levelname} :      {record.getMessage()}".splitlines():
            self._take(line)


class _Lines(io.TextIOBase):
    def __init__(self, take: Callable[[str], None]) -> None:
        self._take, self._rest = take, ""

    @override
    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._take(line)
        return len(text)
