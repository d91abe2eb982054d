"""Submit a run, show its log as it comes, and judge how it ended."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from fedstrat.errors import RunFailedError
from fedstrat.runs.flowercli import FlowerCLI, Status
from fedstrat.runs.overrides import Scalar, write_toml
from fedstrat.runs.relay import Relay, clean

LOG_NAME = "run.log"
_PREFIXES = ("Simulation failed with exception: ", "ServerApp failed with exception: ")
# What Flower says of a run whose reason stands in its log only.
_SAYS_NOTHING = ("", "An error was encountered. Ending simulation.", "Task failed with unknown error.")


@dataclass(frozen=True)
class Submission:
    """What to submit.

    Attributes:
        app: Folder of the Flower app.
        given: Run-config values that differ from the app's own.
        federation: Flower's federation config: how many nodes to simulate, and with what; may be empty.
        folder: The results folder, if it's on this machine; the log is kept there.
        verbose: Whether to show the whole log.
    """

    app: Path
    given: Mapping[str, Scalar]
    federation: str
    folder: Path | None
    verbose: bool = False


def follow(cli: FlowerCLI, submission: Submission, scratch: Path) -> Path | None:
    """Submit the run, show its progress until it ends, and return its results folder if that's known.

    Args:
        cli: Flower's commands against the SuperLink to use.
        submission: What to submit.
        scratch: A folder for a temporary file.

    Raises:
        RunFailedError: The run couldn't be submitted, failed, or no round of it succeeded.
        BaseException: Whatever else ends the wait, an interrupt for one; the run is stopped first.
    """
    file = scratch / "run.toml"
    file.write_text(write_toml(submission.given), encoding="utf-8")
    relay = Relay(lambda line: print(line, flush=True), verbose=submission.verbose)
    run_id = cli.submit(submission.app, file, submission.federation)
    with contextlib.ExitStack() as stack:
        log: TextIO | None = None
        if submission.folder is not None:
            log = stack.enter_context((submission.folder / LOG_NAME).open("a", encoding="utf-8"))

        def take(line: str) -> None:
            if log is not None:
                log.write(f"{clean(line)}\n")
            relay.feed(line)

        try:
            status = cli.follow(run_id, take)
        except BaseException:
            cli.stop(run_id)
            raise
    folder = submission.folder or (Path(relay.results) if relay.results else None)
    judge(status, relay.last_exception, folder, must_exist=submission.folder is not None)
    return folder


def judge(status: Status, last_exception: str, folder: Path | None, *, must_exist: bool) -> None:
    """Raise unless the run is complete and at least one of its rounds succeeded.

    Args:
        status: What Flower says at the run's end.
        last_exception: The last exception in the run's log, for when Flower doesn't say why the run failed.
        folder: The results folder, if known.
        must_exist: Whether the results folder is on this machine; where it isn't, Flower's status decides,
            since the ServerApp ends a run without a successful round with an error.

    Raises:
        RunFailedError: With the reason that the run itself gave.
    """
    log = f"\nIts whole log is in {folder / LOG_NAME}" if folder is not None and must_exist else ""
    if status.name != "finished:completed":
        reason = status.details.strip()
        for prefix in _PREFIXES:
            reason = reason.removeprefix(prefix)
        if reason in _SAYS_NOTHING:
            reason = last_exception or reason or "it gives no reason"
        raise RunFailedError(f"the run ended as {status.name}: {reason}{log}")
    if folder is None or not (must_exist or folder.is_dir()):
        return
    summary = folder / "summary.json"
    try:
        succeeded = json.loads(summary.read_text(encoding="utf-8"))["rounds_succeeded"]
    except (OSError, ValueError, KeyError, TypeError):
        raise RunFailedError(f"the run ended without a valid {summary}{log}") from None
    if succeeded < 1:
        raise RunFailedError(f"no round of the run succeeded{log}")
