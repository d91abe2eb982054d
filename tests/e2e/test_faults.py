"""What machines do: nodes killed and restarted, a SuperLink killed, two nodes of one name, a full disk."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fedstrat.deploy.keyring import Keyring
from tests.e2e.federation import CONNECTION, LIMIT_SECONDS, Ended, Federation, Service, finish, running
from tests.e2e.test_grpc import client_states, in_process

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes that stay in /proc"),
]

SETTINGS = {
    "algorithm": "scaffold",
    "num_clients": 2,
    "fraction_train": 1.0,
    "fraction_evaluate": 0.0,
    "train__device": "cpu",
    "model__hidden": "16",
    "round_timeout": 60.0,
}


@pytest.fixture
def federation() -> Iterator[Federation]:
    with running() as made:
        yield made


def history(federation: Federation) -> list[dict[str, Any]]:
    """The finished rounds of the only run."""
    files = list(federation.results.glob("*/history.jsonl"))
    return [json.loads(line) for line in files[0].read_text().splitlines()] if files else []


def wait_until(holds: Callable[[], bool], what: str, seconds: float = LIMIT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}"
        time.sleep(0.1)


def wait_for_training(node: Service, server_round: int) -> None:
    """Wait until a node has received the training message of a round."""

    def receives() -> bool:
        begun = node.log.rpartition(f"ROUND {server_round}]")
        return bool(begun[1]) and "Receiving: train message" in begun[2]

    wait_until(receives, f"{node.name} trains in round {server_round}")


def kill(*services: Service) -> None:
    for service in services:
        service.end(signal.SIGKILL)


def restart_until_it_stays(node: Service, seconds: float = 120.0) -> int:
    """What ``restart: unless-stopped`` does; returns how many starts were refused."""
    deadline = time.monotonic() + seconds
    refused = 0
    while time.monotonic() < deadline:
        node.start()
        try:
            assert node.process is not None
            node.process.wait(10.0)
        except subprocess.TimeoutExpired:
            return refused
        refused += 1
        node.end()
    raise AssertionError(f"{node.name} was refused {refused} times: {node.log}")


def ended(process: subprocess.Popen[str]) -> Ended:
    return finish(process, LIMIT_SECONDS, time.monotonic())


@pytest.mark.parametrize("algorithm", ["scaffold", "fedcspack"])
def test_a_killed_node_is_named_and_comes_back_with_its_state(federation, tmp_path, algorithm):
    services = federation.services
    node, executor = services["site-b"], services["site-b-executor"]
    settings = {**SETTINGS, "algorithm": algorithm, "num_server_rounds": 8}
    with federation.submit(**settings) as process:
        wait_for_training(node, 2)
        kill(node, executor)
        wait_until(lambda: len(history(federation)) >= 2, "round 2 ends without the killed node")
        restart_until_it_stays(node)
        executor.start()
        run = ended(process)
    assert run.code == 0, run.said
    rounds = history(federation)
    assert [line["round"] for line in rounds] == list(range(1, 9))
    assert rounds[0]["trained"] == ["site-a", "site-b"]
    assert rounds[1]["trained"] == ["site-a"]
    assert list(rounds[1]["failed"]) == ["site-b"]
    back = [line for line in rounds[2:] if "site-b" in line["trained"]]
    assert back, rounds
    assert back[-1]["failed"] == {}
    assert "lost" not in json.dumps(rounds)

    # In one process, with the same replies missing: the same model and the same states (c_i, personal models), bit for
    # bit. A state that had begun afresh, or was a round ahead, would show.
    assert rounds[-1]["trained"] == ["site-a", "site-b"]
    missing = [(line["round"], "site-b") for line in rounds if "site-b" not in line["trained"]]
    alone = in_process(federation, tmp_path, {**settings, "round_timeout": 0.01}, missing)
    (there,) = federation.results.iterdir()
    assert (there / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()
    assert set(client_states(tmp_path / "state")) == set(client_states(federation.folder / "state"))
    assert client_states(tmp_path / "state") == client_states(federation.folder / "state")


def test_a_killed_superlink_comes_back_and_the_run_goes_on(federation):
    superlink = federation.services["superlink"]
    with federation.submit(**SETTINGS, num_server_rounds=4) as process:
        wait_until(lambda: len(history(federation)) >= 1, "round 1 ends")
        kill(superlink)
        time.sleep(3.0)
        superlink.start()
        federation.wait_for("superlink")
        run = ended(process)
    assert run.code == 0, run.said
    rounds = history(federation)
    assert [line["aggregated"] for line in rounds] == [True] * 4
    assert rounds[-1]["trained"] == ["site-a", "site-b"]


def test_of_two_nodes_with_one_name_the_second_is_left_out(federation):
    Keyring(federation.keys).make(["site-c"])
    registered = federation.fedstrat("keys", "register", CONNECTION, "--operator", str(federation.keys / "operator"))
    assert registered.code == 0, registered.said
    federation.start_node("site-c", config=federation.node_config("site-b"))
    federation.wait_for("site-c")
    federation.start_executor("site-c")
    time.sleep(2.0)
    run = federation.run(**{**SETTINGS, "num_clients": 3}, num_server_rounds=1)
    assert run.code == 0, run.said
    assert "is left out: its client id 'site-b' is that of node" in run.said
    assert history(federation)[0]["trained"] == ["site-a", "site-b"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_is_a_clear_error_and_the_old_state_stays(federation):
    where = federation.folder / "state/site-b"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(where)], check=False)
    if mounted.returncode:
        pytest.skip("can't mount here")
    try:
        with federation.submit(**SETTINGS, num_server_rounds=3) as process:
            wait_until(lambda: len(history(federation)) >= 1, "round 1 ends")
            (where / "filler").write_bytes(b"")
            with (where / "filler").open("wb", buffering=0) as filler:
                try:
                    while True:
                        filler.write(bytes(4096))
                except OSError:
                    pass
            run = ended(process)
        rounds = history(federation)
        assert run.code == 0, run.said
        assert "client state of round" in json.dumps(rounds[-1]["failed"])
        assert "No space left on device" in json.dumps(rounds[-1]["failed"])
        assert "the state before is intact" in json.dumps(rounds[-1]["failed"])
        assert rounds[-1]["trained"] == ["site-a"]
        assert list(where.rglob("*.safetensors"))
    finally:
        subprocess.run(["umount", str(where)], check=True)
