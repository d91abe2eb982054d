"""Flower's own commands, called as processes: what ``flwr run`` doesn't tell, its other commands do."""

import contextlib
import json
import os
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstrat.errors import RunFailedError

_ANSWER_SECONDS = 120.0
_FINISH_SECONDS = 5.0  # for a submission that is under way when we are told to end
_POLL_SECONDS = 1.0

NO_TALKING = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    # Otherwise Flower installs the app's dependencies from the network when a run starts.
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


def executable(name: str) -> str:
    """Path of a command that this Python environment installed.

    Raises:
        RunFailedError: There is none.
    """
    path = shutil.which(name, path=scripts_first(os.environ)["PATH"])
    if path is None:
        raise RunFailedError(f"can't find the command '{name}': install it with pip install flwr")
    return path


def scripts_first(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with this Python's commands first on the PATH, where Flower looks for its own."""
    scripts = sysconfig.get_path("scripts")
    return {**environment, "PATH": os.pathsep.join([scripts, environment.get("PATH", os.defpath)])}


@dataclass(frozen=True)
class Status:
    """Where a run stands, as Flower spells it, such as ``finished:completed``, and why if it says so."""

    name: str
    details: str

    @property
    def finished(self) -> bool:
        """Whether the run has ended, in whatever way."""
        return self.name.startswith("finished")


@dataclass(frozen=True)
class FlowerCLI:
    """The commands of ``flwr`` against one SuperLink.

    Attributes:
        connection: Its name in Flower's config.toml.
        environment: Environment variables of the commands.
        folder: Their working directory.
        patience: Seconds that a SuperLink which can't be reached during a run has to come back.
    """

    connection: str
    environment: Mapping[str, str]
    folder: Path
    patience: float = 300.0

    def submit(self, app: Path, run_config: Path, federation: str) -> str:
        """Submit a run and return its id.

        Raises:
            RunFailedError: Flower refused it.
        """
        command = ["run", str(app), self.connection, "-c", str(run_config)]
        if federation:
            command += ["--federation-config", federation]

        def stop(found: Mapping[str, Any]) -> None:
            if "run-id" in found:
                self.stop(str(found["run-id"]))

        return str(self._ask("submit the run", *command, undo=stop)["run-id"])

    def status(self, run_id: str) -> Status:
        """Ask where the run stands.

        Raises:
            RunFailedError: The SuperLink doesn't answer, or doesn't know the run.
        """
        run = self._ask("ask for the run's status", "ls", self.connection, "--run-id", run_id)["runs"][0]
        details = str(run.get("status-details") or "")
        return Status(str(run["status"]), "" if details == "N/A" else details)

    def stop(self, run_id: str) -> None:
        """Stop the run; one that has ended already is no error, nor is a SuperLink that has."""
        with contextlib.suppress(RunFailedError):
            self._ask("stop the run", "stop", run_id, self.connection)

    def follow(self, run_id: str, take: Callable[[str], None]) -> Status:
        """Give every line of the run's log to ``take`` as it comes, until the run ends; return how it ended.

        Raises:
            RunFailedError: The SuperLink can't be reached any more.
        """
        seen = 0
        lost_since = None
        while True:
            for number, line in enumerate(self._stream(run_id)):
                if number >= seen:  # a new stream starts from the run's beginning
                    seen = number + 1
                    take(line)
            try:
                status = self.status(run_id)
                if status.finished:
                    return status
                lost_since = None
            except RunFailedError:
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since >= self.patience:
                    raise
            time.sleep(_POLL_SECONDS)

    def _stream(self, run_id: str) -> Iterator[str]:
        process = subprocess.Popen(  # noqa: S603  (Flower's command)
            [executable("flwr"), "log", run_id, self.connection, "--stream"],
            env={**self.environment, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        assert process.stdout is not None
        with process:
            try:
                yield from process.stdout
            finally:
                process.terminate()

    def _ask(
        self, purpose: str, *command: str, undo: Callable[[Mapping[str, Any]], None] | None = None
    ) -> dict[str, Any]:
        """Run one command of ``flwr`` and return the JSON object that it prints.

        ``undo`` gets the answer of a command that was under way when something interrupted us.
        """
        process = subprocess.Popen(  # noqa: S603  (Flower's command)
            [executable("flwr"), *command, "--format", "json"],
            env={**self.environment, "PYTHONIOENCODING": "utf-8"},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        try:
            answer, complaint = process.communicate(timeout=_ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            raise RunFailedError(f"can't {purpose}: flwr gave no answer in {_ANSWER_SECONDS:g} s") from None
        except BaseException:
            if undo is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    undo(_json_object(process.communicate(timeout=_FINISH_SECONDS)[0]))
            raise
        finally:
            process.kill()
            process.communicate()
        found = _json_object(answer)
        if found.get("success"):
            return found
        said = str(found.get("error-message") or complaint or answer or f"flwr ended with {process.returncode}")
        raise RunFailedError(f"can't {purpose}: {' '.join(said.split())}")


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
