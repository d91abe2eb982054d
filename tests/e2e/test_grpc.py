"""Real nodes: gRPC with TLS and node authentication, processes apart, and the same bits as in one process."""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict

import client_app.app
import server_app.app
from fedstrat.deploy import preflight
from fedstrat.deploy.keyring import Keyring
from fedstrat.runs import config
from fedstrat.simulation import InProcessGrid
from tests.e2e.federation import CONNECTION, Federation, running

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes that stay in /proc"),
]

SETTINGS = {
    "num_clients": 2,
    "num_server_rounds": 2,
    "fraction_train": 1.0,
    "evaluate_every": 2,
    "seed": 7,
    "train__device": "cpu",
    "model__hidden": "16",
    "round_timeout": 120.0,
}


@pytest.fixture(scope="module")
def federation() -> Iterator[Federation]:
    with running() as made:
        yield made


class Losing(InProcessGrid):
    """Loses the training replies of some clients in some rounds."""

    lost: frozenset[tuple[int, str]] = frozenset()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [reply for reply in super().pull_messages(message_ids) if not self._is_lost(reply)]

    def _is_lost(self, reply: Message) -> bool:
        about = reply.content.config_records.get("client", {}) if reply.has_content() else {}
        return (about.get("trained-round"), about.get("client-id")) in self.lost


def in_process(
    federation: Federation, folder: Path, settings: dict[str, object], lost: Iterable[tuple[int, str]] = ()
) -> Path:
    """The same run through the same two apps, in this process; returns its results folder.

    ``lost`` holds the (round, client) pairs whose replies never arrive.
    """
    configs = [federation.node_config(node, folder / "state" / node) for node in federation.nodes]
    given = {name.replace("__", ".").replace("_", "-"): value for name, value in settings.items()}
    flat = {**config.defaults(), **given, "results-dir": str(folder / "results")}
    grid = Losing(client_app.app.app, len(configs), node_configs=configs, run_config=flat)
    grid.lost = frozenset(lost)
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=flat)
    server_app.app.app(grid=grid, context=context)
    assert grid.errors == []
    return folder / "results"


def recorded(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def client_states(folder: Path) -> dict[str, bytes]:
    """What the clients keep, by client and slot; the experiment's random id left out."""
    return {"/".join(path.parts[-2:]): path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}


@pytest.mark.parametrize(("algorithm", "share"), [("scaffold", 1.0), ("craft", 0.0)])
def test_the_same_bits_as_in_one_process(federation, tmp_path, algorithm, share):
    settings = {**SETTINGS, "algorithm": algorithm, "fraction_evaluate": share}
    ended = federation.run(**settings)
    assert ended.code == 0, ended.said
    folder = Path(ended.out.splitlines()[-1])
    assert folder.parent == federation.results
    assert "Fleet.PushMessages" in federation.services["superlink"].log

    alone = in_process(federation, tmp_path, settings)
    assert (folder / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()
    ours, theirs = recorded(folder), recorded(alone)
    assert [line["trained"] for line in ours] == [list(federation.nodes)] * 2
    for key in ("round", "trained", "train", "clients", "mean"):
        assert [line.get(key) for line in ours] == [line.get(key) for line in theirs]
    if algorithm == "scaffold":
        kept = client_states(federation.folder / "state")
        slots = ("accepted", "pending")
        assert set(kept) == {f"client-{node}/{slot}.safetensors" for node in federation.nodes for slot in slots}
        assert kept == client_states(tmp_path / "state")


def test_what_travels_is_grpc_over_tls(federation):
    trust = federation.keys / "operator/ca.crt"
    fleet = preflight.check(f"127.0.0.1:{federation.ports['fleet']}", trust)
    assert "speaks gRPC (HTTP/2)" in fleet
    assert "TLSv1.3" in fleet
    assert "HTTP/1.1" in preflight.check(f"127.0.0.1:{federation.ports['superlink']}", trust)
    superlink = federation.services["superlink"].log
    assert f"Starting Fleet API (gRPC-rere) on 127.0.0.1:{federation.ports['fleet']}" in superlink
    assert "Fleet.ActivateNode" in superlink


def test_an_unregistered_node_is_refused(federation):
    Keyring(federation.keys).make(["stranger"])
    federation.make_data("stranger", 2)
    stranger = federation.start_node("stranger")
    assert stranger.wait() != 0
    assert "Failed to activate SuperNode" in stranger.log


def test_registering_again_changes_nothing(federation):
    (federation.keys / "operator/nodes/stranger.pub").unlink(missing_ok=True)
    ended = federation.fedstrat("keys", "register", CONNECTION, "--operator", str(federation.keys / "operator"))
    assert ended.code == 0, ended.said
    assert [line.split(" as ")[0] for line in ended.out.splitlines()] == [
        f"{node}: registered before" for node in federation.nodes
    ]
    listed = federation.fedstrat("keys", "list", CONNECTION, "--operator", str(federation.keys / "operator"))
    assert [line.split()[:2] for line in listed.out.splitlines()] == [[node, "online"] for node in federation.nodes]


def test_a_superlink_of_another_authority_is_not_trusted(federation, tmp_path):
    Keyring(tmp_path).make([])
    ended = federation.fedstrat(
        *("keys", "check", f"127.0.0.1:{federation.ports['fleet']}"),
        *("--root-certificates", str(tmp_path / "operator/ca.crt")),
        *("--wait", "60"),
    )
    assert ended.code != 0
    assert "wasn't issued by the authority in" in ended.err
    assert ended.seconds < 15.0


def test_a_run_through_a_connection_with_another_authority_says_so(federation, tmp_path):
    Keyring(tmp_path).make([])
    wrong = tmp_path / "operator/ca.crt"
    settings = federation.home / "config.toml"
    before = settings.read_text()
    settings.write_text(before.replace(f"{federation.keys}/operator/ca.crt", str(wrong)))
    try:
        ended = federation.run(num_clients=2)
    finally:
        settings.write_text(before)
    assert ended.code == 2
    address = f"127.0.0.1:{federation.ports['superlink']}"
    assert f"the certificate of {address} " in ended.err
    assert f"wasn't issued by the authority in {wrong}" in ended.err
    assert f"fedstrat keys check {address} --root-certificates {wrong}" in ended.err
    assert ended.seconds < 15.0
