"""``fedstrat run`` as people call it: real processes, Flower's simulation engine on Ray."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from fedstrat.runs import capacity
from fedstrat.runs.superlink import CONNECTION, LocalSuperLink
from tests.e2e.federation import Ended

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes that stay in /proc"),
]

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 240.0  # on a busy machine; an idle one needs 15 to 20


class Shell:
    """Runs ``fedstrat run`` in a folder of its own, and sees what of it stays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.user = folder / "user"
        self.user.mkdir()
        # PYTHONPATH names this checkout: an app elsewhere must still run its own code.
        self.environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT), "HOME": str(folder)}
        self.environment.pop("FLWR_HOME", None)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "fedstrat.cli", "run", *arguments],
            cwd=self.user,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> Ended:
        began = time.monotonic()
        with self.start(*arguments) as process:
            try:
                out, err = process.communicate(timeout=LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.terminate()
                raise
        return Ended(process.returncode, out, err, time.monotonic() - began)

    def left_over(self) -> list[str]:
        """Processes that were started in our folder, and temporary folders of the launcher."""
        found = [str(path) for path in self.folder.glob("fedstrat-*")]
        for link in Path("/proc").glob("[0-9]*/cwd"):
            try:
                if str(link.readlink()).startswith(str(self.folder)):
                    found.append((link.parent / "cmdline").read_text().replace("\0", " "))
            except OSError:  # it has ended, or isn't ours to see
                continue
        return found


@pytest.fixture
def shell():
    folder = Path(tempfile.mkdtemp(prefix="f")).resolve()  # short, for Ray's sockets
    try:
        yield Shell(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_simulation_from_the_command_line(shell):
    ended = shell.run(
        *("-c", "algorithm=craft craft.server-lr=0.3 num-clients=10 num-server-rounds=5"),
        *("-c", "train.device=cpu"),
        *("--results-dir", "out"),
    )
    assert ended.code == 0, ended.err
    assert ended.err == ""
    lines = ended.out.splitlines()
    folder = Path(lines[-1])
    assert folder.parent == shell.user / "out"
    assert folder.name.endswith("-craft-digits")
    assert [line.split()[1] for line in lines if line.startswith("round ")] == [f"{k}/5" for k in range(1, 6)]
    assert any(line.startswith("clients at once: ") and "core" in line for line in lines)
    assert "\x1b" not in ended.out
    assert "INFO" not in ended.out

    files = {path.name for path in folder.iterdir()}
    assert files >= {"config.json", "history.jsonl", "summary.json", "model.safetensors", "accuracy.png", "clients.png"}
    run_config = json.loads((folder / "config.json").read_text())["run_config"]
    assert run_config["craft.server-lr"] == 0.3
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["rounds_succeeded"]) == ("completed", 5)
    assert len((folder / "history.jsonl").read_text().splitlines()) == 5
    assert "Starting CRAFT strategy" in (folder / "run.log").read_text()
    assert list(shell.user.iterdir()) == [shell.user / "out"]
    assert shell.left_over() == []


def test_both_engines_compute_the_same_bits(shell):
    """SCAFFOLD, whose clients keep state, and an evaluation on data held back."""
    summaries = []
    for engine in ("ray", "in-process"):
        ended = shell.run(
            *("-c", "algorithm=scaffold num-clients=4 num-server-rounds=3 fraction-train=0.5 train.device=cpu"),
            *("-c", "dataset.validation-fraction=0.2", "--engine", engine),
        )
        assert ended.code == 0, ended.err
        folder = Path(ended.out.splitlines()[-1])
        summary = json.loads((folder / "summary.json").read_text())
        summaries.append({name: summary[name] for name in ("model_sha256", "final", "validation", "bytes")})
    assert summaries[0] == summaries[1]
    assert shell.left_over() == []


def test_the_code_of_the_given_app_runs_and_its_failure_is_ours(shell):
    # The clients of a changed copy fail. Were they to import this checkout instead, which is on the PYTHONPATH, is
    # installed and was run before, they would succeed.
    app = shell.folder / "copy"
    app.mkdir()
    shutil.copy(ROOT / "pyproject.toml", app)
    for package in ("fedstrat", "server_app", "client_app"):
        shutil.copytree(ROOT / package, app / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (app / "fedstrat/client.py").open("a") as file:
        file.write('\n\ndef train(*_, **__):\n    raise RuntimeError("the changed copy speaks")\n')
    with (app / "server_app/app.py").open("a") as file:
        file.write('\nprint("fedstrat from", fedstrat.__file__)\n')

    ended = shell.run("--app", str(app), "-c", "num-clients=2 fraction-train=1.0 train.device=cpu max-failed-rounds=1")
    assert ended.code == 1
    assert "error: the run ended as finished:failed: " in ended.err
    assert "the changed copy speaks" in ended.err
    assert "Traceback" not in ended.out + ended.err
    (where,) = [line for line in ended.out.splitlines() if line.startswith("fedstrat from ")]
    assert str(shell.folder / "fedstrat-") in where  # unpacked from the bundle of this run
    folder = Path(ended.out.splitlines()[-1])
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
    assert shell.left_over() == []


def test_ctrl_c_ends_everything(shell):
    with shell.start("-c", "num-clients=2 num-server-rounds=100000 train.device=cpu fraction-evaluate=0.0") as process:
        for line in process.stdout:
            if line.startswith("round "):
                break
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 128 + signal.SIGINT
    assert "error: ended by SIGINT" in err
    assert "Traceback" not in err
    (folder,) = (shell.user / "results").iterdir()
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    assert shell.left_over() == []


def test_a_named_connection_is_used_and_left_running(shell):
    with LocalSuperLink({**shell.environment, "FEDSTRAT_RESULTS": str(shell.folder / "r")}) as superlink:
        shell.environment["FLWR_HOME"] = str(superlink.folder / "home")
        ended = shell.run(CONNECTION, "-c", "num-clients=3 num-server-rounds=2 algorithm=fedavg")
        assert ended.code == 0, ended.err
        folder = Path(ended.out.splitlines()[-1])
        assert folder.parent == shell.folder / "r"
        assert json.loads((folder / "summary.json").read_text())["rounds_succeeded"] == 2
        with socket.create_connection(("127.0.0.1", superlink.port), timeout=5.0):
            pass
    assert shell.left_over() == []


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("craft.server-rl=0.3", "did you mean 'craft.server-lr'?"),
        ("num-server-rounds=many", "'num-server-rounds'"),
        pytest.param(
            "train.device=cuda",
            "no CUDA device",
            marks=pytest.mark.skipif(bool(capacity.gpu_memory()), reason="there is a GPU"),
        ),
    ],
)
def test_a_wrong_request_ends_before_anything_starts(shell, setting, complaint):
    ended = shell.run("-c", setting)
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err.startswith("error: ")
    assert len(ended.err.splitlines()) == 1
    assert complaint in ended.err
    assert ended.seconds < 15.0
    assert list(shell.user.iterdir()) == []
