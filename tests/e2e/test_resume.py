"""A killed run goes on where it was, and the number of Ray workers changes no bit: ``fedstrat run``, real processes."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedstrat.runs import warden

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 240.0
ROUNDS, KILLED_AFTER = 6, 3
SETTINGS = (
    "num-clients=6 fraction-train=0.67 train.device=cpu model.hidden=16 train.local-epochs=30"
    f" evaluate-every=3 num-server-rounds={ROUNDS}"
)


@dataclass
class Started:
    """A ``fedstrat run`` that goes on, and its results folder."""

    process: subprocess.Popen[str]
    results: Path

    @property
    def folder(self) -> Path:
        (folder,) = self.results.iterdir()
        return folder

    @property
    def history(self) -> list[dict[str, Any]]:
        lines = [path.read_text().splitlines() for path in self.results.glob("*/history.jsonl")]
        return [json.loads(line) for line in lines[0]] if lines else []

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def wait_for(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not holds():
            assert self.process.poll() is None, f"the run ended before {what}: {self.process.communicate()}"
            assert time.monotonic() < deadline, f"waited in vain: {what}"
            time.sleep(0.01)

    def kill(self, command: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to the first descendant with this in its command line."""
        for pid in warden.descendants(self.process.pid):
            with contextlib.suppress(OSError):
                if command in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                    os.kill(pid, number)
                    return
        raise AssertionError(f"no process of the run has {command} in its command line")

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=LIMIT_SECONDS)
        return self.process.returncode, out, err


class Place:
    """Where the runs of a test happen."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT), "HOME": str(folder)}
        self.environment.pop("FLWR_HOME", None)
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, name: str, *pairs: str, cores: int | None = None) -> Started:
        """Start a run; ``cores`` limits how many it may use."""
        command = [sys.executable, "-m", "fedstrat.cli", "run", "-c", " ".join(pairs)]
        if not any(pair.startswith("resume=") for pair in pairs):
            command += ["--results-dir", str(self.folder / name)]
        allowed = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, set(sorted(allowed)[:cores]))  # inherited
            process = subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
        finally:
            os.sched_setaffinity(0, allowed)
        self.processes.append(process)
        return Started(process, self.folder / name)


@pytest.fixture
def place() -> Iterator[Place]:
    folder = Path(tempfile.mkdtemp(prefix="f")).resolve()  # short, for Ray's sockets
    made = Place(folder)
    try:
        yield made
    finally:
        for process in made.processes:
            if process.poll() is None:
                process.terminate()
                process.communicate(timeout=LIMIT_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)


def rows(run: Started) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if "seconds" not in k} for line in run.history]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["scaffold", "fedcspack"])
def test_kill_9_and_resume_with_two_workers_is_the_straight_run_with_one(place: Place, algorithm: str) -> None:
    straight = place.start("straight", f"algorithm={algorithm}", SETTINGS, cores=1)
    code, out, err = straight.end()
    assert code == 0, err
    assert "clients at once: 1 " in out

    killed = place.start("killed", f"algorithm={algorithm}", SETTINGS)
    killed.wait_for(lambda: len(killed.history) >= KILLED_AFTER, f"round {KILLED_AFTER}")
    killed.kill("flwr-simulation")
    code, out, err = killed.end()
    assert code == 1
    assert "error: the run ended as " in err
    assert "Traceback" not in out + err
    assert KILLED_AFTER <= len(killed.history) < ROUNDS
    assert killed.summary["status"] == "failed"
    assert killed.summary["model_sha256"]

    # The folder is all that it takes: the other settings are those of the run that it holds.
    resumed = place.start("killed", f"resume={killed.folder}")
    code, out, err = resumed.end()
    assert code == 0, err
    if len(os.sched_getaffinity(0)) > 1:
        assert "clients at once: 1 " not in out
    assert "resuming after round " in out
    assert resumed.summary["status"] == "completed"
    assert [row["round"] for row in rows(resumed)] == [*range(1, ROUNDS + 1)]
    assert rows(resumed) == rows(straight)
    assert resumed.summary["model_sha256"] == straight.summary["model_sha256"]


def test_sigterm_ends_a_run_with_a_summary_and_what_it_computed(place: Place) -> None:
    run = place.start("run", "algorithm=craft fraction-evaluate=0.0", SETTINGS.replace("rounds=6", "rounds=99999"))
    run.wait_for(lambda: len(run.history) >= 2, "round 2")
    run.process.send_signal(signal.SIGTERM)
    code, out, err = run.end()
    assert code == 128 + signal.SIGTERM
    assert "error: ended by SIGTERM" in err
    assert "Traceback" not in out + err
    assert run.summary["status"] == "interrupted"
    assert run.summary["rounds"] == len(run.history) >= 2
    assert run.summary["model_sha256"]
    assert len([*(run.folder / "checkpoints").iterdir()]) == 2


def resident(run: Started, command: str) -> list[int]:
    """Resident memory, in kB, of the run's processes with this in their command line."""
    found = []
    for pid in warden.descendants(run.process.pid):
        with contextlib.suppress(OSError):
            if command in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                status = Path(f"/proc/{pid}/status").read_text()
                found.append(int(status.partition("VmRSS:")[2].split()[0]))
    return found


@pytest.mark.slow
def test_memory_is_flat_and_a_dead_worker_ends_the_run_by_name(place: Place) -> None:
    settings = SETTINGS.replace("rounds=6", "rounds=99999").replace("epochs=30", "epochs=2").replace("=16", "=2000")
    run = place.start("run", "algorithm=scaffold", settings)
    measured = []
    for server_round in (5, 30):
        run.wait_for(lambda least=server_round: len(run.history) >= least, f"round {server_round}")
        measured.append([max(resident(run, name)) for name in ("flwr-simulation", "ray::ClientAppActor")])
    print("kB of driver and worker after rounds 5 and 30:", measured)
    assert all(late <= 1.1 * early for early, late in zip(*measured, strict=True))

    run.kill("ray::ClientAppActor")
    code, out, err = run.end()
    assert code == 1
    assert "Ray worker of the simulation died" in err
    assert "resume" in err
    assert "Traceback" not in out + err
    assert run.summary["status"] == "failed"
    assert "Ray worker" in run.summary["error"]
    assert run.summary["model_sha256"]
