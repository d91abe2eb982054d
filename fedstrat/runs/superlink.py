"""A SuperLink of one's own for one local simulation."""

import contextlib
import http.client
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from fedstrat.errors import RunFailedError
from fedstrat.runs import warden
from fedstrat.runs.flowercli import NO_TALKING, FlowerCLI, executable, scripts_first

CONNECTION = "fedstrat"
_START_SECONDS = 90.0
_STOP_SECONDS = 60.0  # the warden's own limits come to 15 s, more on a busy machine
_POLL_SECONDS = 0.1
_ATTEMPTS = 3
_LOG_BYTES = 20_000
_SOCKET_PATH_BYTES = 104  # of a Unix socket's path on macOS; Linux allows 108
_RAY_SOCKET = "ray/session_2000-01-01_00-00-00_000000_0000000/sockets/plasma_store"


class LocalSuperLink:
    """Starts a SuperLink that simulates its nodes; at the end of the ``with`` block nothing of it is left.

    It has a private FLWR_HOME and Ray folder, so that nothing of an earlier run or of another Ray cluster
    gets in; an empty working directory, since Ray's workers import from there before they look into the app;
    and a free port.

    Args:
        environment: Environment variables to start from.
        ray_address: ``HOST:PORT`` of a Ray cluster to simulate on, which is left as it is; "": Ray is started, too.

    Attributes:
        folder: Its temporary folder.
        port: Its port on 127.0.0.1.
    """

    def __init__(self, environment: Mapping[str, str], ray_address: str = "") -> None:
        self._given, self._ray_address = environment, ray_address

    def __enter__(self) -> Self:
        for attempt in range(1, _ATTEMPTS + 1):
            self.folder = _temporary_folder(sockets=not self._ray_address)
            self.port = _free_port()
            self._process = self._start()
            try:
                self._wait_until_ready()
            except BaseException as error:
                self._stop()
                # Between finding the port free and binding it, somebody else may have taken it.
                taken = isinstance(error, RunFailedError) and "address already in use" in str(error)
                if not taken or attempt == _ATTEMPTS:
                    raise
            else:
                break
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def cli(self) -> FlowerCLI:
        """Flower's commands against this SuperLink."""
        return FlowerCLI(CONNECTION, self._environment(), self.folder / "empty", patience=0.0)

    def _environment(self) -> dict[str, str]:
        environment = scripts_first(self._given) | NO_TALKING
        environment |= {
            "FLWR_HOME": str(self.folder / "home"),
            "RAY_USAGE_STATS_ENABLED": "0",
            "NO_PROXY": ",".join(filter(None, [self._given.get("NO_PROXY"), "127.0.0.1,localhost"])),
            "no_proxy": ",".join(filter(None, [self._given.get("no_proxy"), "127.0.0.1,localhost"])),
        }
        environment.pop("RAY_ADDRESS", None)  # a cluster is only used where it was asked for
        environment |= {"RAY_ADDRESS": self._ray_address} if self._ray_address else {"RAY_TMPDIR": str(self.folder)}
        # An entry that depends on the working directory means another place there.
        paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
        environment["PYTHONPATH"] = os.pathsep.join(str(Path(path).absolute()) for path in paths)
        return environment

    def _start(self) -> subprocess.Popen[bytes]:
        for name in ("home", "empty"):
            (self.folder / name).mkdir()
        config = f'[superlink]\ndefault = "{CONNECTION}"\n[superlink.{CONNECTION}]\n'
        config += f'address = "127.0.0.1:{self.port}"\ninsecure = true\n'
        (self.folder / "home/config.toml").write_text(config, encoding="utf-8")
        command = [executable("flower-superlink"), "--insecure", "--simulation"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        # Without a name, so that it can still be read when the warden has removed the folder.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed in _stop)
        return subprocess.Popen(  # noqa: S603  (Flower's command under our warden)
            [sys.executable, "-I", warden.__file__, str(self.folder), *command],
            env=self._environment(),
            cwd=self.folder / "empty",
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours to handle
        )

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                said = os.pread(self._log.fileno(), _LOG_BYTES, 0).decode("utf-8", "replace").strip()
                raise RunFailedError(f"Flower's SuperLink ended instead of starting; it said:\n{said}")
            if _answers(self.port):
                return
            time.sleep(_POLL_SECONDS)
        raise RunFailedError(f"Flower's SuperLink didn't answer within {_START_SECONDS:g} s of its start")

    def _stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # then it goes on by itself
            self._process.wait(_STOP_SECONDS)
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _temporary_folder(*, sockets: bool) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fedstrat-")).resolve()
    if not sockets or len(os.fsencode(folder / _RAY_SOCKET)) < _SOCKET_PATH_BYTES:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="fedstrat-", dir="/tmp")).resolve()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
