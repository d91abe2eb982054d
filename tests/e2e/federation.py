"""Real processes on this machine: a SuperLink, its executor, and SuperNodes with theirs, as in a deployment."""

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from fedstrat.deploy.keyring import Keyring
from fedstrat.runs.flowercli import NO_TALKING, executable, scripts_first

ROOT = Path(__file__).resolve().parents[2]
CONNECTION = "real"
START_SECONDS = 90.0  # on a busy machine; an idle one needs 5
STOP_SECONDS = 20.0
LIMIT_SECONDS = 900.0  # where many share the machine; an idle one needs 100
SAMPLES = 150


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def said(self) -> str:
        return self.out + self.err


def finish(process: subprocess.Popen[str], seconds: float, began: float) -> Ended:
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise
    return Ended(process.returncode, out, err, time.monotonic() - began)


@dataclass
class Service:
    """One process in a session of its own, and its log."""

    name: str
    command: list[str]
    environment: Mapping[str, str]
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def log_file(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def start(self) -> "Service":
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=dict(self.environment),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def wait(self, seconds: float = START_SECONDS) -> int:
        """Wait until it ends by itself."""
        assert self.process is not None
        return self.process.wait(seconds)

    def end(self, number: int = signal.SIGTERM) -> int:
        """End the process and all that it started: first by the given signal, at last by SIGKILL."""
        if self.process is None:
            return 0
        self._signal(number)
        try:
            code = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            code = self.process.wait(STOP_SECONDS)
        self._signal(signal.SIGKILL)  # children that outlived it
        self.process = None
        return code

    def _signal(self, number: int) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)  # its own group: it began a session


@dataclass
class Federation:
    """The processes of one deployment in one folder: keys, logs, data, states, results."""

    folder: Path
    nodes: tuple[str, ...]
    services: dict[str, Service] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys = self.folder / "keys"
        self.home = self.folder / "flwr"
        self.results = self.folder / "results"
        self.environment = scripts_first(os.environ) | NO_TALKING
        self.environment |= {
            "FLWR_HOME": str(self.home),
            "HOME": str(self.folder),
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **self.variables,
        }
        for variable in ("NO_PROXY", "no_proxy"):
            self.environment[variable] = ",".join(filter(None, [os.environ.get(variable), "127.0.0.1,localhost"]))

    # --- what it needs ------------------------------------------------------------------------------------

    def prepare(self) -> None:
        self.home.mkdir()
        Keyring(self.keys).make(self.nodes)
        self.ports = {name: free_port() for name in ("fleet", "superlink", *self.nodes)}
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "127.0.0.1:{self.ports["superlink"]}"\n'
            f'root-certificates = "{self.keys}/operator/ca.crt"\n'
        )
        for index, node in enumerate(self.nodes):
            self.make_data(node, index)
            (self.folder / "state" / node).mkdir(parents=True)

    def make_data(self, node: str, index: int) -> None:
        """Private data of a node: digits, some classes more than others."""
        digits = load_digits()
        order = np.argsort(digits.target + 0.01 * np.arange(len(digits.target)) % 7, kind="stable")
        chosen = np.roll(order, -index * 500)[:SAMPLES]
        x = (digits.images[chosen, np.newaxis] / 16).astype(np.float32)
        where = self.folder / "data" / node
        where.mkdir(parents=True)
        np.savez(where / "train.npz", x=x, y=digits.target[chosen].astype(np.int64), num_classes=10)

    def node_config(self, node: str, state: Path | None = None) -> dict[str, str]:
        return {
            "client-id": node,
            "dataset.dir": str(self.folder / "data" / node),
            "state-dir": str(state or self.folder / "state" / node),
        }

    # --- processes ----------------------------------------------------------------------------------------

    def service(self, name: str, *command: str) -> Service:
        service = Service(name, [executable(command[0]), *command[1:]], self.environment, self.folder)
        self.services[name] = service
        return service

    def start_superlink(self) -> None:
        keys = self.keys / "superlink"
        self.service(
            "superlink",
            "flower-superlink",
            *("--ssl-ca-certfile", f"{keys}/ca.crt"),
            *("--ssl-certfile", f"{keys}/server.crt"),
            *("--ssl-keyfile", f"{keys}/server.key"),
            "--enable-supernode-auth",
            "--disable-runtime-dependency-installation",
            *("--isolation", "process"),
            *("--superexec-auth-secret-file", f"{keys}/executor.secret"),
            *("--host", "127.0.0.1", "--port", str(self.ports["superlink"])),
            *("--fleet-api-address", f"127.0.0.1:{self.ports['fleet']}"),
            *("--database", str(self.folder / "superlink.db")),
        ).start()
        self.wait_for("superlink")

    def start_executor(self, of: str) -> None:
        self.service(
            f"{of}-executor",
            "flower-superexec",
            *("--root-certificates", f"{self.keys}/{of}-executor/ca.crt"),
            *("--runtime-api-address", f"127.0.0.1:{self.ports[of]}"),
            *("--superexec-auth-secret-file", f"{self.keys}/{of}-executor/executor.secret"),
        ).start()

    def start_node(self, node: str, *, keys: Path | None = None, config: Mapping[str, str] | None = None) -> Service:
        keys = keys or self.keys / node
        self.ports.setdefault(node, free_port())
        pairs = " ".join(f'{key}="{value}"' for key, value in (config or self.node_config(node)).items())
        return self.service(
            node,
            "flower-supernode",
            *("--root-certificates", f"{keys}/ca.crt"),
            *("--superlink", f"127.0.0.1:{self.ports['fleet']}"),
            *("--auth-supernode-private-key", f"{keys}/auth.key"),
            *("--isolation", "process"),
            *("--ssl-ca-certfile", f"{keys}/ca.crt"),
            *("--ssl-certfile", f"{keys}/server.crt"),
            *("--ssl-keyfile", f"{keys}/server.key"),
            *("--superexec-auth-secret-file", f"{keys}/executor.secret"),
            *("--host", "127.0.0.1", "--port", str(self.ports[node])),
            *("--node-config", pairs),
        ).start()

    def start(self) -> None:
        """Bring all of it up, and wait until every node is connected."""
        self.start_superlink()
        registered = self.fedstrat("keys", "register", CONNECTION, "--operator", str(self.keys / "operator"))
        assert registered.code == 0, registered.said
        self.start_executor("superlink")
        for node in self.nodes:
            self.start_node(node)
        for node in self.nodes:
            self.wait_for(node)
            self.start_executor(node)

    def end(self) -> None:
        for service in reversed(list(self.services.values())):
            service.end()

    def wait_for(self, name: str) -> None:
        """Wait until a service's HTTPS port answers."""
        trust = ssl.create_default_context(cafile=str(self.keys / "operator/ca.crt"))
        deadline = time.monotonic() + START_SECONDS
        process = self.services[name].process
        while time.monotonic() < deadline:
            assert process is not None
            assert process.poll() is None, f"{name} ended: {self.services[name].log}"
            try:
                with urllib.request.urlopen(f"https://127.0.0.1:{self.ports[name]}/health", timeout=2, context=trust):
                    return
            except OSError:
                time.sleep(0.1)
        raise AssertionError(f"{name} didn't answer in {START_SECONDS:g} s: {self.services[name].log}")

    # --- what a user does ---------------------------------------------------------------------------------

    def command(self, *arguments: str) -> subprocess.Popen[str]:
        """Start the command line, as a user would."""
        return subprocess.Popen(
            [sys.executable, "-m", "fedstrat.cli", *arguments],
            env=dict(self.environment),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def fedstrat(self, *arguments: str, seconds: float = LIMIT_SECONDS) -> Ended:
        """Call the command line and wait for its end."""
        began = time.monotonic()
        with self.command(*arguments) as process:
            return finish(process, seconds, began)

    def submit(self, **settings: object) -> subprocess.Popen[str]:
        """Submit a run of this checkout's app, following it to its end; '_' and '__' mean '-' and '.'."""
        pairs = []
        for name, value in settings.items():
            key = name.replace("__", ".").replace("_", "-")
            pairs += ["-c", f'{key}="{value}"' if isinstance(value, str) else f"{key}={json.dumps(value)}"]
        return self.command(
            "run", CONNECTION, "--app", str(ROOT), "--results-dir", str(self.results), "--verbose", *pairs
        )

    def run(self, **settings: object) -> Ended:
        """Submit a run and wait for its end."""
        began = time.monotonic()
        with self.submit(**settings) as process:
            return finish(process, LIMIT_SECONDS, began)

    def left_over(self) -> list[str]:
        """Processes that still work in our folder or carry it in their command line."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                line = (entry / "cmdline").read_text().replace("\0", " ")
                where = str((entry / "cwd").readlink())
            except OSError:  # it has ended, or isn't ours to see
                continue
            if int(entry.name) != os.getpid() and (str(self.folder) in line or where.startswith(str(self.folder))):
                found.append(line)
        return found


@contextlib.contextmanager
def running(variables: Mapping[str, str] | None = None) -> Iterator[Federation]:
    """A federation of two nodes in a folder of its own; at the end no process of it may be left.

    ``variables`` are set in the environment of all of them.
    """
    folder = Path(tempfile.mkdtemp(prefix="fedstrat-e2e-")).resolve()
    made = Federation(folder, ("site-a", "site-b"), variables=variables or {})
    try:
        made.prepare()
        made.start()
        yield made
    finally:
        made.end()
        left = made.left_over()
        shutil.rmtree(folder, ignore_errors=True)
        assert left == []
