"""``fedstrat run --ray-address``: a simulation on a Ray cluster of two nodes that somebody else started."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedstrat.runs import cluster, warden
from tests.e2e.test_run import LIMIT_SECONDS, ROOT, Shell

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes that stay in /proc"),
]

# Two nodes with one CPU each: two clients at once need both. Ray chooses every port.
CLUSTER = """
import signal
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
cluster.wait_for_nodes(60)
print(cluster.address, flush=True)
signal.pause()
"""

WITNESS = """
import os, pathlib, ray
if ray.is_initialized():
    place = pathlib.Path(os.environ["WITNESSES"], ray.get_runtime_context().get_node_id())
    place.touch()
"""


@pytest.fixture
def shell() -> Iterator[Shell]:
    folder = Path(tempfile.mkdtemp(prefix="f")).resolve()  # short, for Ray's sockets
    try:
        yield Shell(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def address(shell: Shell) -> Iterator[str]:
    """A cluster of two nodes; its end is the warden's, which finds all that Ray starts."""
    folder = shell.folder / "ray"
    folder.mkdir()
    (shell.folder / "nodes").mkdir()
    environment = {**os.environ, "RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
    with (shell.folder / "cluster.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-I", warden.__file__, str(folder), sys.executable, "-c", CLUSTER],
            env={**environment, "WITNESSES": str(shell.folder / "nodes")},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    try:
        said = process.stdout.readline().strip()
        assert said, (shell.folder / "cluster.log").read_text()
        yield said
    finally:
        process.stdin.close()
        process.wait(60.0)
        process.stdout.close()


def changed_app(shell: Shell) -> Path:
    """The app, with a ClientApp that leaves a file named after the Ray node that it runs on."""
    app = shell.folder / "app"
    app.mkdir()
    shutil.copy(ROOT / "pyproject.toml", app)
    for package in ("fedstrat", "server_app", "client_app"):
        shutil.copytree(ROOT / package, app / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (app / "client_app/app.py").open("a") as file:
        file.write(WITNESS)
    return app


def test_both_nodes_run_clients_the_bits_are_the_same_and_the_cluster_stays(shell: Shell, address: str) -> None:
    assert cluster.nodes(address) == [(1, 0), (1, 0)]
    shell.environment["WITNESSES"] = str(shell.folder / "nodes")
    request = (
        *("--app", str(changed_app(shell))),
        *("-c", "algorithm=scaffold num-clients=6 fraction-train=1.0 num-server-rounds=2 train.device=cpu seed=5"),
    )
    there = shell.run(*request, "--ray-address", address)
    assert there.code == 0, there.err
    assert "clients at once: 2 (1 CPU core each, 2 Ray nodes)" in there.out
    assert len(list((shell.folder / "nodes").iterdir())) == 2
    assert cluster.nodes(address) == [(1, 0), (1, 0)]

    here = shell.run(*request)
    assert here.code == 0, here.err
    models = [Path(ended.out.splitlines()[-1]) / "model.safetensors" for ended in (there, here)]
    assert models[0].read_bytes() == models[1].read_bytes()


def test_a_cluster_that_isnt_there_is_an_error_before_anything_starts(shell: Shell) -> None:
    ended = shell.run("--ray-address", "127.0.0.1:1", "-c", "num-clients=2")
    assert ended.code == 2
    assert ended.err.startswith("error: can't connect to the Ray cluster at 127.0.0.1:1: ")
    assert "ray start --address=127.0.0.1:1" in ended.err
    assert ended.seconds < LIMIT_SECONDS
    assert shell.left_over() == []
